"""Reserve every extent's first home slot, and fill it with the model's values, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import nn

from ps_core._extents import Kind
from ps_core.engine._devices.disk.file import blocks
from ps_core.engine._memory.chunk import Chunk
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._parameters.errors import compute_tier_too_small, everything_too_large, tables_too_large
from ps_core.engine._parameters.managed_parameter import ManagedParameter, clear_grad, set_data
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._support.interrupts import defer_interrupts_installing

_Extent: TypeAlias = tuple[ParamGroup, Kind]


def kinds_of(group: ParamGroup, *, accumulates: bool) -> tuple[Kind, ...]:
    """Return the kinds of a group that have a home slot.

    Shards, and tables on the host, always have sums in fp32: nothing else could hold their gradients.
    """
    if not group.trainable:
        return (group.weight,)
    kinds = tuple(dict.fromkeys((group.weight, Kind.P32, *group.state_kinds)))
    sums = (accumulates and group.fixed_tier != 0) or (group.weight is Kind.P32 and (group.gathered or group.on_host))
    return (*kinds, Kind.ACC) if sums else kinds


def bytes_of(group: ParamGroup, kind: Kind) -> int:
    """Return the bytes of one kind of a group's chunks."""
    return group.shard_numel * group.dtype_of(kind).itemsize


def reserve_homes(store: TierStore, groups: list[ParamGroup], *, accumulates: bool) -> None:
    """Reserve home slots below the compute tier; if there is too little room, the first groups' on it."""
    last = len(store.tiers) - 1
    if last:
        _check_compute_tier(store, groups, accumulates=accumulates)
    fixed = [group for group in groups if group.pinned and last]
    top = _place_fixed(store, fixed, accumulates=accumulates)
    rest = [group for group in groups if group not in fixed]
    sizes = {group: sum(bytes_of(group, kind) for kind in kinds_of(group, accumulates=accumulates)) for group in rest}
    below = sum(store.free_bytes(tier) for tier in range(1, last + 1)) if last else top
    everything = sum(sizes.values()) + store.tiers[0].capacity_bytes - top + store.ledger.fixed_host_bytes
    if sum(sizes.values()) > below + (top if last else 0):
        raise everything_too_large(store, groups, everything)
    resident: set[ParamGroup] = set()
    for group in rest:
        if last and sum(sizes[each] for each in rest if each not in resident) > below:
            resident.add(group)
    if last and sum(sizes[group] for group in resident) > top:
        raise everything_too_large(store, groups, everything)
    lower = [
        (group, kind) for group in rest if group not in resident for kind in kinds_of(group, accumulates=accumulates)
    ]
    tiers = _assign_tiers(store, lower, max(sizes.values(), default=0)) if last else dict.fromkeys(lower, 0)
    if tiers is None:
        raise everything_too_large(store, groups, everything)
    if store.file is not None:
        store.file.prepare(sum(blocks(bytes_of(*row)) for row, tier in tiers.items() if store.is_disk(tier)))
    _prepare_host(store, [row for row, tier in tiers.items() if store.tiers[tier].name == "host"])
    for group in rest:
        for kind in kinds_of(group, accumulates=accumulates):
            _reserve(store, group, kind, tiers.get((group, kind), 0))
    for tier, row in enumerate(store.tiers):
        if store.ledger.used_bytes[tier] > row.capacity_bytes:
            raise everything_too_large(store, groups, everything)


def _place_fixed(store: TierStore, groups: list[ParamGroup], *, accumulates: bool) -> int:
    """Reserve home slots that never move: from the compute tier's end down, or on the host.

    Return the end of the compute tier's remaining range.
    """
    top = store.tiers[0].capacity_bytes
    below = [group for group in groups if group.on_host]
    gradients = sum(bytes_of(group, group.weight) for group in below if group.trainable)
    homes = sum(bytes_of(group, kind) for group in below for kind in kinds_of(group, accumulates=accumulates))
    if below and homes + gradients > store.free_bytes(1):
        raise tables_too_large(store, below, homes + gradients)
    _prepare_host(store, [(group, kind) for group in below for kind in kinds_of(group, accumulates=accumulates)])
    for group in groups:
        for kind in kinds_of(group, accumulates=accumulates):
            if group.on_host:
                _reserve(store, group, kind, 1)
            else:
                top -= bytes_of(group, kind)
                _reserve(store, group, kind, 0, top)
    if below:
        store.ledger.fix_on_host(homes, gradients)
    return top


