"""Move home slots to the plan's places, or as low as possible for passes whose peak is not known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.move_home_slots import clear, group_with_aliases, in_place, move, move_homes_to_plan
from ps_core.engine._memory.chunk import Chunk
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._parameters.param_state import ParamGroup


class HomePlacement:
    """Move the home slots of one engine between passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.elsewhere = False
        """True if some home slots are not in the plan's places: they were moved down, or displaced."""
        self.displaced = False
        """True if a plan that lent home slots was left within a segment.

        See [Note: leaving a plan that lends home slots] in `_execution.lent_home_slots`.
        """

    def move_to_plan(self, plan: EnginePlan) -> bool:
        """Move every home slot to the plan's place; return False, with nothing moved, while memory has live aliases."""
        with self._engine.residency.moving:
            if not move_homes_to_plan(self._engine, plan):
                return False
        self.elsewhere = self.displaced = False
        return True

    def expect_move(self) -> None:
        """Note that home slots are not where the plan, which has just been put in force, has them."""
        self.elsewhere = True

    def move_down(self, needed_bytes: int | None = None, *, sums: bool = True) -> None:
        """Move home slots off the compute tier until ``needed_bytes`` are free; None: as far as lower tiers have room.

        They are then as before there was a plan. Nothing is moved while memory has live aliases. ``sums``: leave room
        to sum a gradient.
        """
        engine, store = self._engine, self._engine.store
        capacity = store.tiers[0].capacity_bytes
        if needed_bytes is not None and store.ledger.used_bytes[0] + needed_bytes <= capacity:
            return
        groups = [group for group in reversed(engine.groups) if not group.pinned]
        if group_with_aliases(groups) is not None:
            return
        moves = _downward(store, groups, sums=sums)
        first = next(moves, None)
        if first is None:
            return
        # Out of inference mode, or the slots' tensors could not be written outside of it.
        with engine.residency.moving, torch.inference_mode(False):
            clear(engine)
            for chunk, tier in chain((first,), moves):
                move(engine, chunk, tier)
            if not store.device.overcommits:
                store.arena.resize(0)
        self.elsewhere, self.displaced = True, False

    def make_room_beside(self, nonmodel_bytes: int) -> None:
        """Move home slots down until two groups fit beside so many non-model bytes."""
        largest = max((group.weight_chunk.bytes for group in self._engine.groups if not group.on_host), default=0)
        self.move_down(nonmodel_bytes + 2 * largest)

    def make_room_to_read(self) -> None:
        """Move home slots down until the compute tier can hold all weights, and an fp32 copy of them."""
        weights = [(group.weight_chunk, group.chunk_numel) for group in self._engine.groups]
        self.move_down(sum(chunk.bytes * (chunk.home.tier > 0) + numel * 4 for chunk, numel in weights))

    def make_room_to_step(self) -> None:
        """Move home slots down, before a step on demand: until the next pass no gradient is summed."""
        self.move_down(sums=False)

    def plan_abandoned(self, plan: EnginePlan, *, needs_more: bool) -> None:
        """Move down the home slots of a plan left within a segment, if it lent some, so that on-demand moves have room.

        ``needs_more``: also if it lent none, for what comes takes more memory than was planned.
        """
        store = self._engine.store
        rows = [(held, plan.chunk(held.extent)) for held in plan.plan.home]
        displaced = [(held, chunk) for held, chunk in rows if not in_place(chunk.home, held)]
        self.displaced = self.displaced or bool(displaced)
        self.elsewhere = self.elsewhere or self.displaced or needs_more
        if not (displaced or needs_more) or self._engine.residency.transfers.broken:
            return
        with self._engine.residency.moving, torch.inference_mode(False):
            for held, chunk in sorted(displaced, key=lambda row: -row[0].tier):
                if chunk.home.tier < held.tier and store.free_bytes(held.tier) >= chunk.bytes:
                    self._down(chunk, held.tier)
            for chunk, tier in _downward(store, plan.order):
                self._down(chunk, tier)

    def _down(self, chunk: Chunk, tier: int) -> None:
        """Move a home slot to a lower tier during a pass; a slot with bound parameters stays as a copy."""
        store, residency = self._engine.store, self._engine.residency
        target = store.reserve(tier, chunk.bytes)
        residency.transfers.copy_to(chunk, target)
        old = chunk.rehome(target)
        tensors = self._engine.groups[chunk.extent.index].tensors
        if any(record.bound is not None and record.bound.slot is old for record in tensors):
            chunk.add_copy(old)
        else:
            residency.transfers.release_slot(old)


def _downward(store: TierStore, groups: list[ParamGroup], *, sums: bool = True) -> Iterator[tuple[Chunk, int]]:
    """Yield the chunks to move down and their tiers; each tier has room once the earlier moves are done."""
    spare = _spare(store, groups, sums=sums)
    for tier in range(len(store.tiers) - 1):
        chunks = [chunk for group in groups for chunk in group.chunks.values() if chunk.home.tier == tier]
        for chunk in chunks:
            if tier and store.free_bytes(tier) >= spare[tier]:
                break
            if lower := _tier_for(store, chunk, spare):
                yield chunk, lower


def _spare(store: TierStore, groups: list[ParamGroup], *, sums: bool) -> tuple[int, ...]:
    """Return the bytes that each tier keeps free: for one group above a disk, and with ``sums`` for one gradient."""
    numels = [record.numel for group in groups for record in group.tensors if record.trainable]
    wholes = [sum(chunk.bytes for chunk in group.chunks.values()) for group in groups]
    last = max(numels, default=0) * 4 * sums
    return (0, *(max([*wholes, last]) for _ in store.tiers[1:-1]), last)


def _tier_for(store: TierStore, chunk: Chunk, spare: tuple[int, ...]) -> int:
    """Return the highest tier below the chunk's own with room for it beside the spare bytes; 0 if none has."""
    for tier in range(chunk.home.tier + 1, len(store.tiers)):
        if store.free_bytes(tier) >= chunk.bytes + spare[tier]:
            return tier
    return 0
