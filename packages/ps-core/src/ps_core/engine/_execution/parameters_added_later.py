"""Manage what changed after `chunked`: parameters that were unfrozen or added.

This happens between passes. A frozen group with a parameter that is to be trained is cut in two. One part stays frozen,
the other gets masters and states. Added parameters get groups of their own. The present plan has none of these groups.
So the next pass is estimated or recorded, and planned anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ps_core._errors import RanksDiverged, UnsupportedParameter
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.move_home_slots import group_with_aliases
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._parameters.aliased_storage import find_ties
from ps_core.engine._parameters.errors import everything_too_large
from ps_core.engine._parameters.first_home_slots import bytes_of, copy_in_values, kinds_of, reserve_homes, write_value
from ps_core.engine._parameters.grouping import Grouping, name_as_in, named
from ps_core.engine._parameters.managed_parameter import find_shared_versions
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.unmanaged import move_unmanaged
from ps_core.engine._support.checksum import checksum
from ps_core.engine._support.interrupts import defer_interrupts_installing
from ps_core.engine._support.refuse_programs import refuse_script


class CopiesOfAdded:
    """Compute a call with copies of added parameters: other calls manage them, for which ranks would have to meet."""

    def __init__(self) -> None:
        self.places: list[tuple[nn.Module, str, nn.Parameter]] = []
        """Modules and names where the running call has copies, and the parameters that belong there."""

    def put(self, model: nn.Module, device: torch.device, cast: torch.dtype | None) -> None:
        """Put copies on the device, of type ``cast`` if one is given, in the places of added parameters."""
        copies = dict[int, nn.Parameter]()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not is_new(parameter):
                    continue
                if id(parameter) not in copies:
                    copy = parameter.detach().to(device, cast or parameter.dtype, copy=True)
                    copies[id(parameter)] = nn.Parameter(copy, requires_grad=parameter.requires_grad)
                self.places.append((module, name, parameter))
                module._parameters[name] = copies[id(parameter)]
        move_unmanaged(model, device)

    def take_out(self) -> None:
        """Put the parameters back."""
        while self.places:
            module, name, parameter = self.places.pop()
            module._parameters[name] = parameter


def is_new(parameter: nn.Parameter) -> bool:
    """Return True for a parameter that is to be managed, and is not yet."""
    return type(parameter) is nn.Parameter and parameter.is_floating_point()


@defer_interrupts_installing
def train_frozen(engine: Engine, records: Iterable[ParamState], *, accumulates: bool) -> None:
    """Train frozen parameters from now on. Raise `DoesNotFit` if there is no memory for their masters and states."""
    chosen = {each: None for record in records for each in (record.tied or [record])}
    known = engine.passes.scheduler.training
    if chosen and (not known or any(record.group.on_host for record in chosen)):
        raise UnsupportedParameter(
            f"{next(iter(chosen)).name!r} was frozen when chunked(...) was called, so it has no optimizer state: to "
            "train it, release(model), set requires_grad, and call chunked again"
        )
    _agree(engine, "parameters that were unfrozen after chunked(...)", [record.name for record in chosen])
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
    engine.residency.end_change()


@defer_interrupts_installing
def take_in(
    engine: Engine, model: nn.Module, group: Callable[[nn.Module], Grouping], *, accumulates: bool
) -> list[ParamState]:
    """Put parameters that were added to a model under management, in groups of their own; return their records."""
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            refuse_script(name, module)
    known = {record.name for record in engine.records}
    listing = "give it to optimizer.add_param_group(...), or " if engine.passes.scheduler.training else ""
    tied = find_ties(nn.ParameterList(parameter for _, parameter in named(model)))
    for name, parameter in named(model):
        if name in known and not engine.awaits(parameter):
            raise UnsupportedParameter(
                f"parameter {name!r} was replaced after chunked(...) by one that nothing trains: {listing}"
                "release(model), then call chunked again; for other values use materialized(model, write=True), or "
                "give functional_call plain tensors"
            )
        if parameter.is_meta or tied:
            raise UnsupportedParameter(
                f"parameter {name!r} was added after chunked(...), so nothing trains it and no budget counts it: "
                "release(model), then call chunked again"
            )
    values = [(name, parameter, parameter.detach()) for name, parameter in named(model)]
    grouping = group(model)
    groups, records = grouping.groups, list(grouping.records.values())
    if engine.together is not None:
        rows = [(name, tuple(value.shape), str(value.dtype), checksum(value)) for name, _, value in values]
        _agree(engine, "parameters that were added after chunked(...)", rows)
    for each in groups:
        each.number_after(len(engine.groups))
        _cut_into_shards(engine, each)
    for record in records:
        record.number_after(len(engine.records))
    engine.finish_pass()
    engine.passes.scheduler.forget_plan()
    _reserve(engine, groups, accumulates=accumulates)
    name_as_in(model, engine.records, taken=grouping.records)
    engine.groups.extend(groups)
    engine.passes.add_records(records)
    copy_in_values(grouping.records, values, engine)
    find_shared_versions(engine.records)
    engine.residency.end_change()
    return records


def _cut(engine: Engine, group: ParamGroup, chosen: list[ParamState], *, accumulates: bool) -> None:
    before = [(record, record.offset, engine.read(record)) for record in group.tensors]
    for record in group.tensors:
        engine.residency.unbind(record)
    engine.residency.transfers.prepare_use()
    engine.residency.transfers.join_queues()
    index = group.index if len(chosen) == len(group.tensors) else len(engine.groups)
    rest, trained = _like(group, group.index), _like(group, index, trainable=True)
    for record in group.tensors:
        (trained if record in chosen else rest).add(record)
    made = [each for each in (trained, rest) if each.tensors]
    for each in made:
        _cut_into_shards(engine, each)
    try:
        _reserve(engine, made, accumulates=accumulates)
    except BaseException:
        for record, offset, _ in before:
            record.group, record.offset = group, offset
        raise
    for record in chosen:
        record.train()
    engine.groups[group.index] = made[-1]
    if rest.tensors:
        engine.groups.append(trained)
    for record, _, value in before:
        write_value(record, value, engine)
    engine.residency.release_chunks(group)
    engine.residency.free_common(group)


def _reserve(engine: Engine, groups: list[ParamGroup], *, accumulates: bool) -> None:
    """Reserve home slots with moments of zero: pinned blocks and ranges of the file may have been in use before.

    All ranks have room, or all raise and have reserved nothing.
    """
    error: BaseException | None = None
    try:
        if engine.together is not None:
            _check_below(engine.store, groups, accumulates=accumulates)
        reserve_homes(engine.store, groups, accumulates=accumulates)
    except BaseException as found:
        error = found
    try:
        _raise_together(engine, error)
    except BaseException:
        for each in groups:
            engine.residency.release_chunks(each)
        raise
    for group in groups:
        for kind, chunk in group.chunks.items():
            if kind in group.state_kinds:
                engine.store.fill(chunk.home, 0)
        engine.residency.complete(group)


def _check_below(store: TierStore, groups: list[ParamGroup], *, accumulates: bool) -> None:
    """Raise `DoesNotFit` unless lower tiers have room: several ranks have no plan that knows of room on the first."""
    below = sum(store.free_bytes(tier) for tier in range(1, len(store.tiers)))
    size = sum(bytes_of(group, kind) for group in groups for kind in kinds_of(group, accumulates=accumulates))
    if len(store.tiers) > 1 and size > below:
        raise everything_too_large(store, groups, size + sum(store.ledger.used_bytes))


def _agree(engine: Engine, what: str, rows: list[Any]) -> None:
    """Raise `RanksDiverged` unless all ranks do this with the same parameters at the same time."""
    if engine.together is not None:
        engine.updater.compare()  # which a rank that evaluates alone may be waiting for
        engine.together.agree(what, ", ".join(map(str, rows)))


def _raise_together(engine: Engine, error: BaseException | None) -> None:
    """Raise this rank's error, or `RanksDiverged` if another rank has one."""
    if engine.together is not None:
        what = "whether there is room for parameters that were unfrozen or added"
        failed = [
            rank for rank, row in enumerate(engine.together.all_values([float(error is not None)], what)) if row[0]
        ]
        if failed and error is None:
            raise RanksDiverged(
                f"rank {failed[0]} cannot take in parameters that were unfrozen or added since chunked(...): its own "
                "error says why; give all ranks budgets of one size"
            )
    if error is not None:
        raise error


def _cut_into_shards(engine: Engine, group: ParamGroup) -> None:
    """Note which shard of a new group this rank has; no process alone has shards."""
    if engine.together is not None:
        group.share(engine.together.rank, engine.together.ranks)


def _like(group: ParamGroup, index: int, *, trainable: bool = False) -> ParamGroup:
    return ParamGroup(
        index=index,
        weight=group.weight,
        dtype=group.dtype,
        trainable=trainable,
        fixed_tier=group.fixed_tier,
        states=group.states,
    )
