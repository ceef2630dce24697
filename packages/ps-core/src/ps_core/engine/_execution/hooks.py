"""Install the engine's hooks on a model, and remove them: one object holds them all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from operator import is_
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ps_core.engine._execution.compiled_blocks import OPTIMIZED_MODULE, CompiledBlocks
from ps_core.engine._execution.driver_protocols import Scheduler
from ps_core.engine._execution.end_management import ModelLifetime, return_parameters
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.module_guards import ModuleGuards
from ps_core.engine._execution.parameter_access import accept_gradient
from ps_core.engine._execution.parameters_added_later import CopiesOfAdded, is_new, take_in, train_frozen
from ps_core.engine._execution.pass_threads import FORWARD
from ps_core.engine._execution.state_dict import StateDictHooks, no_copies
from ps_core.engine._parameters.grouping import FLOATS, Grouping, name_as_in
from ps_core.engine._parameters.managed_parameter import LEAVES, ManagedParameter
from ps_core.engine._parameters.other_tensor_classes import FetchFirst, has_other_classes
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._parameters.saved_tensors import close_checkpoints, recomputing
from ps_core.engine._parameters.unmanaged import move_unmanaged
from ps_core.engine._support.interrupts import defer_interrupts, defer_interrupts_installing
from ps_core.engine._support.module_call import COMPILED_CALL_ATTRIBUTE, Call, ModuleCallWrapper
from ps_core.engine._support.precision_note import note_precision
from ps_core.engine._support.refuse_programs import (
    FAKE,
    PROXY,
    check_call,
    mode_of_kind,
    not_a_program,
    tracing_state,
    transforms,
)
from ps_core.engine._tracing.input_tensors import tensors_of

_CAST = (*FLOATS, torch.float64)
"""Types of inputs that are cast to the model's precision."""


