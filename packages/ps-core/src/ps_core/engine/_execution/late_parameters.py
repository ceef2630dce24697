"""Manage what changed after `chunked`: parameters that were unfrozen or added.

This happens between passes. A frozen group with a parameter that is to be trained is cut in two. One part stays frozen,
the other gets masters and moments. Added parameters get groups of their own. The present plan has none of these groups.
So the next pass is estimated or recorded, and planned anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from ps_core._errors import UnsupportedParameter
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.move_home_slots import group_with_aliases
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._parameters.aliased_storage import find_ties
from ps_core.engine._parameters.first_home_slots import copy_in_values, reserve_homes, write_value
from ps_core.engine._parameters.grouping import Grouping, named
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._support.interrupts import defer_interrupts_installing


@defer_interrupts_installing
def train_frozen(engine: Engine, records: Iterable[ParamState], *, accumulates: bool) -> None:
    """Train frozen parameters from now on. Raise `DoesNotFit` if there is no memory for their masters and moments."""
    chosen = {each: None for record in records for each in (record.tied or [record])}
    known = engine.passes.scheduler.training and engine.together is None
    if chosen and (not known or any(record.group.on_host for record in chosen)):
        raise UnsupportedParameter(
            f"{next(iter(chosen)).name!r} was frozen when chunked(...) was called, so it has no optimizer state: to "
            "train it, release(model), set requires_grad, and call chunked again"
        )
    engine.finish_pass()
    held = group_with_aliases(record.group for record in chosen)
    if held is not None:
        raise UnsupportedParameter(
            f"{next(iter(chosen)).name!r} is to be trained, so its group is cut in two, but something still refers to "
            f"memory of {held.name}: drop what parameters were read into before the first pass that trains it"
        )
    engine.passes.scheduler.forget_plan()
    for group in dict.fromkeys(record.group for record in chosen):
        _cut(engine, group, [record for record in group.tensors if record in chosen], accumulates=accumulates)


@defer_interrupts_installing
def take_in(
    engine: Engine, model: nn.Module, group: Callable[[nn.Module], Grouping], *, accumulates: bool
) -> list[ParamState]:
    """Put parameters that were added to a model under management, in groups of their own; return their records."""
    known = {record.name for record in engine.records}
    tied = find_ties(nn.ParameterList(parameter for _, parameter in named(model)))
    for name, parameter in named(model):
        if name in known or engine.together is not None or parameter.is_meta or tied:
            raise UnsupportedParameter(
                f"parameter {name!r} was added after chunked(...), so nothing trains it and no budget counts it: "
                "release(model), then call chunked again"
            )
    values = [(name, parameter, parameter.detach()) for name, parameter in named(model)]
    grouping = group(model)
    groups, records = grouping.groups, list(grouping.records.values())
    for each in groups:
        each.number_after(len(engine.groups))
    for record in records:
        record.number_after(len(engine.records))
    engine.finish_pass()
    engine.passes.scheduler.forget_plan()
    try:
        _reserve(engine.store, groups, accumulates=accumulates)
    except BaseException:
        for each in groups:
            engine.residency.release_chunks(each)
        raise
    engine.groups.extend(groups)
    engine.passes.add_records(records)
    copy_in_values(grouping.records, values, engine)
    return records


def _cut(engine: Engine, group: ParamGroup, chosen: list[ParamState], *, accumulates: bool) -> None:
    before = [(record, record.offset, engine.read(record)) for record in group.tensors]
    for record in group.tensors:
        engine.residency.unbind(record)
    engine.residency.transfers.join_queues()
    index = group.index if len(chosen) == len(group.tensors) else len(engine.groups)
    rest, trained = _like(group, group.index), _like(group, index, trainable=True)
    for record in group.tensors:
        (trained if record in chosen else rest).add(record)
    made = [each for each in (trained, rest) if each.tensors]
    try:
        _reserve(engine.store, made, accumulates=accumulates)
    except BaseException:
        for each in made:
            engine.residency.release_chunks(each)
        for record, offset, _ in before:
            record.group, record.offset = group, offset
        raise
    for record in chosen:
        record.train()
    for record, _, value in before:
        write_value(record, value, engine)
    engine.residency.release_chunks(group)
    engine.groups[group.index] = made[-1]
    if rest.tensors:
        engine.groups.append(trained)


def _reserve(store: TierStore, groups: list[ParamGroup], *, accumulates: bool) -> None:
    """Reserve home slots with moments of zero: pinned blocks and ranges of the file may have been in use before."""
    reserve_homes(store, groups, accumulates=accumulates)
    for group in groups:
        for kind, chunk in group.chunks.items():
            if kind in group.state_kinds:
                store.fill(chunk.home, 0)


def _like(group: ParamGroup, index: int, *, trainable: bool = False) -> ParamGroup:
    return ParamGroup(
        index=index,
        weight=group.weight,
        dtype=group.dtype,
        trainable=trainable,
        fixed_tier=group.fixed_tier,
        states=group.states,
    )
