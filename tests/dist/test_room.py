"""Room on the compute tier of a shared model: in one piece where one is needed, and not taken by what is used up."""

from __future__ import annotations

import pytest
import torch

from _threads import Together, run
from ps_core._program import Kind
from ps_core.engine import release
from ps_core.engine._execution.hooks import hooks_of
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from test_rising import SHARD_NUMEL, WIDTH, Front, front

pytestmark = pytest.mark.usefixtures("unplanned")


def backward(one: Front) -> None:
    one.model(torch.ones(4, WIDTH)).float().square().mean().backward()


def in_pieces(each: Together) -> None:
    """Sums of a second backward pass come up for a step there, and of what is free nothing is large enough."""
    one, plain = front(each, "bf16", 12), front(each, "bf16", 0)
    for both in (one, plain):
        both.settle()
        backward(both)
        backward(both)
    assert all(Kind.P32 in high for high in one.up().values())
    engine = hooks_of(one.model).engine
    store, size = engine.store, SHARD_NUMEL * 4
    held = []
    while store.arena.lowest_free(size) is not None:  # somebody else's: two halves are left between them
        held += [store.reserve(0, size // 2), store.reserve(0, size // 2)]
    store.release(held[0], store.queues[0])
    store.release(held[2], store.queues[0])
    assert store.free_bytes(0) >= size
    risen = store.ledger.promoted_bytes
    one.optimizer.step()
    plain.optimizer.step()
    assert store.ledger.promoted_bytes < risen, "something made way"
    assert all(torch.equal(value, plain.states()[name]) for name, value in one.states().items())
    for slot in held[1:2] + held[3:]:
        store.release(slot, store.queues[0])
    release(one.model)
    release(plain.model)


def test_a_step_finds_room_in_one_piece() -> None:
    run(2, in_pieces)


def in_order(each: Together) -> None:
    one = front(each, "bf16", 4)
    engine = hooks_of(one.model).engine
    residency, sums = engine.residency, list[int]()
    assert isinstance(residency, ShardedResidency)
    promoter = residency.promoter
    promote = promoter.promote

    def watched() -> None:
        sums.append(sum(Kind.ACC in group.chunks for group in engine.groups))
        promote()

    promoter.promote = watched  # type: ignore[method-assign]
    one.settle(passes=2)
    assert sums == [0] * 6
    assert any(one.up().values())
    release(one.model)


def test_what_rises_has_the_room_of_the_sums_that_a_step_used_up() -> None:
    run(2, in_order)
