"""Give a model that was built on device ``meta`` its values, one parameter at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ps_core._errors import UnsupportedParameter
from ps_core.engine._parameters.meta_init.rebuild import ConstructorRecorder, tensors_of
from ps_core.engine._parameters.meta_init.tape_entries import ViewSpec


def initial_values(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield every parameter once with its value, in order of registration."""
    if not any(tensor.is_meta for _, tensor in tensors_of(model)):
        yield from ((name, parameter, parameter.detach()) for name, parameter in model.named_parameters())
        return
    rehearsal = ConstructorRecorder(model)
    values = _Values(rehearsal)
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = f"{prefix}.{name}" if prefix else name
            if parameter.is_meta:
                _make_real(full, parameter, values.initial_value(parameter), module)
            yield full, parameter, parameter.detach()
        for tensors in (module._buffers, vars(module)):
            values.fill(tensors)
    values.finish()


class _Values:
    """Compute the recorded initial values."""

    def __init__(self, rehearsal: ConstructorRecorder) -> None:
        self._sources = rehearsal.sources
        self._rehearsal = rehearsal  # It keeps the recorded memory alive.
        self._replay = rehearsal.tape.replay
        self._replay.expect(each for each in rehearsal.sources.values() if isinstance(each, ViewSpec))
        self._filled: dict[int, Tensor] = {}

    def initial_value(self, tensor: Tensor) -> Tensor:
        """Return the value of a tensor without memory; call this once for each tensor."""
        source = self._sources[id(tensor)]
        return self._replay.value(source) if isinstance(source, ViewSpec) else source.detach().clone()

    def fill(self, tensors: dict[str, Any]) -> None:
        """Replace tensors without memory, and the same tensor by the same one. (Not parameters: other objects refer to
        those.)
        """
        for name, tensor in list(tensors.items()):
            if isinstance(tensor, Tensor) and tensor.is_meta and not isinstance(tensor, nn.Parameter):
                if id(tensor) not in self._filled:
                    self._filled[id(tensor)] = self.initial_value(tensor)
                tensors[name] = self._filled[id(tensor)]

    def finish(self) -> None:
        """Draw the random numbers that are left."""
        self._replay.finish()


def _make_real(name: str, parameter: nn.Parameter, value: Tensor, module: nn.Module) -> None:
    """Put the value into the parameter object itself, since the model and other code refer to it."""
    real = torch.Tensor._make_subclass(type(parameter), value, parameter.requires_grad)
    vars(real).update(vars(parameter))
    # Swapping exchanges hooks too, so copy them first.
    real._backward_hooks = parameter._backward_hooks
    real._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    with _unreferenced(module):
        try:
            torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise UnsupportedParameter(
                f"the parameter {name!r} on meta cannot become real ({error}): build its module on the CPU"
            ) from None


@contextmanager
def _unreferenced(module: Any) -> Iterator[None]:
    """Remove the weak references of recurrent modules to their parameters in this context: those forbid swapping."""
    if not isinstance(module, nn.RNNBase):
        yield
        return
    module._flat_weight_refs = []
    yield
    module._flat_weight_refs = [None if each is None else weakref.ref(each) for each in module._flat_weights]
