"""Hugging Face's Trainer, unpatched: the optimizer and the scheduler are handed to it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from _hugging_face import HOST, assert_near, llama, row, tight, twin, under
from ps_core import AdamW, Budget, InvalidInput

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")

STEPS, CLIP = 5, 0.5
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers renames its options
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


def trainer(model: nn.Module, optimizer: Any, folder: Path, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{"max_steps": STEPS, "per_device_train_batch_size": 2, "max_grad_norm": CLIP, "logging_steps": 1}
        | {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 3}
        | more,
    )
    rows = [row(index) for index in range(64)]
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows[:4],
        optimizers=(optimizer, scheduler),
    )


def logged(trained: Any) -> list[tuple[float, float, float]]:
    rows = [each for each in trained.state.log_history if "grad_norm" in each]
    return [(each["loss"], each["grad_norm"], each["learning_rate"]) for each in rows]


def check_like_plain(folder: Path, *, start: int, accumulation: int = 1, **more: Any) -> Any:
    more |= {"gradient_accumulation_steps": accumulation}

    def train(model: nn.Module, optimizer: Any) -> list[tuple[float, float, float]]:
        trained = trainer(model, optimizer, folder, **more)
        trained.train()
        return logged(trained)

    model = llama()
    expected = train(model, twin(model))
    assert all(norm > CLIP for _, norm, _ in expected), "clipping would not show"

    def attempt(budget: Any) -> Any:
        return under(budget, llama(), train, accumulation_steps=accumulation)

    got, values, counted = tight(attempt, start)
    assert len(got) == STEPS
    for row_got, row_expected in zip(got, expected, strict=True):
        assert row_got == pytest.approx(row_expected, rel=1e-5)
    assert_near(values, dict(model.state_dict()), STEPS)
    return counted


def test_clipped_by_the_trainer(tmp_path: Path) -> None:
    counted = check_like_plain(tmp_path, start=280_000)
    assert counted.divergences == 0


def test_accumulated_and_evaluated_on_the_way(tmp_path: Path) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    check_like_plain(tmp_path, start=280_000, accumulation=2, **evaluation)


def test_checkpointed(tmp_path: Path) -> None:
    check_like_plain(tmp_path, start=200_000, gradient_checkpointing=True)


def test_saved_and_resumed_by_the_trainer(tmp_path: Path) -> None:
    """Its own checkpoints hold model and optimizer; in fp32 the model's are the masters."""
    saving = {"save_strategy": "steps", "save_steps": 3}

    def whole(model: nn.Module, optimizer: Any) -> Any:
        trained = trainer(model, optimizer, tmp_path, **saving)
        trained.train()
        return logged(trained)

    def resumed(model: nn.Module, optimizer: Any) -> Any:
        trained = trainer(model, optimizer, tmp_path, **saving)
        trained.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        return logged(trained)

    first, values, _ = tight(lambda budget: under(budget, llama(), whole), 290_000)
    again, resumed_values, _ = under(Budget(device=400_000, host=HOST), llama(1), resumed)
    assert again[-2:] == first[-2:]
    for name, value in values.items():
        assert torch.equal(value, resumed_values[name]), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resumed_by_the_trainer_in_16_bits(tmp_path: Path, precision: str) -> None:
    """Its checkpoints keep the model in 16 bits; the optimizer's state has the masters."""
    saving = {"save_strategy": "steps", "save_steps": 3}

    def train(checkpoint: str | None) -> Any:
        def by_trainer(model: nn.Module, optimizer: Any) -> Any:
            trained = trainer(model, optimizer, tmp_path, **saving)
            trained.accelerator.scaler = optimizer.scaler if precision == "fp16" else None
            trained.train(resume_from_checkpoint=checkpoint)
            return logged(trained)[-2:], optimizer.state_dict()["state"]

        return by_trainer

    small = AdamW(lr=1e-5)  # of which little shows in 16 bits
    told = {"precision": precision, "spec": small}
    (first, states), values, _ = under(Budget(device=400_000, host=HOST), llama(), train(None), **told)
    resume = train(str(tmp_path / "checkpoint-3"))
    (again, others), resumed, _ = under(Budget(device=400_000, host=HOST), llama(1), resume, **told)
    assert again == first
    assert all(torch.equal(value, resumed[name]) for name, value in values.items())
    for index, entry in states.items():
        assert all(torch.equal(others[index][name], value) for name, value in entry.items()), index
    assert "master" in states[0]


