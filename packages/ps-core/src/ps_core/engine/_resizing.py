"""Having an engine keep to other sizes of its tiers than it began with, between passes."""

from __future__ import annotations

import torch

from ps_core._errors import InvalidInput
from ps_core._plan import Tier
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.rehome import clear, held_by_somebody, move, put_aside
from ps_core.engine._parameters.errors import part_too_small
from ps_core.engine._support.interrupts import alone


@alone
def resize(engine: Engine, tiers: tuple[Tier, ...]) -> None:
    """Keep to these from now on; where that cannot be (`DoesNotFit`, `InvalidInput`), everything stays as it was."""
    if tiers == engine.store.tiers:
        return
    engine.finish_pass()
    with torch.no_grad():
        engine.passes.demand.finish()  # of what somebody held on to when its pass ended
    _check_let_go(engine)
    before = engine.store.tiers
    _check_lower(engine, tiers)
    try:
        _apply(engine, tiers)
        engine.passes.guide.resized()
    except Exception:
        _apply(engine, before)
        engine.passes.guide.resized()
        raise


def _check_let_go(engine: Engine) -> None:
    group = None if engine.still else held_by_somebody(engine.groups)
    if group is not None:
        raise InvalidInput(
            f"somebody holds on to memory of {group.name} (a view of a parameter?), so its model cannot make "
            "room in its Budget now: let go of that first, or give each model a part of its own, budget.split(3, 1)"
        )


def _check_lower(engine: Engine, tiers: tuple[Tier, ...]) -> None:
    """What is not on the compute tier stays where it is; on a single one, everything does."""
    store = engine.store
    store_used = [*store.used_bytes]
    if engine.still:
        store_used[0] += store.highest_tide_bytes
    first = 0 if engine.still else 1
    for index, (used, tier) in enumerate(zip(store_used, tiers, strict=True)):
        if index >= first and used > tier.capacity_bytes:
            raise part_too_small(store, index, used, tier.capacity_bytes)


def _apply(engine: Engine, tiers: tuple[Tier, ...]) -> None:
    store = engine.store
    if engine.still:
        store.resize(tiers)
        return
    clear(engine)
    moved = [(group, home) for group in engine.groups for home in group.homes.values() if home.slot.tier == 0]
    for _, home in moved:
        put_aside(engine, home)
    store.resize(tiers)
    top = tiers[0].capacity_bytes
    for _, home in (row for row in moved if row[0].pinned):
        top = (top - home.bytes) & -128
        move(engine, home, 0, top)
    for _, home in (row for row in moved if not row[0].pinned):
        move(engine, home, 1 if store.free_bytes(1) >= home.bytes else 0)
