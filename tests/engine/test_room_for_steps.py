"""Steps without a plan are made on any tier that has room, and home slots are moved down for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from _runs import let_go
from _states import masters_of
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, statistics

ROOMY = Budget(device="16MiB", host="64MiB")


class Layers(nn.Module):
    """Layers of one group each; a pass may leave some out."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, values: Tensor, without: tuple[int, ...] = ()) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in without:
                values = values + torch.tanh(layer(values))
        return values.float().square().mean()


def masters(
    budget: Budget, *, count: int, width: int, precision: str, steps: list[list[tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Train, and return the masters; ``steps`` are the layers that each pass of each step leaves out."""
    torch.manual_seed(0)
    model, optimizer = chunked(
        Layers(count, width),
        AdamW(lr=1e-2),
        budget=budget,
        device="emulated",
        precision=precision,
        options=Options(group_bytes=4096),
    )
    values = torch.randn(2, width)
    for passes in steps:
        for without in passes:
            model(values, without=without).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = masters_of(optimizer.state_dict(masters=True))
    for name, tier in statistics(model).tiers.items():
        assert tier.peak_bytes <= tier.budget_bytes, name
    let_go(model)
    return found


def check(budget: Budget, *, count: int, width: int, precision: str, steps: list[list[tuple[int, ...]]]) -> None:
    """Masters are those with room for everything."""
    found = masters(budget, count=count, width=width, precision=precision, steps=steps)
    expected = masters(ROOMY, count=count, width=width, precision=precision, steps=steps)
    assert found.keys() == expected.keys()
    for name, master in found.items():
        assert torch.equal(master, expected[name]), name


@pytest.mark.parametrize("without", [(0,), (3,)])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_accelerator_steps_groups_that_are_larger_than_host_memory(
    tmp_path: Path, without: tuple[int, ...], passes: int
) -> None:
    """A group takes 65,536 bytes in fp32, gradients included; the plan has no gradient of one group."""
    budget = Budget(device=150_000, host=40_000, disk="1MiB", disk_dir=str(tmp_path))
    check(budget, count=4, width=64, precision="fp32", steps=[[without], [()] * passes, [()]])


@pytest.mark.parametrize("without", [(0,), (5,), (2, 3)])
@pytest.mark.parametrize(("host", "spare"), [(300_000, 245_000), (300_000, 280_000), (340_000, 310_000)])
def test_host_memory_that_a_plan_has_filled_is_freed_for_a_step(
    tmp_path: Path, without: tuple[int, ...], host: int, spare: int
) -> None:
    """A group takes 229,376 bytes in bf16: more than the accelerator has, and than the plan leaves of host memory."""
    budget = Budget(device=200_000, host=host, disk=1_376_256 - host + spare, disk_dir=str(tmp_path))
    check(budget, count=6, width=128, precision="bf16", steps=[[without], [without], [()], [()]])