@pytest.mark.parametrize("tied", [False, True])
def test_the_best_model_is_loaded_exactly(tmp_path: Path, tied: bool) -> None:
    """What the Trainer saved as the best is what is there at the end, and what it saves then."""
    from safetensors.torch import load_file

    more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    more |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_only_model": True}

    def by_trainer(model: nn.Module, optimizer: Any) -> Any:
        trained = trainer(model, optimizer, tmp_path, greater_is_better=False, **more)
        trained.train()
        best = Path(trained.state.best_model_checkpoint)
        assert best.name != f"checkpoint-{STEPS}", "the last one is there anyway"
        trained.save_model(str(tmp_path / "end"))
        saved = load_file(best / "model.safetensors")
        masters = {
            name: entry["master"]
            for name, entry in zip(
                optimizer.param_groups[0]["param_names"], optimizer.state_dict()["state"].values(), strict=True
            )
        }
        return saved, load_file(tmp_path / "end" / "model.safetensors"), masters

    told = {"precision": "bf16", "spec": AdamW(lr=0.01)}
    (best, again, masters), values, _ = under(
        Budget(device=400_000, host=HOST), llama(tie_word_embeddings=tied), by_trainer, **told
    )
    assert best.keys() == again.keys()
    for name, value in best.items():
        assert torch.equal(again[name], value)
        assert torch.equal(values[name], value)
        assert torch.equal(masters[name], value.float()), "nothing of the last model is left in the masters"


def test_in_bf16_the_norms_logged_are_those_of_the_step(tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: Any) -> Any:
        trained = trainer(model, optimizer, tmp_path)
        norms = []
        optimizer.register_step_post_hook(lambda *_: norms.append(optimizer.last_norm))
        trained.train()
        return logged(trained), norms

    (rows, clipped), _, _ = tight(lambda budget: under(budget, llama(), train, precision="bf16"), 180_000)
    assert all(norm > CLIP for _, norm, _ in rows)
    assert clipped == pytest.approx([CLIP] * STEPS, rel=1e-4), "what the step sees is clipped already"
    assert all(math.isfinite(loss) for loss, _, _ in rows)


def test_in_fp16_with_the_optimizers_scaler(tmp_path: Path) -> None:
    """Accelerate scales the loss by what it is given; the log shows the loss, and the norm, without the scale."""

    def by_trainer(model: nn.Module, optimizer: Any) -> Any:
        trained = trainer(model, optimizer, tmp_path, save_strategy="steps", save_steps=STEPS)
        trained.accelerator.scaler = optimizer.scaler
        trained.train()
        assert torch.load(tmp_path / f"checkpoint-{STEPS}" / "scaler.pt") == optimizer.scaler.state_dict()
        return logged(trained), optimizer.loss_scale

    model = llama()
    plain = trainer(model, twin(model), tmp_path)
    plain.train()
    (rows, scale), _, counted = tight(lambda budget: under(budget, llama(), by_trainer, precision="fp16"), 180_000)
    assert (counted.steps, counted.skipped_steps, scale) == (STEPS, 0, 2.0**16)
    for found, expected in zip(rows, logged(plain), strict=True):
        assert found == pytest.approx(expected, rel=2e-2), "16 bits round, by far less than a scale"


def test_in_fp16_without_it_the_message_says_how(tmp_path: Path) -> None:
    def by_trainer(model: nn.Module, optimizer: Any) -> None:
        with pytest.raises(InvalidInput, match=r"trainer\.accelerator\.scaler = optimizer\.scaler"):
            trainer(model, optimizer, tmp_path).train()

    under(Budget(device=400_000, host=HOST), llama(), by_trainer, precision="fp16")
