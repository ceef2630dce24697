"""Ranks that follow one plan, offload inputs of their layers, and evaluate between."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from _one_process import adds_like
from _threads import Together, run
from _zero_cases import states
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, offloaded, release, statistics
from test_planned_ranks import LAYERS, WIDTH, inputs


class Blocks(nn.Sequential):
    """Layers that are computed again in backward, from inputs that wait in host memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            with offloaded(layer, x):
                x = checkpoint(layer, x, use_reentrant=False)
        return x


def looks_and_offloads(each: Together, precision: str) -> None:
    fronts = []
    for together in (each, None):
        model = Blocks(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        seeded = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=WIDTH**-0.5, generator=seeded)
        size = 4 if precision == "fp32" else 2
        fronts.append(
            chunked(
                model,
                AdamW(lr=1e-2),
                device="emulated",
                budget=Budget(device=80 * 2**10, host=2**23),
                precision=precision,
                accumulation_steps=1 if together else 2,
                collectives=together,
                options=Options(group_bytes=WIDTH * (WIDTH + 2) * size, poison=True),
            )
        )
    (model, optimizer), (single, reference) = fronts
    assert optimizer is not None
    assert reference is not None
    for step in range(4):
        mine = inputs(step, each.rank).requires_grad_()
        (model(mine).float().square().sum() / 2).backward()

        def alone(part: int, step: int = step) -> None:
            (single(inputs(step, part).requires_grad_()).float().square().sum() / 2).backward()

        adds_like(each.mesh, single, reference, alone, 2, rounds=precision != "fp32")
        for front in (optimizer, reference):
            front.step()
            front.zero_grad()
        look = torch.randn(3 + 8 * (step % 2), WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.inference_mode():  # every second batch is larger than any trained with
            assert torch.equal(model(look), single(look))
        found, wanted = states(optimizer), states(reference)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    told = statistics(model)
    assert told.planned_passes >= 3 + 2
    assert all(tier.peak_bytes <= tier.budget_bytes for tier in told.tiers.values())
    for model, _ in fronts:
        release(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_inputs_and_evaluation_beside_the_plan(precision: str) -> None:
    run(2, looks_and_offloads, precision)
