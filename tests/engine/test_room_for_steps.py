"""Steps without a plan: on any tier with room, with home slots moved down, and also where no plan fits."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from _runs import let_go
from _states import masters_of
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, statistics
from ps_core.engine._execution.plan_in_force import PlanInForce

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


def trained(budget: Budget, model: nn.Module, steps: list[Passes], precision: str) -> tuple[dict[str, Tensor], int]:
    """Train; return the masters and the number of passes that followed a plan."""
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
    found, told = masters_of(optimizer.state_dict(masters=True)), statistics(model)
    for name, tier in told.tiers.items():
        assert tier.peak_bytes <= tier.budget_bytes, name
    let_go(model)
    return found, told.planned_passes


def check(budget: Budget, model: nn.Module, steps: list[Passes], precision: str) -> int:
    """Compare masters with those of a run with room for everything; return the number of planned passes."""
    roomy = copy.deepcopy(model)
    found, planned = trained(budget, model, steps, precision)
    expected, _ = trained(ROOMY, roomy, steps, precision)
    assert found.keys() == expected.keys()
    for name, master in found.items():
        assert torch.equal(master, expected[name]), name
    return planned


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


class Checkpointed(nn.Module):
    """Blocks that are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(5)
        )

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = values + checkpoint(block, values, use_reentrant=False)
        return values.square().mean()


@pytest.mark.parametrize(
    ("precision", "device", "host", "disk"), [("fp32", 230_000, 60_202, 1_510_431), ("bf16", 2**20, 2**16, 2**26)]
)
def test_passes_go_on_on_demand_where_no_plan_fits(
    precision: str,
    device: int,
    host: int,
    disk: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line that says so comes once, and plans are tried again after 1, 2, 4 ... passes."""
    torch.manual_seed(0)
    in_fp32 = precision == "fp32"
    model = Checkpointed() if in_fp32 else Layers(3, 256)
    steps: list[Passes] = [[(torch.randn(*((8, 4, 64) if in_fp32 else (8, 256))),)] for _ in range(6)]
    budget = Budget(device=device, host=host, disk=disk, disk_dir=str(tmp_path))
    caplog.set_level(logging.INFO, logger="ps_core")
    without_plan: list[bool] = []
    replan = PlanInForce.replan

    def counted(in_force: PlanInForce) -> None:
        without_plan.append(in_force.plan is None)
        replan(in_force)

    monkeypatch.setattr(PlanInForce, "replan", counted)
    assert check(budget, model, steps, precision) == 0
    assert caplog.text.count("no plan fits, so such passes run on demand: does not fit: ") == 1
    assert sum(without_plan) == 3, "after passes 1, 2 and 4; the run with room has a plan from the start"
