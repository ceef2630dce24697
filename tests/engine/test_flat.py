"""Nothing grows with the number of steps: objects, tensors and memory are the same after many."""

from __future__ import annotations

import gc
import os
from typing import NamedTuple

import pytest
import torch

import _models as models
from _cases import finish, next_token, tokens
from _runs import HOST, chunked_model
from ps_core import Budget, Options
from ps_core.engine import statistics

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SETTLED = 60
"""Steps after which caches (torch's, the allocator's, the engine's plans) are as full as they get."""


class Count(NamedTuple):
    """What is alive."""

    objects: int
    tensors: int
    rss_bytes: int


def count() -> Count:
    gc.collect()
    alive = gc.get_objects()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in alive)
    with open("/proc/self/statm", encoding="ascii") as file:
        return Count(len(alive), tensors, int(file.read().split()[1]) * PAGE_BYTES)


def check_flat(steps: int) -> None:
    batches = [tokens(index)[0] for index in range(4)]
    options = Options(group_bytes=2048)
    budget = Budget(device="160KiB", host=HOST)
    with chunked_model(
        models.Language(), device="emulated", budget=budget, precision="bf16", options=options, max_grad_norm=1.0
    ) as (model, optimizer):
        for index in range(SETTLED):
            next_token(model, batches[index % 4]).backward()
            finish(optimizer)
        count()  # which itself fills caches: of what is a subclass of what
        before = count()
        for index in range(steps):
            next_token(model, batches[index % 4]).backward()
            finish(optimizer)
        after = count()
        assert statistics(model).evictions > steps, "a step must evict something, or this shows little"
    assert after.tensors == before.tensors
    assert after.objects - before.objects <= 10, (before, after)  # other tests' may still go
    assert after.rss_bytes - before.rss_bytes < 2**20, (before, after)


def test_three_hundred_steps() -> None:
    check_flat(300)


@pytest.mark.soak
def test_a_thousand_steps() -> None:
    check_flat(1000)
