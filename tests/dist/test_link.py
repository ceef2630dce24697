"""What crosses the link between the host's memory and an accelerator where processes share a model, and when.

Of shards that stay below: those that rise are the matter of test_rising.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from _threads import Together, run
from ps_core import SGD, Budget, Options
from ps_core._plan import Queue
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution.hooks import hooks_of

pytestmark = pytest.mark.usefixtures("unplanned")

LAYERS, WIDTH = 5, 32
SHARD_NUMEL = WIDTH * WIDTH // 2
ROOM = {"fp32": 36, "bf16": 20}
"""KiB of the accelerator: for some groups, not for all."""


class Layer(nn.Linear):
    """Says when it has computed."""

    def __init__(self, index: int, said: list[str]) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self._index, self._said = index, said

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computed = super().forward(x)
        self._said.append(f"layer {self._index}")
        return computed


def made(each: Together, precision: str, said: list[str]) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)  # the ranks are threads, and would share the usual one
    model = nn.Sequential(*(Layer(index, said) for index in range(LAYERS)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH)
    rule: Any = SGD(lr=1e-3)
    budget = Budget(device=f"{ROOM[precision]}KiB", host="4MiB")
    options = Options(group_bytes=1)
    made = chunked(
        model, rule, device="emulated", precision=precision, budget=budget, collectives=each, options=options
    )
    residency: Any = hooks_of(model).engine.residency
    residency.promoter.promote = lambda: None
    return made


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, WIDTH)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def crosses(each: Together, precision: str) -> tuple[dict[str, int], int]:
    model, optimizer = made(each, precision, [])
    for _ in range(2):
        step(model, optimizer)
    before, gathers = statistics(model).moved_bytes, statistics(model).fetches
    step(model, optimizer)
    found = statistics(model)
    release(model)
    return {link: size - before[link] for link, size in found.moved_bytes.items()}, found.fetches - gathers


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_a_shard_goes_up_for_each_gather_and_its_sum_comes_down(precision: str, size: int) -> None:
    found, _ = run(2, crosses, precision)
    for moved, gathers in found:
        assert gathers == 2 * LAYERS - 2, "the last of forward is kept, and the first is not read in backward"
        assert moved == {"host->device": gathers * SHARD_NUMEL * size, "device->host": LAYERS * SHARD_NUMEL * size}


def ahead(each: Together) -> list[str]:
    said: list[str] = []
    model, optimizer = made(each, "fp32", said)
    for _ in range(2):
        step(model, optimizer)
    said.clear()
    store = hooks_of(model).engine.store
    copy = store.copy

    def copying(queue: Queue, *slots: Any, **places: Any) -> None:
        if queue is Queue.H2D:
            said.append("up")
        copy(queue, *slots, **places)

    store.copy = copying  # type: ignore[method-assign]
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    release(model)
    return said


def test_a_shard_goes_up_while_the_layer_before_computes() -> None:
    found, _ = run(2, ahead)
    for said in found:
        for index in range(LAYERS - 1):
            before = said[: said.index(f"layer {index}")]
            assert before.count("up") > index + 1, "the next layer's"
