"""A forward pass that no backward pass follows is over when the next one begins, and what is known of that stays."""

from __future__ import annotations

import torch

from _threads import Together, run
from ps_core.engine import release
from ps_core.engine._execution.hooks import hooks_of
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from test_rising import WIDTH, front


def left_open(each: Together) -> None:
    one = front(each, "bf16", 4)
    one.settle()
    residency = hooks_of(one.model).engine.residency
    assert isinstance(residency, ShardedResidency)
    seen: list[tuple[bool, int]] = []
    one.model[0].register_forward_hook(lambda *_: seen.append((residency.unknown, residency.forwards)))
    one.model(torch.ones(4, WIDTH))  # whose graph nobody keeps
    loss = one.model(torch.ones(16, WIDTH)).float().square().mean()
    assert seen == [(False, 1), (True, 1)]
    loss.backward()
    assert (residency.unknown, residency.forwards) == (False, 0)
    release(one.model)


def test_a_larger_batch_after_a_pass_that_was_left_open_finds_room() -> None:
    run(2, left_open)
