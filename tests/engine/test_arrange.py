"""Homes are moved from one arrangement to another that leaves no byte free, and nothing of them is lost."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import _models as models
from _runs import HOST, chunked_model, stand_in
from ps_core import Budget, Options
from ps_core._plan import Held, Tier
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._execution.move_home_slots import move_homes_to_plan
from ps_core.engine._memory.chunk import Chunk

ROOM = 64 * 1024


def places(engine: Engine, above: list[Chunk], below: list[Chunk]) -> Any:
    """What `move_homes_to_plan` reads of a plan: one list from address 0 on, the other in the host's memory."""
    by_extent = {chunk.extent: chunk for chunk in (*above, *below)}
    held, offset = [], 0
    for chunk in above:
        held.append(Held(0, offset, chunk.bytes, chunk.extent))
        offset += chunk.bytes
    held += [Held(1, 0, chunk.bytes, chunk.extent) for chunk in below]
    return SimpleNamespace(
        order=engine.groups, plan=SimpleNamespace(home=held, tiers=engine.store.tiers), chunk=by_extent.__getitem__
    )


def contents(engine: Engine, homes: list[Chunk]) -> list[torch.Tensor]:
    return [engine.residency.contents(chunk).clone() for chunk in homes]


@pytest.mark.parametrize("seed", range(8))
def test_any_arrangement_follows_any_other_where_all_is_full(seed: int) -> None:
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    budget, options = Budget(device="256KiB", host=HOST), Options(group_bytes=4096, poison=True)
    with chunked_model(models.stack(), device=stand_in(), budget=budget, options=options) as (model, _):
        engine = hooks_of(model).engine
        homes = [chunk for group in engine.groups for chunk in group.chunks.values()]
        for chunk in homes:
            chunk.home.memory.random_(0, 256)
        before = contents(engine, homes)
        drawn.shuffle(homes_of := list(homes))
        above: list[Chunk] = []
        for chunk in homes_of:
            if sum(each.bytes for each in above) + chunk.bytes <= ROOM:
                above.append(chunk)
        below = [chunk for chunk in homes if chunk not in above]
        assert move_homes_to_plan(engine, places(engine, above, below))
        assert engine.store.ledger.used_bytes == [sum(chunk.bytes for chunk in part) for part in (above, below)]
        engine.store.tiers = tuple(
            Tier(tier.name, used) for tier, used in zip(engine.store.tiers, engine.store.ledger.used_bytes, strict=True)
        )
        engine.store.arena._capacity_bytes = engine.store.tiers[0].capacity_bytes
        for _ in range(4):
            above, below = _exchanged(above, below, drawn)
            assert move_homes_to_plan(engine, places(engine, above, below))
            assert [chunk.home.tier for chunk in (*above, *below)] == [0] * len(above) + [1] * len(below)
            starts = [chunk.home.offset for chunk in above]
            assert starts == [sum(chunk.bytes for chunk in above[:index]) for index in range(len(above))]
            found = contents(engine, homes)
            assert all(torch.equal(old, new) for old, new in zip(before, found, strict=True))


def _exchanged(above: list[Chunk], below: list[Chunk], drawn: random.Random) -> tuple[list[Chunk], list[Chunk]]:
    """As many bytes above as before, of others and in another order."""
    above, below = list(above), list(below)
    drawn.shuffle(above)
    drawn.shuffle(below)
    for index, chunk in enumerate(below):
        fitting = [place for place, other in enumerate(above) if other.bytes == chunk.bytes]
        if fitting and drawn.random() < 0.5:
            place = drawn.choice(fitting)
            above[place], below[index] = chunk, above[place]
    return above, below
