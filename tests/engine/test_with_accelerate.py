"""Accelerate, unpatched: `prepare`, `clip_grad_norm_`, gradient accumulation, a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from _hugging_face import assert_near, llama, row, tight, twin, under

pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

STEPS, CLIP = 6, 0.5


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def loop(accumulation: int) -> Any:
    def train(model: nn.Module, optimizer: Any) -> list[tuple[float, float, float]]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        loader = DataLoader([row(index) for index in range(2 * STEPS * accumulation)], batch_size=2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        logs = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = torch.tensor(0.0)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                logs.append((loss.item(), norm.item(), optimizer.param_groups[0]["lr"]))
        return logs

    return train


@pytest.mark.parametrize("accumulation", [1, 3])
def test_like_plain_pytorch(accumulation: int) -> None:
    model, train = llama(), loop(accumulation)
    expected = train(model, twin(model))
    norms = [norm for _, norm, _ in expected if norm]
    assert len(norms) == STEPS
    assert min(norms) > CLIP, "clipping would not show"

    def attempt(budget: Any) -> Any:
        return under(budget, llama(), train, accumulation_steps=accumulation)

    got, values, counted = tight(attempt, 280_000)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert_near(values, dict(model.state_dict()), STEPS)
    assert (counted.steps, counted.divergences) == (STEPS, 0)
