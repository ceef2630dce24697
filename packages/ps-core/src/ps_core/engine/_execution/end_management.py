"""End the management of a model: return its parameters, or free the memory of a model that nothing refers to."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from threading import Thread

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ps_core._errors import DoesNotFit, InvalidInput, RanksDiverged
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.plan_driver import PlanDriver
from ps_core.engine._parameters.errors import changed_in_place
from ps_core.engine._parameters.managed_parameter import ManagedParameter, accept_changes, plain_value, unmanage
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._parameters.unmanaged import move_unmanaged
from ps_core.engine._support.interrupts import defer_interrupts_installing, uninstall


class ModelLifetime:
    """Free an engine's memory as soon as no module with managed parameters is left, although its optimizer is."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model, self._engine = weakref.ref(model), engine
        self._owners: set[int] = set()
        """Modules with managed parameters that are watched, by id."""

    @defer_interrupts_installing
    def watch(self, model: nn.Module) -> None:
        """Watch for the end of the modules that have managed parameters now."""
        for module in model.modules():
            managed = any(isinstance(parameter, ManagedParameter) for parameter in module._parameters.values())
            if managed and id(module) not in self._owners:
                self._owners.add(id(module))
                weakref.finalize(module, self._owner_died, id(module)).atexit = False

    def _owner_died(self, owner: int) -> None:
        """Note that a module with managed parameters was freed; with the last one, free the engine's memory."""
        self._owners.discard(owner)
        model = self._model()
        if not self._owners and model is not None:
            self.watch(model)  # others may have taken the parameters over
        if self._owners or self._engine.usability.released:
            return
        if self._engine.store.device.runs_here:  # this thread would wait for itself
            Thread(target=_free_on_new_thread, args=(self._engine,), name="ps_core end", daemon=True).start()
        else:
            _free_memory(self._engine)


def _free_on_new_thread(engine: Engine) -> None:
    engine.store.device.bind_thread()
    _free_memory(engine)


def _free_memory(engine: Engine) -> None:
    """Release all chunks and slots; nothing can use the parameters any more.

    The garbage collector may call this within any code, so modes of PyTorch that are on there must see none of it.
    """
    engine.passes.nonmodel.stop()  # the last backward pass may have left its mode on
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        _free_tiers(engine)


def _free_tiers(engine: Engine) -> None:
    forked = engine.store.forked  # then the tiers are the parent's
    engine.usability.mark_released()
    engine.residency.exposed.clear()
    if not forked:
        if engine.speculation is not None:
            engine.speculation.free()
        engine.store.end_work()
    for group in engine.groups:
        for record in group.tensors:
            record.mark_discarded()
            accept_changes(record)
            engine.residency.unbind(record)
        if not forked:
            engine.residency.release_chunks(group)
    if engine.passes.recording is not None:
        uninstall()
    if not forked:
        if isinstance(engine.passes.driver, PlanDriver):
            engine.passes.driver.release_slots()
        engine.store.close()


def return_parameters(
    engine: Engine, model: nn.Module | None, remove_hooks: Callable[[], None], *, in_first_types: bool = False
) -> None:
    """Make plain parameters on the CPU, in the computed type: other tiers may have too little memory.

    ``in_first_types``: in the types that they came with, from the masters where there are any. ``remove_hooks`` is
    called when nothing can fail any more. Warnings name the caller of the caller's caller.
    """
    if torch._C._current_graph_task_id() != -1:
        raise InvalidInput("release(model) inside a backward pass: call it after backward has returned")
    engine.usability.check_not_materialized("release(model)")
    worker = engine.store.device.worker
    failure = None if worker is None else worker.forget_failure()
    read = engine.read if failure is None else engine.read_master
    if in_first_types:
        read = engine.read_in_first_type
    parted = _forget_pass_and_gradients(engine)
    engine.residency.exposed.check()
    for record in dict.fromkeys(engine.residency.pop_tampered()):
        written = changed_in_place(record)
        warnings.warn(f"release(model) goes without what was written: {written}", stacklevel=5)
    engine.usability.mark_released()
    remove_hooks()
    lost: dict[str, RanksDiverged] = {}
    for group in engine.groups:
        for record in group.tensors:
            value = _read_unless_lost(record, read, lost)
            engine.residency.unbind(record)
            unmanage(record.parameter, value)
        engine.residency.release_chunks(group)
    if isinstance(engine.passes.driver, PlanDriver):
        engine.passes.driver.release_slots()  # of a pass that broke off
    if model is not None:
        move_unmanaged(model, torch.device("cpu"))
    engine.store.close()
    for name, error in lost.items():
        warnings.warn(
            f"release(model) freed the memory, but parameters from {name!r} on are not-a-number, for other ranks have "
            f"parts of them: build the model again, and load a checkpoint; {error}",
            stacklevel=5,
        )
    if parted is not None and not lost:
        warnings.warn(
            "release(model) after ranks did different things: parameters may be a mixture of these, so load a "
            f"checkpoint; {parted}",
            stacklevel=5,
        )
    if failure is not None:
        warnings.warn(
            "release(model) after work of the processor failed: parameters are a mixture of old and new, so load a "
            f"checkpoint; it failed with {type(failure).__name__}: {failure}",
            stacklevel=5,
        )


def _forget_pass_and_gradients(engine: Engine) -> RanksDiverged | None:
    """End what is open before a release; return the error if other ranks do not take part, or did other things."""
    engine.saved.pop_to(0)  # whatever an interrupt left
    try:
        with engine.gradients.forgetting():
            try:
                engine.finish_pass()
            except DoesNotFit:  # the sums that other ranks wait for take memory, too
                engine.store.lift_budget()
                engine.finish_pass()
            engine.stepping.end()
            if engine.speculation is not None:
                engine.speculation.free()
            engine.discard_gradients()
        engine.updater.compare()
    except RanksDiverged as error:
        return error
    return None


def _read_unless_lost(
    record: ParamState, read: Callable[[ParamState], torch.Tensor], lost: dict[str, RanksDiverged]
) -> torch.Tensor:
    """Read a parameter; not-a-number from the first one on of which other ranks do not give their parts (``lost``)."""
    with torch.inference_mode(False):  # or the parameter could not be trained any more
        if not lost:
            try:
                return plain_value(record, read)
            except RanksDiverged as error:
                lost[record.name] = error
        return torch.full((), float("nan"), dtype=record.dtype, device="cpu").expand(record.shape)
