"""Check that SGD reserves one optimizer state a parameter, in the plan and in the engine."""

from __future__ import annotations

from typing import Any

import pytest

import _models as models
from _cases import finish, next_token, tokens
from _runs import chunked_model
from ps_core import SGD, Budget
from ps_core.engine import statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._execution.plan_scheduler import PlanScheduler


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("precision", "kept"), [("bf16", 10), ("fp32", 12)])
def test_sgd_reserves_one_state_in_plan_and_engine(precision: str, kept: int, momentum: float) -> None:
    """Also without momentum: a schedule may set it at any step."""
    budget = Budget(device="200KiB", host="4MiB")
    told: dict[str, Any] = {"device": "emulated", "budget": budget, "precision": precision}
    told["spec"] = SGD(lr=0.01, momentum=momentum)
    with chunked_model(models.Language(), **told) as (model, optimizer):
        for index in range(3):
            next_token(model, *tokens(index)).backward()
            finish(optimizer)
        found, scheduler = statistics(model), hooks_of(model).engine.passes.scheduler
        assert isinstance(scheduler, PlanScheduler)
        planned = scheduler.planned
        assert planned is not None
        assert found.planned_passes
        optimizer.param_groups[0]["momentum"] = 0.5
        next_token(model, *tokens(3)).backward()
        finish(optimizer)
    homes = sum(planned.program.bytes_of(held.extent) for held in planned.plan.home)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert homes == round(found.bytes_per_parameter * count)
    assert kept * count <= homes <= 1.05 * kept * count
