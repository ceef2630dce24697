"""Weights outside the training loop: ordinary parameters for a while, or for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ps_core._errors import InvalidInput
from ps_core._program import Kind
from ps_core.engine._engine import Engine
from ps_core.engine._interrupts import alone
from ps_core.engine._management import management_of
from ps_core.engine._parameter import ManagedParameter, make_plain, point_at
from ps_core.engine._records import TensorRecord


@contextmanager
def materialized(model: nn.Module, names: Iterable[str] | None = None, *, write: bool = False) -> Iterator[nn.Module]:
    """Make parameters (all, or those named) ordinary ones for the block; with ``write``, keep what it does to them.

    They are copies on the CPU that no budget counts. Written values go to the fp32 masters as they are; a parameter
    that was not changed keeps its master, unrounded. Training inside the block raises.
    """
    engine = management_of(model).engine
    wanted = _wanted(engine, names)
    engine.check_usable()
    engine.finish_pass()
    given: dict[TensorRecord, torch.Tensor | None] = {}
    try:
        _take(engine, wanted, given, write=write)
        yield model
    finally:
        _put_back(engine, given)


@alone
def _take(
    engine: Engine, wanted: list[TensorRecord], given: dict[TensorRecord, torch.Tensor | None], *, write: bool
) -> None:
    for record in wanted:
        value = engine.read(record)
        engine.residency.unbind(record)
        make_plain(record.parameter)
        point_at(record.parameter, value)
        given[record] = value.clone() if write else None
    engine.surgery = True


@alone
def _put_back(engine: Engine, given: dict[TensorRecord, torch.Tensor | None]) -> None:
    engine.surgery = False
    found = {record: record.parameter.detach() for record in given}
    for record in given:
        record.parameter.__class__ = ManagedParameter
        point_at(record.parameter, record.placeholder)
        engine.forget_version(record)
    for record, before in given.items():
        after = found[record]
        if before is not None and not (after.shape == before.shape and bool((after == before).all())):
            _write(engine, record, after)


@alone
def undo(engine: Engine) -> None:
    """`chunked` was broken off: what was packed so far becomes plain parameters again, of the types they came with.

    Their values are those they came with, too, but frozen ones were rounded to what is computed with.
    """
    engine.released = True
    if engine.management is not None:
        engine.management.remove()
    for record in engine.records:
        parameter: nn.Parameter = record.parameter
        if isinstance(parameter, ManagedParameter):
            value = engine.read_state(record, Kind.P32).to(record.given[1])
            make_plain(parameter)
            del parameter._record, parameter._keeper
            point_at(parameter, value)
    engine.store.close()


def _write(engine: Engine, record: TensorRecord, value: torch.Tensor) -> None:
    if value.shape != record.shape:
        raise InvalidInput(
            f"{record.name!r} now has shape {tuple(value.shape)}, expected {tuple(record.shape)}: to change shapes, "
            "release(model) first"
        )
    engine.write_state(record, Kind.P32 if Kind.P32 in record.group.homes else record.group.weight, value)


def _wanted(engine: Engine, names: Iterable[str] | None) -> list[TensorRecord]:
    if names is None:
        return engine.records
    known = {record.name: record for record in engine.records}
    found = []
    for name in names:
        if name not in known:
            raise InvalidInput(f"no managed parameter is called {name!r}; names are as in model.named_parameters()")
        found.append(known[name])
    return found


def release(model: nn.Module) -> nn.Module:
    """End the management: plain parameters, no hooks. The optimizer of `chunked` is of no more use."""
    management_of(model).release()
    return model
