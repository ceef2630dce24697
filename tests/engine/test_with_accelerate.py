"""Accelerate, unpatched: `prepare`, `clip_grad_norm_`, gradient accumulation, a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from _hugging_face import HOST, assert_near, batch, llama, row, tight, twin, under
from ps_core import AdamW, Budget

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
        for each in loader:
            with accelerator.accumulate(model):
                loss = model(**each).loss
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


def test_saved_and_loaded_in_16_bits(tmp_path: Path) -> None:
    """`save_state` keeps the model in 16 bits; the optimizer's state has the masters."""

    def train(model: nn.Module, optimizer: Any, *, resumes: bool) -> Any:
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        if resumes:
            accelerator.load_state(str(tmp_path / "state"))
        losses = []
        for index in range(3 if resumes else 0, 6):
            loss = model(**batch(index)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if index == 2:
                accelerator.save_state(str(tmp_path / "state"))
        return losses[-3:], optimizer.state_dict()["state"]

    told = {"precision": "bf16", "spec": AdamW(lr=1e-6)}
    whole, resumed = partial(train, resumes=False), partial(train, resumes=True)
    (losses, states), values, _ = under(Budget(device=400_000, host=HOST), llama(), whole, **told)
    (again, others), there, _ = under(Budget(device=400_000, host=HOST), llama(1), resumed, **told)
    assert again == losses
    assert all(torch.equal(there[name], value) for name, value in values.items())
    for index, entry in states.items():
        assert "master" in entry
        assert all(torch.equal(others[index][name], value) for name, value in entry.items()), index


def test_preparing_a_new_optimizer_moves_no_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate moves the whole state of what it is given to the accelerator, where there may be no room for it."""
    moved: list[Any] = []
    monkeypatch.setattr(accelerate.optimizer, "move_to_device", lambda state, device: moved.append(state) or state)

    def prepare(model: nn.Module, optimizer: Any) -> None:
        before = optimizer.state_dict()["state"]
        model, prepared = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
        assert [state["state"] for state in moved] == [{}]
        after = prepared.state_dict()["state"]
        assert before.keys() == after.keys()
        assert all(torch.equal(after[index]["master"], entry["master"]) for index, entry in before.items())
        model(**batch(0)).loss.backward()
        prepared.step()

    under(Budget(device=400_000, host=HOST), llama(), prepare, precision="bf16")