class ModelHooks:
    """Hold one model's hooks. No class of PyTorch's or the user's is changed.

    The object holds no reference to a module. So a model without references is freed at once, with the engine's memory,
    even if its optimizer still exists. (A notebook's cell that is run again leaves such a model.)
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        *,
        group: Callable[[nn.Module], Grouping],
        cast: torch.dtype | None,
        accumulates: bool,
    ) -> None:
        """Make the hooks; ``group`` groups parameters that are not managed yet; ``accumulates``: groups have fp32
        sums.
        """
        self.engine = engine
        self.name = type(model).__name__
        self._model = weakref.ref(model)
        self._cast = cast
        self._group, self._accumulates = group, accumulates
        self._running = False
        self._around: ModuleCallWrapper | None = None
        self._blocks = CompiledBlocks(engine)
        self._handles: list[RemovableHandle] = []
        self._first = engine.records[0].name
        self._state_dict_hooks = StateDictHooks(model, engine.state_dicts, self._first)
        self._guards = ModuleGuards()
        self._owner_ids: list[int] = []
        self._parameters: list[nn.Parameter] = []
        """The parameters that `_look_at` found the last time."""
        self._frozen: list[ParamState] = []
        """Managed parameters that do not require gradients, so that they have no hook."""
        self._copies = CopiesOfAdded()
        self._computes_with_copies = False
        """True if the call that begins computes with copies of added parameters."""
        self._lifetime = ModelLifetime(model, engine)

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler that chooses the drivers of the model's passes."""
        return self.engine.passes.scheduler

    @defer_interrupts_installing
    def install(self) -> None:
        """Install all hooks."""
        model = self._model()
        assert model is not None, "it is being put under management"
        self._owner_ids, self._parameters, _ = _look_at(model)
        self._around = ModuleCallWrapper(model, self._run, self._before_script)
        self._blocks.refresh(model)
        self.install_on_modules()
        hang = self._handles.append  # store each handle at once: a later registration may fail
        for record in self.engine.records:
            if record.parameter.requires_grad:
                hang(_first_hook(record.parameter, accept_gradient))
            else:
                self._frozen.append(record)
        self._lifetime.watch(model)

    def install_on_modules(self) -> None:
        """Install the hooks of state dicts and the guards on all modules; the model cannot be copied until they go."""
        model = self._model()
        assert model is not None, "it is under management"
        self._state_dict_hooks.install()
        self._guards.install(model)

    def remove_from_modules(self) -> None:
        """Remove the hooks of state dicts and the guards from all modules."""
        self._state_dict_hooks.remove()
        self._guards.remove(self._model())

    @property
    def shared(self) -> tuple[object, ...]:
        """Return the objects that a fake copy of the model shares with it: the hooks refer to them."""
        return self.engine, self, self._state_dict_hooks

    @property
    def has_compiled_blocks(self) -> bool:
        """Return True if ``torch.compile`` compiled a part of the model."""
        return bool(self._blocks.blocks)

    def remove(self) -> None:
        """Remove all hooks."""
        if self._around is not None:
            self._around.remove()
        self._blocks.remove()
        self.remove_from_modules()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise no_copies(self._first, self.name)

    # Forward.

    def _run(self, call: Call, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run the root module's call within a pass."""
        model = self._model()
        assert model is not None, "it is being called"
        if (
            transforms() is not None
            or mode_of_kind(FAKE) is not None
            or mode_of_kind(PROXY) is not None
            or tracing_state() is not None
        ):
            if self.engine.usability.materializing:
                return self._call(call, args, kwargs)
            check_call(self.name)
        threads, me = self.engine.passes.threads, get_ident()
        nested = self._running and threads.inside.get(FORWARD) == me
        try:
            # Inlined, not methods of `threads`: this runs in every forward.
            if not nested and (threads.inside.setdefault(FORWARD, me) != me or threads.backward):
                threads.check(FORWARD)
            if self._check_parameters(model) or self._blocks.blocks:
                self._blocks.refresh(model)
            if nested:
                return self._call(call, args, kwargs)
            self.engine.await_forward((args, kwargs))
            self.engine.passes.scheduler.before_forward(model, args, kwargs)
            depth = self.engine.saved.depth
            frozen = len(self._frozen) == len(self.engine.records)
            evaluates = frozen and not any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))
            try:
                self._enter(model, evaluates=evaluates)
                result = self._call(call, args, kwargs)
                self._end_forward(depth)
            except BaseException as error:
                self._break_off(depth, error)
                self.engine.store.device.raise_out_of_memory(error)
                note_precision(error, {group.dtype for group in self.engine.groups})
                raise
            return result
        finally:
            if not nested and threads.inside.get(FORWARD) == me:
                del threads.inside[FORWARD]

    def _before_script(self) -> None:
        if not self.engine.usability.materializing:
            raise not_a_program()

    @defer_interrupts
    def _enter(self, model: nn.Module, *, evaluates: bool) -> None:
        self._running = True
        self.engine.enter(evaluates=evaluates)
        if self._computes_with_copies:
            self._copies.put(model, self.engine.store.device.torch_device, self._cast)

    @defer_interrupts
    def _end_forward(self, depth: int) -> None:
        self._running = False
        if self._copies.places:
            self._copies.take_out()
        self.engine.saved.pop_to(depth)
        self.engine.end_root_forward()

    @defer_interrupts
    def _break_off(self, depth: int, error: BaseException) -> None:
        self._running = False
        if self._copies.places:
            self._copies.take_out()
        close_checkpoints(error)
        self.engine.saved.pop_to(depth)
        self.engine.abort()

    def _call(self, call: Call, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call the module with inputs cast to the precision, within the pass, so that their bytes are counted."""
        if self._cast is not None:
            args, kwargs = _cast(args, self._cast), _cast(kwargs, self._cast)
        plain = LEAVES.issuperset(map(type, args)) and LEAVES.issuperset(map(type, kwargs.values()))
        if not plain and has_other_classes((*args, *kwargs.values())):
            with FetchFirst():
                return call(*args, **kwargs)
        return call(*args, **kwargs)

    def _check_parameters(self, model: nn.Module) -> bool:
        """Manage parameters that were added or unfrozen since the last pass; return True if blocks are compiled.

        Nothing is changed while the model runs, while backward repeats its forward, or while `materialized` lasts.
        """
        between = not self._running and (torch._C._current_graph_task_id() == -1 or not recomputing())
        between = between and not self.engine.usability.materializing  # where parameters are ordinary ones
        owner_ids, parameters, has_compiled = _look_at(model)
        self._computes_with_copies = False
        if between and not (owner_ids == self._owner_ids and all(map(is_, parameters, self._parameters))):
            if self._may_be_alone() and any(map(is_new, parameters)):
                self._computes_with_copies = True
            else:
                self._manage(model, owner_ids, parameters)
        for record in self._frozen:
            if record.parameter.requires_grad and between and torch.is_grad_enabled():
                self._train_frozen()
                break
        return has_compiled

    def _may_be_alone(self) -> bool:
        """Return True if no other rank need make this call: without a plan, one may evaluate by itself."""
        several = self.engine.together is not None and self.scheduler.training
        return several and self.scheduler.plan is None and not torch.is_grad_enabled()

    def _manage(self, model: nn.Module, owner_ids: list[int], parameters: list[nn.Parameter]) -> None:
        """Manage those of the model's present parameters that are not managed yet."""
        self._lifetime.watch(model)
        name_as_in(model, self.engine.records)
        if any(map(is_new, parameters)):
            self._take_in(model)
        self._guards.install(model)
        self._owner_ids, self._parameters = owner_ids, parameters

    def name_records(self) -> None:
        """Rename records to the present names of their parameters, for names that the caller gives or gets."""
        model = self._model()
        if model is not None:
            name_as_in(model, self.engine.records)

    def manage_added(self) -> None:
        """Manage parameters that were added since the last pass, so that a checkpoint has them as parameters."""
        model = self._model()
        if model is not None and not self._running:
            owner_ids, parameters, _ = _look_at(model)
            self._manage(model, owner_ids, parameters)

    def manage_changes(self) -> None:
        """Manage parameters that were added, and train those unfrozen, since the last pass: checkpoints tell both."""
        self.manage_added()
        if self.scheduler.training and not self._running:
            self.train_unfrozen()

    def train_unfrozen(self) -> None:
        """Begin to train the parameters that were unfrozen since the last pass, if there are any."""
        if any(record.parameter.requires_grad for record in self._frozen):
            self._train_frozen()

    @defer_interrupts_installing
    def _train_frozen(self) -> None:
        """Begin to train the parameters that were unfrozen since the last pass."""
        engine = self.engine
        late = [record for record in self._frozen if record.parameter.requires_grad and not record.trainable]
        try:
            train_frozen(engine, late, accumulates=self._accumulates)
        finally:  # where there is room for some groups only, these are trained from now on
            for record in [record for record in self._frozen if record.trainable and record.parameter.requires_grad]:
                self._frozen.remove(record)
                self._handles.append(_first_hook(record.parameter, accept_gradient))

    @defer_interrupts_installing
    def _take_in(self, model: nn.Module) -> None:
        """Manage parameters that were added; a plain tensor in a parameter's place comes from functional_call."""
        engine = self.engine
        with torch.inference_mode(False), torch.no_grad():  # or the parameters would be inference tensors
            records = take_in(engine, model, self._group, accumulates=self._accumulates)
        for record in records:
            if record.parameter.requires_grad:
                self._handles.append(_first_hook(record.parameter, accept_gradient))
            else:
                self._frozen.append(record)
        move_unmanaged(model, engine.store.device.torch_device)
        self.remove_from_modules()
        self.install_on_modules()
        self._lifetime.watch(model)

    # The end.

    @defer_interrupts_installing
    def release(self, *, in_first_types: bool = False) -> None:
        """Return plain parameters on the CPU, in the computed type: other tiers may have too little memory.

        ``in_first_types``: in the types that they came with, from the masters where there are any.
        """
        return_parameters(self.engine, self._model(), self.remove, in_first_types=in_first_types)


def _first_hook(parameter: Any, hook: Any) -> RemovableHandle:
    """Register a hook that is called before the existing ones, which can then read the stored gradient."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    hooks = parameter._post_accumulate_grad_hooks
    for other in [key for key in hooks if key != handle.id]:
        hooks[other] = hooks.pop(other)  # autograd calls them in order of insertion, despite OrderedDict
    return handle


def _look_at(model: nn.Module) -> tuple[list[int], list[nn.Parameter], bool]:
    """Return the model's parameters, the id of each one's module, and whether any part is compiled.

    This is one walk without `modules()`, whose nested generators take several times as long.
    """
    owners: list[int] = []
    parameters: list[nn.Parameter] = []
    has_compiled, found, seen = False, [model], {model}
    for module in found:  # which grows meanwhile
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.append(id(module))
                parameters.append(parameter)
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
                if child.__dict__.get(COMPILED_CALL_ATTRIBUTE) is not None or type(child).__name__ == OPTIMIZED_MODULE:
                    has_compiled = True
    return owners, parameters, has_compiled


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments with floating-point tensors in another type; containers stay what they are."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in _CAST and not isinstance(value, ManagedParameter) else value
    if isinstance(value, dict):
        if not value:
            return value
        found = [_cast(each, dtype) for each in value.values()]
        if all(map(is_, value.values(), found)):
            return value
        made = copy(value)  # an OrderedDict, or the output of another model
        for key, each in zip(value, found, strict=True):
            made[key] = each
        return made
    if isinstance(value, tuple | list):
        found = [_cast(each, dtype) for each in value]
        if all(map(is_, value, found)):
            return value
        if isinstance(value, list):
            return found
        return value._make(found) if hasattr(value, "_make") else tuple(found)
    if is_dataclass(value) and not isinstance(value, type):
        given = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        changed = {name: each for name, one in given.items() if (each := _cast(one, dtype)) is not one}
        return replace(value, **changed) if changed else value
    return value
