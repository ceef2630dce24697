"""Turn managed parameters into ordinary ones, for a while or for good."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from ps_core._errors import InvalidInput
from ps_core._extents import Kind
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._execution.hooks import ModelHooks
from ps_core.engine._parameters.managed_parameter import (
    ManagedParameter,
    accept_changes,
    make_plain,
    plain_value,
    set_data,
    unmanage,
)
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._support.interrupts import defer_interrupts, defer_interrupts_installing, install, uninstall


def materialized(
    model: nn.Module, names: Iterable[str] | None = None, *, write: bool = False
) -> AbstractContextManager[nn.Module]:
    """Make parameters (all, or those named) ordinary ones for the block; with ``write``, keep changes to them.

    They are copies on the CPU that no budget counts. Written values go to the fp32 masters as they are. Elements that
    were not changed keep their masters, unrounded. Training inside the block raises. Where all parameters are ordinary
    ones, ``copy.deepcopy(model)`` gives a plain model, which is not under management.
    """
    return _MaterializedParameters(model, names, write=write)


class _MaterializedParameters(AbstractContextManager[nn.Module]):
    """Implement `materialized` as a class: an interrupt may come between a generator and its caller."""

    def __init__(self, model: nn.Module, names: Iterable[str] | None, *, write: bool) -> None:
        self._model, self._names, self._write = model, names, write
        self._engine: Engine | None = None
        self._hooks: ModelHooks | None = None
        """The model's hooks whose part for state dicts is removed for the block."""
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        """The modules' parameters, and their names there, as the block begins."""
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        """The modules' buffers, likewise."""
        self._given: dict[ParamState, torch.Tensor | None] = {}
        self._held: list[weakref.ref[nn.Parameter]] = []
        """Weak references make ``torch.utils.swap_tensors`` refuse: swapped parameters would lose their hooks."""

    def __enter__(self) -> nn.Module:
        try:
            self._begin()
        except BaseException:
            self._finish()
            raise
        return self._model

    @defer_interrupts
    def __exit__(self, *_: object) -> None:
        self._finish()

    @defer_interrupts
    def _begin(self) -> None:
        hooks = hooks_of(self._model)
        engine = hooks.engine
        hooks.name_records()
        wanted = _wanted(engine, self._names)
        engine.usability.check_not_materialized("materialized(model)")
        engine.check_usable()
        engine.finish_pass()
        engine.check_writes()
        install()
        self._engine = engine
        with engine.passes.nonmodel.paused():
            self._bring_in(engine, wanted)
        if len(wanted) == len(engine.records):  # then the model can be copied
            self._hooks = hooks
            hooks.remove_from_modules()

    @defer_interrupts
    def _finish(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            with engine.passes.nonmodel.paused():
                self._manage_again(engine)
        finally:
            uninstall()

    def _bring_in(self, engine: Engine, wanted: list[ParamState]) -> None:
        for record in wanted:
            value = plain_value(record, engine.read)
            if record.bound is None or not record.bound.aliased:  # else its memory stays where it is
                engine.residency.unbind(record)
            make_plain(record.parameter)
            set_data(record.parameter, value)
            self._given[record] = value.clone() if self._write else None
            self._held.append(weakref.ref(record.parameter))
        self._places = [
            (module, name, parameter)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._buffers = [
            (module, name, buffer)
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        engine.usability.mark_materialized(on=True)

    def _manage_again(self, engine: Engine) -> None:
        given, self._given = self._given, {}
        self._held.clear()
        engine.usability.mark_materialized(on=False)
        values = self._take_exchanged()
        self._undo_conversions_of_buffers()
        found = {record: values.get(record.parameter, record.parameter).detach() for record in given}
        for record in given:
            record.parameter.__class__ = ManagedParameter
            set_data(record.parameter, record.placeholder if record.bound is None else record.bound.view)
            accept_changes(record)
        if self._hooks is not None:
            self._hooks.install_on_modules()
        for record, value in found.items():
            _check_shape(record, value)
        for record, before in given.items():
            if before is not None:
                _keep(engine, record, found[record], found[record] == before)
        if self._write:
            engine.updater.compare()

    def _take_exchanged(self) -> dict[nn.Parameter, nn.Parameter]:
        """Put back parameters that were replaced, as by ``load_state_dict(assign=True)``; return the replacements."""
        places, self._places = self._places, []
        known = {parameter for _, _, parameter in places}
        found = {}
        for module, name, parameter in places:
            other = module._parameters.get(name)
            if other is not None and other not in known:
                found[parameter] = other
                module._parameters[name] = parameter
        return found

    def _undo_conversions_of_buffers(self) -> None:
        """Put back buffers that ``model.double()`` or the like converted: parameters get their dtype back, too."""
        buffers, self._buffers = self._buffers, []
        for module, name, buffer in buffers:
            other = module._buffers.get(name)
            if other is None or other.is_floating_point() != buffer.is_floating_point():
                continue
            if (other.dtype, other.device) != (buffer.dtype, buffer.device):
                module._buffers[name] = other.to(buffer.device, buffer.dtype) if self._write else buffer


@defer_interrupts_installing
def roll_back_chunked(engine: Engine) -> None:
    """Undo a `chunked` call that failed: make packed parameters plain again, with their original types.

    They have their original values, except that frozen ones were rounded to the computed type.
    """
    engine.usability.mark_released()
    engine.management.remove()
    for record in engine.records:
        parameter: nn.Parameter = record.parameter
        if isinstance(parameter, ManagedParameter):
            value = plain_value(record, engine.read_in_first_type)
            unmanage(parameter, value)
    engine.store.close()


def _keep(engine: Engine, record: ParamState, value: torch.Tensor, unchanged: torch.Tensor) -> None:
    """Write a parameter's elements that the block changed. Keep the others' masters, which the copy had rounded."""
    if bool(unchanged.all()):
        return
    if Kind.P32 in record.group.chunks:
        value = torch.where(unchanged, engine.read_state(record, Kind.P32), value.to("cpu", torch.float32))
        engine.write_state(record, Kind.P32, value)
    else:
        engine.write_state(record, record.group.weight, value)


def _check_shape(record: ParamState, value: torch.Tensor) -> None:
    if value.shape != record.shape:
        raise InvalidInput(
            f"{record.name!r} now has shape {tuple(value.shape)}, expected {tuple(record.shape)}: to change shapes, "
            "release(model) first. This parameter is as before the block, but other parts of the model may expect the "
            "new shape: make the change again after release(model), then call chunked again"
        )


def _wanted(engine: Engine, names: Iterable[str] | None) -> list[ParamState]:
    if names is None:
        return engine.records
    known = {record.name: record for record in engine.records}
    found = []
    for name in names:
        if name not in known:
            raise InvalidInput(f"no managed parameter is called {name!r}; names are as in model.named_parameters()")
        found.append(known[name])
    return found


def release(model: nn.Module, *, in_first_types: bool = False) -> nn.Module:
    """End the management: plain parameters, no hooks. The optimizer of `chunked` is of no more use.

    ``in_first_types``: the parameters get the types that they came with, from the fp32 masters where there are any.
    """
    hooks_of(model).release(in_first_types=in_first_types)
    return model
