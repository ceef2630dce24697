"""Lightning's Trainer, unpatched: automatic and manual optimization, both through `optimizer.step(closure)`."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from _hugging_face import HOST, assert_near, llama, row, tight
from ps_core import AdamW, Budget, Options
from ps_core.engine import WeightAverage, chunked, release, statistics

pytest.importorskip("transformers", reason="transformers is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the library's own imports
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

STEPS, CLIP, LR = 6, 0.5, 1e-2
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*already saved the best:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Task(lightning.LightningModule):
    """A language model trained by Lightning; ``automatic``: Lightning calls backward and the optimizer's step."""

    def __init__(self, net: nn.Module, optimizer: Any, *, automatic: bool = True) -> None:
        super().__init__()
        self.net, self.made = net, optimizer
        self.automatic_optimization = automatic
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(**batch).loss
        self.losses.append(loss.item())
        self.rates.append(self.made.param_groups[0]["lr"])
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, CLIP, "norm")
        optimizer.step()
        self.lr_schedulers().step()
        return None

    def validation_step(self, batch: Any, index: int) -> None:
        self.evaluated.append(self.net(**batch).loss.item())

    def configure_optimizers(self) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(self.made, 2, gamma=0.5)
        return {"optimizer": self.made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(task: Task, folder: Path, *, batches: int = STEPS, checkpoint: Path | None = None, **more: Any) -> Any:
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "enable_checkpointing": False, "limit_train_batches": batches} | more,
    )
    train, val = ([row(start + index) for index in range(size)] for start, size in ((0, 64), (90, 4)))
    trainer.fit(task, DataLoader(train, batch_size=2), DataLoader(val, batch_size=2), ckpt_path=checkpoint)
    return trainer


def plain(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=LR, fused=True)


def managed(budget: Budget, train: Any, *, seed: int = 0, **more: Any) -> Any:
    """What ``train(model, optimizer)`` returned, the weights it left, and what was counted."""
    options = Options(poison=True, group_bytes=8192)
    arguments = {"device": "emulated", "precision": "fp32", "options": options} | more
    model, optimizer = chunked(llama(seed), AdamW(lr=LR), budget=budget, **arguments)
    try:
        found = train(model, optimizer)
        counted = statistics(model)
    finally:
        release(model)
    assert counted.tiers["device"].peak_bytes <= budget.device_bytes
    return found, dict(model.state_dict()), counted


@pytest.mark.parametrize(
    ("automatic", "accumulation", "clip"), [(True, 1, None), (True, 2, None), (True, 2, CLIP), (False, 1, CLIP)]
)
def test_like_plain_pytorch(tmp_path: Path, automatic: bool, accumulation: int, clip: float | None) -> None:
    def train(model: nn.Module, optimizer: Any) -> Any:
        task = Task(model, optimizer, automatic=automatic)
        more = {"accumulate_grad_batches": accumulation, "gradient_clip_val": clip} if automatic else {}
        trainer = fit(task, tmp_path, batches=STEPS * accumulation, val_check_interval=2, **more)
        assert trainer.global_step == STEPS
        return task.losses, task.evaluated, task.rates

    model = llama()
    expected = train(model, plain(model))
    got, values, counted = tight(lambda budget: managed(budget, train, accumulation_steps=accumulation), 280_000)
    assert counted.evictions > 0, "nothing was ever evicted"
    assert (counted.steps, counted.skipped_steps) == (STEPS, 0)
    assert got[2] == expected[2]
    if clip or not automatic:
        assert got[0] == pytest.approx(expected[0], rel=1e-5)
        assert got[1] == pytest.approx(expected[1], rel=1e-5)
        assert_near(values, dict(model.state_dict()), STEPS)
    else:
        assert got == expected
        assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_of_lightning_resumes_to_the_bit(tmp_path: Path, precision: str) -> None:
    def whole(model: nn.Module, optimizer: Any) -> Any:
        return trained(model, optimizer, None)

    def resumed(model: nn.Module, optimizer: Any) -> Any:
        return trained(model, optimizer, tmp_path / "step=3.ckpt")

    def trained(model: nn.Module, optimizer: Any, checkpoint: Path | None) -> Any:
        task = Task(model, optimizer)
        saving = lightning.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
        more = {"max_epochs": 2, "enable_checkpointing": True, "callbacks": [saving]}
        fit(task, tmp_path, batches=STEPS // 2, checkpoint=checkpoint, **more)
        return task.losses, task.rates, optimizer.state_dict()["state"]

    budget = Budget(device=400_000, host=HOST)
    (losses, rates, states), values, _ = managed(budget, whole, precision=precision)
    (again, rates_again, others), last, _ = managed(budget, resumed, seed=1, precision=precision)
    assert (again, rates_again) == (losses[3:], rates[3:])
    assert all(torch.equal(last[name], value) for name, value in values.items())
    for index, entry in states.items():
        assert all(torch.equal(others[index][name], value) for name, value in entry.items()), index


class Average(lightning.Callback):
    """The callback of docs/recipes.md: a moving average of the weights, with which Lightning validates."""

    def __init__(self, average: WeightAverage) -> None:
        self.average, self.block = average, ExitStack()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > self.average.updates:
            self.average.update()

    def on_validation_start(self, *_: Any) -> None:
        if self.average.updates:
            self.block.enter_context(self.average.applied())

    def on_validation_end(self, *_: Any) -> None:
        self.block.close()


def test_an_average_is_that_of_lightnings_callback(tmp_path: Path) -> None:
    more = {"accumulate_grad_batches": 2, "val_check_interval": 4, "batches": 2 * STEPS}
    model = llama()
    expected = Task(model, plain(model))
    theirs = lightning.callbacks.WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.5))
    fit(expected, tmp_path, callbacks=[theirs], **more)

    def train(model: nn.Module, optimizer: Any) -> Any:
        task, average = Task(model, optimizer), WeightAverage(model, 0.5)
        fit(task, tmp_path, callbacks=[Average(average)], **more)
        with average.applied():
            return task.losses, task.evaluated, model.state_dict()

    budget = Budget(device=400_000, host=HOST)
    (losses, evaluated, averages), _, counted = managed(budget, train, accumulation_steps=2)
    assert counted.evictions > 0
    assert (losses, evaluated) == (expected.losses, expected.evaluated)
    for name, value in model.state_dict().items():  # Lightning leaves the average in the model
        assert torch.equal(averages[name], value), name
