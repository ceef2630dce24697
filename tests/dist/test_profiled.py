"""What is recorded of ranks that share a model."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from _threads import Together, going_by, run
from ps_core._plan import Queue
from ps_core.engine import profiled, release, statistics
from test_shards_on_a_tier import front


def recorded(each: Together, room: float, plan: bool) -> None:
    one = front(each, "bf16", room)
    one.settle()
    before, began = Counter(statistics(one.model).moved_bytes), len(each.began)
    with profiled(one.model) as profile:
        one.step(4)
        one.step(4)
    moved = Counter(statistics(one.model).moved_bytes) - before
    collectives = [piece for piece in profile.measured if piece.queue is Queue.COLL]
    kinds = {"gather": "gather", "reduce-scatter of": "sum"}
    names = [(*piece.name.rsplit(" ", 1),) for piece in collectives]
    assert [f"{kinds[verb]} {group}" for verb, group in names] == each.began[began:]
    assert sum(piece.bytes for piece in profile.measured if piece.queue is Queue.H2D) == moved["host->device"]
    for first, second in pairwise(collectives):
        assert first.end_s <= second.begin_s
    found = profile.summary()
    assert found.steps == 2
    assert sum(found.idle_s.values()) == pytest.approx(found.seconds - found.busy_s)
    planned = [piece.name for piece in profile.planned if piece.queue is Queue.COLL]
    assert planned == ([piece.name for piece in collectives] if plan else [])
    release(one.model)


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("room", [0, 1.5])
def test_collectives_of_ranks(room: float, plan: bool) -> None:
    with going_by(plan=plan):
        run(2, recorded, room, plan)
