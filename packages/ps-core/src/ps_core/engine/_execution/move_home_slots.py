"""Move home slots to the plan's places, between passes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ps_core._plan import Held, Queue
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._memory.chunk import Chunk, Slot
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._parameters.param_state import ParamGroup


def move_homes_to_plan(engine: Engine, plan: EnginePlan) -> bool:
    """Move every home slot to the plan's place; return False, with nothing moved, while memory there has live
    aliases.
    """
    store, residency = engine.store, engine.residency
    engine.activations.release_free()  # the plan may need that memory
    if group_with_aliases(plan.order) is not None or not _has_its_places(store, plan):
        return False
    pending = [held for held in plan.plan.home if not in_place(plan.chunk(held.extent).home, held)]
    for held in pending:
        group = plan.order[held.extent.index]
        for record in group.tensors:
            residency.unbind(record)
        group.forget_moment()
    residency.transfers.prepare_use()
    residency.transfers.join_queues()
    if not store.device.overcommits:
        for record in engine.records:
            residency.unbind(record)
        store.arena.resize(plan.block_end)
    while pending:
        ready = [held for held in pending if _may_move(store, plan.chunk(held.extent), held)]
        for held in ready:
            if _may_move(store, plan.chunk(held.extent), held):
                move(engine, plan.chunk(held.extent), held.tier, held.offset if held.tier == 0 else -1)
                pending.remove(held)
        if not ready:
            inside = [plan.chunk(held.extent) for held in pending]
            spill_outside_tiers(engine, next((chunk for chunk in inside if chunk.home.bytes), inside[0]))
    return True


def _has_its_places(store: TierStore, plan: EnginePlan) -> bool:
    """Return True if only home slots lie in the plan's places for home slots, which may then be moved."""
    slots = {id(slot): slot for held in plan.plan.home for slot in (plan.chunk(held.extent).home,)}
    others = list(store.ledger.used_bytes)
    for slot in slots.values():
        others[slot.tier] -= slot.bytes
    for held in plan.plan.home:
        if held.tier:
            others[held.tier] += held.bytes
        elif any(id(slot) not in slots for slot in store.arena.overlapping(held.offset, held.bytes)):
            return False
    return all(used <= tier.capacity_bytes for used, tier in list(zip(others, store.tiers, strict=True))[1:])


def in_place(slot: Slot, held: Held) -> bool:
    """Return True if a home slot is in the plan's place."""
    return slot.tier == held.tier and (held.tier > 0 or slot.offset in (held.offset, -1))  # -1: there is no arena


def _may_move(store: TierStore, chunk: Chunk, held: Held) -> bool:
    if held.tier:
        return store.ledger.used_bytes[held.tier] + held.bytes <= store.tiers[held.tier].capacity_bytes
    return not store.arena.overlapping(held.offset, held.bytes)


def group_with_aliases(groups: Iterable[ParamGroup]) -> ParamGroup | None:
    """Return a group whose memory on the compute tier has live aliases and cannot be moved; None: there is none."""
    held = (
        group
        for group in groups
        if 0 in group.weight_chunk.copies or (group.weight_chunk.home.tier == 0 and group.aliased)
    )
    return next(held, None)


def clear(engine: Engine) -> None:
    """Unbind every parameter and wait for all queues; any home slot may be moved then."""
    for record in engine.records:
        engine.residency.unbind(record)
        record.group.forget_moment()
    for queue in (*engine.store.queues, Queue.CPU):
        engine.residency.transfers.wait_for_other_queues(queue)


def move(engine: Engine, chunk: Chunk, tier: int, offset: int = -1) -> None:
    """Move a home slot and its contents to a tier; ``offset``: its address on the compute tier."""
    target = engine.store.reserve(tier, chunk.bytes, offset)
    engine.residency.transfers.copy_to(chunk, target)
    engine.residency.transfers.release_slot(chunk.rehome(target))


def spill_outside_tiers(engine: Engine, chunk: Chunk) -> None:
    """Move an extent to host memory outside every tier's budget, so that other home slots can be moved."""
    old = chunk.home
    if old.place is None:
        memory = torch.empty(old.bytes, dtype=torch.uint8, device="cpu").copy_(old.memory)
    else:
        memory = engine.residency.own_bytes(chunk)
    target = Slot(engine.store.work_tier(old.tier), -1, 0, memory, chunk.extent, old.version)
    engine.residency.transfers.release_slot(chunk.rehome(target))
