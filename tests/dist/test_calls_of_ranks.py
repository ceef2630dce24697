"""Count the engine's Python functions that each of two ranks calls in one step."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from _threads import Together, run
from call_counts import OURS, WARM_STEPS, Counter
from ps_core import AdamW, Budget
from ps_core.engine import chunked, statistics

LAYERS = 24
LIMITS = {"fp32": 411, "bf16": 252}
"""Calls for each parameter, of which two are a group. Counted was a twentieth less; other threads change the number."""


@pytest.mark.parametrize("precision", LIMITS)
def test_calls_for_each_parameter(precision: str) -> None:
    """If this fails, print `Counter.functions`: it has the number of calls by function."""
    made = nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS)))

    def case(each: Together) -> tuple[float, int]:
        layers, budget = deepcopy(made), Budget(host="64MiB")
        model, optimizer = chunked(layers, AdamW(), precision=precision, collectives=each, budget=budget)

        def step() -> None:
            model(torch.ones(2, 16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(WARM_STEPS):
            step()
        counter, before = Counter(OURS), statistics(model).planned_passes
        counter.run(step)
        calls, _ = counter.totals
        return calls / (2 * LAYERS), statistics(model).planned_passes - before

    found, _ = run(2, case)
    for calls, planned in found:
        assert planned == 1, "the pass follows the plan"
        assert calls <= LIMITS[precision]
