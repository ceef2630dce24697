"""What is planned for, and what of a plan is kept from run to run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import _models as models
from _cases import rows, square
from _runs import HOST, chunked_model, stand_in
from ps_core import Budget, InvalidInput, Options
from ps_core._planner import plan_cache
from ps_core.engine import statistics


def train(options: Options) -> tuple[dict[str, torch.Tensor], float]:
    """Parameters after two steps, the second by plan, and how long the plan says a step takes."""
    torch.manual_seed(0)
    budget = Budget(device="64KiB", host=HOST)
    with chunked_model(models.stack(), device=stand_in(), budget=budget, options=options) as (model, optimizer):
        for index in range(2):
            square(model, *rows(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = statistics(model)
        assert (found.planned_passes, found.divergences) == (1, 0)
        assert found.evictions > 0
        return {name: value.clone() for name, value in model.state_dict().items()}, found.planned_step_s


def test_a_second_run_searches_nothing_and_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(group_bytes=4096, plan_cache=str(tmp_path))
    once, _ = train(options)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.delattr(plan_cache, "find_plan")
    again, _ = train(options)
    for name, value in once.items():
        assert torch.equal(value, again[name]), name


def test_the_machine_that_is_planned_for_can_be_named() -> None:
    _, here = train(Options(group_bytes=4096))
    _, there = train(Options(group_bytes=4096, machine="a100-40"))
    assert 0 < there != here > 0
    with pytest.raises(InvalidInput, match="unknown machine 'abacus'"):
        train(Options(machine="abacus"))
