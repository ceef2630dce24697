"""A forward pass that no backward pass follows is over when the next one begins, and what is known of that stays."""

from __future__ import annotations

import torch

from _threads import Together, run
from ps_core.engine import release
from test_shards_on_a_tier import WIDTH, front


def left_open(each: Together) -> None:
    one, plain = front(each, "bf16", 4), front(each, "bf16", 0)
    for either in (one, plain):
        either.settle()
        either.model(torch.ones(4, WIDTH))  # whose graph nobody keeps
        either.model(torch.ones(16, WIDTH)).float().square().mean().backward()
        either.optimizer.step()
    assert all(torch.equal(value, plain.states()[name]) for name, value in one.states().items())
    peak, most = one.held()
    assert peak <= most
    release(one.model)
    release(plain.model)


def test_a_larger_batch_after_a_pass_that_was_left_open_finds_room() -> None:
    run(2, left_open)