def _prepare_host(store: TierStore, extents: list[_Extent]) -> None:
    """Allocate the host memory for these home slots before they are reserved, in as few pieces as possible."""
    store.device.prepare_host([bytes_of(*row) for row in sorted(extents, key=lambda row: row[0].index)])


def _assign_tiers(store: TierStore, extents: list[_Extent], largest: int) -> dict[_Extent, int] | None:
    """Return the tier of each extent below the compute tier, weights on the highest; None if there is no room."""
    last = len(store.tiers) - 1
    room = [store.free_bytes(tier) for tier in range(last + 1)]
    if last > 1 and sum(bytes_of(*row) for row in extents) > room[1]:
        room[1] -= min(room[1], largest)
    found: dict[_Extent, int] = {}
    for group, kind in sorted(extents, key=lambda row: row[1] is not row[0].weight):
        size = bytes_of(group, kind)
        tier = next((tier for tier in range(1, last + 1) if size <= room[tier]), None)
        if tier is None:
            return None
        room[tier] -= size
        found[group, kind] = tier
    return found


def _check_compute_tier(store: TierStore, groups: list[ParamGroup], *, accumulates: bool) -> None:
    """Raise `DoesNotFit` unless the compute tier holds the pinned groups and the largest other group.

    Above a disk it must also hold everything that one group's step uses.
    """
    pinned = sum(
        bytes_of(group, kind)
        for group in groups
        if group.fixed_tier == 0
        for kind in kinds_of(group, accumulates=False)
    )
    movable = [group for group in groups if not group.pinned]
    largest = max(movable, key=lambda group: group.chunk_numel, default=None)
    needs = {f"forward of {(largest or groups[0]).name}": bytes_of(largest, largest.weight) if largest else 0}
    if store.is_disk(1) and largest is not None:
        needs[f"step of {largest.name}"] = sum(
            bytes_of(largest, kind) for kind in kinds_of(largest, accumulates=accumulates)
        )
    where, needed = max(needs.items(), key=lambda row: row[1])
    if pinned + needed > store.tiers[0].capacity_bytes:
        raise compute_tier_too_small(store, groups, where, pinned + needed, 0, proven=True)


def _reserve(store: TierStore, group: ParamGroup, kind: Kind, tier: int, offset: int = -1) -> None:
    size = bytes_of(group, kind)
    if group.common is not None and kind is group.weight:
        slot = store.adopt(group.common.shard)
    else:
        slot = store.reserve(tier, size, offset)
    if kind in group.state_kinds and (store.poison or slot.offset >= 0):
        store.fill(slot, 0)  # memory fresh from the system is zero already, and so is a new file
    chunk = Chunk(group.extent(kind), size, slot, planned=True)
    chunk.mark_written(slot)
    group.add_chunk(kind, chunk)


def copy_in_values(
    records: dict[str, ParamState], values: Iterable[tuple[str, nn.Parameter, torch.Tensor]], owner: Any
) -> None:
    """Pack each value as it comes, and make its parameter managed; the value's own memory is free after that."""
    for name, parameter, value in values:
        record = records.get(name)
        if record is not None:
            write_value(record, value, owner)
            del value
            record.live_on(owner.store.device.torch_device)
            adopt(record, parameter, owner)


@defer_interrupts_installing
def write_value(record: ParamState, value: torch.Tensor, owner: Any) -> None:
    """Write a parameter's first value into its group's weight and master."""
    group = record.group
    for kind in dict.fromkeys((group.weight, *((Kind.P32,) if group.trainable else ()))):
        chunk, dtype = group.chunks[kind], group.dtype_of(kind)
        if chunk.home.place is None and not group.gathered:
            record.shaped(chunk.home.flat(dtype, group.chunk_numel)).copy_(value)
        else:
            flat = torch.empty(record.numel, dtype=dtype, device="cpu")
            flat.as_strided(record.shape, record.stride).copy_(value)
            owner.residency.replace(record, kind, flat)


@defer_interrupts_installing
def adopt(record: ParamState, parameter: nn.Parameter, owner: Any) -> None:
    """Turn a plain parameter into a managed one."""
    clear_grad(parameter)
    set_data(parameter, record.placeholder)
    parameter.__class__ = ManagedParameter
    assert isinstance(parameter, ManagedParameter), "its class has just been changed"
    parameter._record, parameter._owner = record, owner
    record.parameter = parameter
