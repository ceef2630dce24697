"""Steps without a plan are made on any tier that has room, and home slots are moved down for them."""

from __future__ import annotations

import copy
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


Passes = list[tuple[object, ...]]
"""The arguments of each call of the model in one step."""


def trained(budget: Budget, model: nn.Module, steps: list[Passes], precision: str) -> dict[str, Tensor]:
    """Train, and return the masters."""
    model, optimizer = chunked(
        model,
        AdamW(lr=1e-2),
        budget=budget,
        device="emulated",
        precision=precision,
        options=Options(group_bytes=4096),
    )
    for passes in steps:
        for arguments in passes:
            model(*arguments).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = masters_of(optimizer.state_dict(masters=True))
    for name, tier in statistics(model).tiers.items():
        assert tier.peak_bytes <= tier.budget_bytes, name
    let_go(model)
    return found


def check(budget: Budget, model: nn.Module, steps: list[Passes], precision: str) -> None:
    """Compare masters with those of a run with room for everything."""
    roomy = copy.deepcopy(model)
    found = trained(budget, model, steps, precision)
    expected = trained(ROOMY, roomy, steps, precision)
    assert found.keys() == expected.keys()
    for name, master in found.items():
        assert torch.equal(master, expected[name]), name


@pytest.mark.parametrize("without", [(0,), (3,)])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_accelerator_steps_groups_that_are_larger_than_host_memory(
    tmp_path: Path, without: tuple[int, ...], passes: int
) -> None:
    """A group takes 65,536 bytes in fp32, gradients included; the plan has no gradient of one group."""
    torch.manual_seed(0)
    budget, values = Budget(device=150_000, host=40_000, disk="1MiB", disk_dir=str(tmp_path)), torch.randn(2, 64)
    check(budget, Layers(4, 64), [[(values, without)], [(values,)] * passes, [(values,)]], "fp32")


@pytest.mark.parametrize("without", [(0,), (5,), (2, 3)])
@pytest.mark.parametrize(("host", "spare"), [(300_000, 245_000), (300_000, 280_000), (340_000, 310_000)])
def test_host_memory_that_a_plan_has_filled_is_freed_for_a_step(
    tmp_path: Path, without: tuple[int, ...], host: int, spare: int
) -> None:
    """A group takes 229,376 bytes in bf16: more than the accelerator has, and than the plan leaves of host memory."""
    torch.manual_seed(0)
    budget = Budget(device=200_000, host=host, disk=1_376_256 - host + spare, disk_dir=str(tmp_path))
    values = torch.randn(2, 128)
    check(budget, Layers(6, 128), [[(values, without)]] * 2 + [[(values,)]] * 2, "bf16")
