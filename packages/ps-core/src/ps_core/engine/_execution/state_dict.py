"""Copy one engine's parameters while the model's state dicts are made, and write them while one is loaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ps_core._errors import InvalidInput, UnsupportedParameter
from ps_core.engine._parameters.fp32_masters import Masters
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._parameters.state_dict_copies import StateCopies
from ps_core.engine._support.interrupts import defer_interrupts_installing


class StateDicts:
    """Return copies of parameters while a state dict is made; write to parameters while one is loaded."""

    def __init__(
        self,
        masters: Masters,
        *,
        read: Callable[[ParamState], torch.Tensor],
        write: Callable[[ParamState, torch.Tensor], None],
        end_pass: Callable[[], None],
        check_writes: Callable[[], None],
        compare: Callable[[], None],
    ) -> None:
        """Begin; ``read`` copies a parameter in its computed type; ``write`` replaces its master; see also `Engine`."""
        self._masters, self._read, self._write = masters, read, write
        self._end_pass, self._check_writes, self._compare = end_pass, check_writes, compare
        self.copies = StateCopies()
        self._making = 0
        """State dicts under construction, one within another: parameters are read as copies."""
        self._loading: tuple[object, object] | None = None
        """The running load: the module that it began with, and PyTorch's list of its missing keys."""
        self._on_meta = False
        """True where another rank keeps the values of state dicts (`rank0_only`)."""
        self.open = False
        """True while a state dict is made or loaded, or if one was broken off: then call `forget`."""

    def begin_making(self) -> None:
        """Begin a module's state dict, perhaps within another one: parameters are read as copies."""
        if not self._making:
            self._end_pass()
            self._check_writes()
            self.copies.finish()
        self._making += 1
        self.open = True

    def end_making(self) -> None:
        """End a module's state dict; with the outermost one, forget the copies."""
        self._making = max(0, self._making - 1)
        if not self._making:
            self.copies.finish()
            self.open = self._loading is not None

    def begin_loading(self, module: object, missing: object) -> None:
        """Begin to load a module's state dict, perhaps as a part of a larger one: parameters may be written.

        ``missing``: PyTorch's list of missing keys, which is one object for all modules of a load.
        """
        if self._loading is not None and self._loading[1] is missing:
            return
        self._end_pass()
        self.forget()  # even if an earlier one broke off
        self.copies.forget()
        self._loading, self.open = (module, missing), True

    def end_loading(self, module: object, missing: object) -> None:
        """Refuse changes in place again, if the load began with this module."""
        if self._loading is None or self._loading[0] is not module or self._loading[1] is not missing:
            return
        self._loading, self.open = None, self._making > 0
        self._masters.weights_loaded()
        self._compare()

    def forget(self) -> None:
        """End a state dict that was made or loaded, successfully or not: parameters are read normally again."""
        self._making, self._loading, self.open = 0, None, False
        self.copies.finish()

    def copy_of(self, record: ParamState) -> torch.Tensor | None:
        """Return a copy for the state dict under construction; None: there is none."""
        if self._making <= 0:
            return None
        copy = self.copies.get(record)
        if copy is not None:
            return copy
        with torch.inference_mode(False):  # an inference tensor has no version counter
            return self.copies.add(record, self.value(self._read(record)))

    def put_on_meta(self, *, on: bool) -> bool:
        """Set whether state dicts get tensors on ``meta`` in place of values; return the setting before."""
        before, self._on_meta = self._on_meta, on
        return before

    def value(self, copy: torch.Tensor) -> torch.Tensor:
        """Return the value, or a tensor without memory where another rank keeps the values of state dicts."""
        return copy.to("meta") if self._on_meta else copy

    def load(self, record: ParamState, value: torch.Tensor) -> bool:
        """Replace a parameter by its value in the state dict being loaded; return False if none is being loaded.

        A master that rounds to the value stays.
        """
        if self._loading is None:
            return False
        master = self._masters.weight(record, value)
        if master is not None:
            self._write(record, master)
        return True


class StateDictHooks:
    """The hooks on one model through which PyTorch makes and loads its state dicts."""

    def __init__(self, model: nn.Module, state_dicts: StateDicts, first: str) -> None:
        """Make the hooks; ``first``: a parameter's name, for the error when the model or its hooks are copied."""
        self._model, self._state_dicts = weakref.ref(model), state_dicts
        self._first, self._name = first, type(model).__name__
        self._handles: list[RemovableHandle] = []

    @defer_interrupts_installing
    def install(self) -> None:
        """Install the hooks on every module of the model."""
        model = self._model()
        assert model is not None, "it is under management"
        hang = self._handles.append
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks, and has no managed parameters
                continue
            part: Any = module  # half of torch's registering methods have no types
            hang(part.register_state_dict_pre_hook(self._collect))
            hang(part.register_state_dict_post_hook(partial(self._collected)))  # torch marks the function it is given
            hang(part.register_load_state_dict_pre_hook(self._load))
            hang(part.register_load_state_dict_post_hook(self._loaded))

    @defer_interrupts_installing
    def remove(self) -> None:
        """Remove the hooks, so that the model can be copied."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise no_copies(self._first, self._name)

    def _collect(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars:
            raise InvalidInput(
                "state_dict(keep_vars=True) asks for the parameters themselves, whose memory comes and goes: leave "
                "keep_vars out, or use materialized(model)"
            )
        self._state_dicts.begin_making()

    def _collected(self, *_: Any) -> None:
        self._state_dicts.end_making()

    def _load(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *more: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise InvalidInput(
                "load_state_dict(assign=True) would exchange parameters that are under management: leave assign out; "
                "values are copied into their chunks"
            )
        _, missing, *_ = more
        self._state_dicts.begin_loading(module, missing)

    def _loaded(self, module: nn.Module, incompatible: Any) -> None:
        self._state_dicts.end_loading(module, incompatible.missing_keys)


def no_copies(name: str, model: str) -> UnsupportedParameter:
    """Return the error for copying a model or its hooks; ``name``: one parameter's, for the message."""
    return UnsupportedParameter(
        f"{name!r} and all of this {model} are under management and cannot be copied or pickled: save "
        "model.state_dict(), copy.deepcopy(model) inside `with materialized(model):`, or release(model) first; for a "
        "moving average of the weights use WeightAverage(model)"
    )
