"""Where homes are: as the plan in force has them, or as low as they go, for passes whose tide nobody knows."""

from __future__ import annotations

import torch

from ps_core.engine._arrange import arrange, clear, held_by_somebody, move
from ps_core.engine._engine import Engine
from ps_core.engine._plans import EnginePlan
from ps_core.engine._records import GroupRecord
from ps_core.engine._store import Home, Store


class Homes:
    """The homes of one engine, moved between passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.low = False
        """Whether some were moved down since they were last where a plan has them."""

    def arrange(self, plan: EnginePlan) -> bool:
        """Have every home in the plan's place; False, and nothing moved, while somebody holds on to memory."""
        if not arrange(self._engine, plan):
            return False
        self.low = False
        return True

    def lower(self, needed_bytes: int | None = None) -> None:
        """Have the compute tier to everything else as far as lower tiers have room; or so many bytes of it.

        As it was before there was a plan. Nothing is moved while somebody holds on to memory.
        """
        engine, store = self._engine, self._engine.store
        capacity = store.tiers[0].capacity_bytes
        if needed_bytes is not None and store.used_bytes[0] + needed_bytes <= capacity:
            return
        groups = [group for group in reversed(engine.groups) if not group.pinned]
        if held_by_somebody(groups) is not None:
            return
        spare = _spare(store, groups)
        above = [home for group in groups for home in group.homes.values() if home.slot.tier == 0]
        if not any(_tier_for(store, home, spare) for home in above):
            return
        clear(engine)
        with torch.inference_mode(False):  # or nobody else could write to these slots
            for home in above:
                if tier := _tier_for(store, home, spare):
                    move(engine, home, tier)
        if not store.device.lazy:
            store.settle(0)
        self.low = True


def _spare(store: Store, groups: list[GroupRecord]) -> tuple[int, ...]:
    """What every tier keeps free: above a disk a group passes through, and a gradient is put down to be summed."""
    sums = [record.numel * 4 for group in groups for record in group.tensors if record.trainable]
    wholes = [sum(home.bytes for home in group.homes.values()) for group in groups]
    last = max(sums, default=0)
    return (0, *(max([*wholes, last]) for _ in store.tiers[1:-1]), last)


def _tier_for(store: Store, home: Home, spare: tuple[int, ...]) -> int:
    """The highest tier below the first that has room for it and for what is to be kept free; 0: none has."""
    for tier in range(1, len(store.tiers)):
        if store.free_bytes(tier) >= home.bytes + spare[tier]:
            return tier
    return 0
