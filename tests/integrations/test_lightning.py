"""`ps_core.integrations.lightning` against Lightning itself, at the same seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from _hugging_face import llama, row
from ps_core import AlreadyManaged, Budget, InvalidInput, Options
from ps_core.engine import chunked, is_managed, release, statistics

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from ps_core.integrations.lightning import ChunkedStrategy

STEPS = 6
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)`"),
    pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode at the start of training"),
]


class Automatic(pl.LightningModule):
    """As most are: one network, a loss, an optimizer and a scheduler."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.network = llama(seed)
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.network(**batch).loss
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.network(**batch).loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Automatic):
    """Calls backward and step itself."""

    automatic_optimization = property(lambda self: False, lambda self, value: None)

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        optimizer.zero_grad()


class Apart(Automatic):
    """Parameters in several places, which its own `training_step` brings together."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.head = nn.Linear(64, 64, bias=False)

    def training_step(self, batch: Any, index: int) -> Any:
        logits = self.head(self.network(batch["input_ids"]).logits)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.losses.append(loss.item())
        return loss


def strategy(precision: str = "fp32") -> ChunkedStrategy:
    return ChunkedStrategy(
        budget=Budget(device=400_000, host="64MiB"),
        precision=precision,
        options=Options(group_bytes=8192, poison=True),
    )


def fit(module: Any, folder: Path, chosen: Any = "auto", checkpoint: str | None = None, **more: Any) -> Any:
    loader = torch.utils.data.DataLoader([row(index) for index in range(64)], batch_size=2)
    told = {
        "max_steps": STEPS,
        "limit_train_batches": 3,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    told |= {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "default_root_dir": str(folder)}
    trainer = pl.Trainer(strategy=chosen, **told | more)
    held = torch.utils.data.DataLoader([row(index) for index in range(4)], batch_size=2)
    trainer.fit(module, loader, held, ckpt_path=checkpoint)
    return trainer


@pytest.mark.parametrize("kind", [Automatic, Manual, Apart])
@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulated"])
def test_the_same_bits_as_lightning(tmp_path: Path, kind: type, more: dict[str, Any]) -> None:
    if kind is Manual and more:
        pytest.skip("Lightning refuses accumulate_grad_batches with manual optimization")
    torch.manual_seed(1)
    expected = kind()
    torch.manual_seed(1)
    found = kind()
    found.load_state_dict(expected.state_dict())
    fit(expected, tmp_path, **more)
    trainer = fit(found, tmp_path, strategy(), **more)
    assert found.losses == expected.losses
    assert len(found.losses) >= STEPS
    assert found.rates == expected.rates
    counted = statistics(found)
    assert counted.steps == STEPS
    assert counted.evictions > 0
    assert counted.tiers["device"].peak_bytes <= 400_000
    if kind is not Apart:
        assert counted.divergences == 0
        assert trainer.callback_metrics["val_loss"].isfinite()
    release(found)
    wanted = expected.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in found.state_dict().items())


def test_clipped_to_rounding(tmp_path: Path) -> None:
    expected, found = Automatic(), Automatic()
    fit(expected, tmp_path, gradient_clip_val=0.5)
    fit(found, tmp_path, strategy(), gradient_clip_val=0.5)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    plain = Automatic()
    fit(plain, tmp_path)
    assert plain.losses != pytest.approx(expected.losses, rel=1e-5), "clipping would not show"
    release(found)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resumes_exactly_from_lightnings_checkpoint(tmp_path: Path, precision: str) -> None:
    whole, begun, rest = Automatic(), Automatic(), Automatic(1)
    trainer = fit(whole, tmp_path, strategy(precision))
    states = trainer.optimizers[0].state_dict()["state"]
    fit(begun, tmp_path, strategy(precision), max_steps=3).save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(rest, tmp_path, strategy(precision), checkpoint=str(tmp_path / "half.ckpt"))
    assert rest.losses == whole.losses[3:]
    others = resumed.optimizers[0].state_dict()["state"]
    for index, entry in states.items():
        assert all(torch.equal(others[index][name], value) for name, value in entry.items()), index
    assert ("master" in states[0]) == (precision != "fp32")
    for each in (whole, begun, rest):
        release(each)


class Halves(Apart):
    """A network that is frozen at first, and a head that is trained."""

    @property
    def backbone(self) -> Any:
        return self.network

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1, fused=True)


@pytest.mark.filterwarnings("ignore:The lr scheduler:UserWarning")
def test_a_backbone_that_is_unfrozen_has_its_own_rate(tmp_path: Path) -> None:
    """`BackboneFinetuning` unfreezes it, calls `add_param_group`, and changes the group's rate each epoch."""
    from lightning.pytorch.callbacks import BackboneFinetuning

    def train(chosen: Any) -> Any:
        module = Halves()
        callback = BackboneFinetuning(1, lambda epoch: 2.0, backbone_initial_lr=0.001, should_align=False)
        fit(module, tmp_path, chosen, callbacks=[callback], max_steps=9)
        return module

    own = ChunkedStrategy(budget=Budget(device=600_000, host="64MiB"), precision="fp32")
    plain, found = train("auto"), train(own)
    groups = [module.trainer.optimizers[0].param_groups for module in (plain, found)]
    for key in ("lr", "weight_decay"):
        assert [group[key] for group in groups[0]] == [group[key] for group in groups[1]]
    assert [len(group["params"]) for group in groups[0]] == [len(group["params"]) for group in groups[1]]
    assert groups[1][1]["lr"] not in (0.001, 0.01)
    release(found)
    assert found.losses == plain.losses
    wanted = plain.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in found.state_dict().items())


class Scaled(Automatic):
    """Has a batch size that Lightning's finder changes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([row(index) for index in range(128)], batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([row(index) for index in range(4)], batch_size=2)


@pytest.mark.parametrize(("mode", "precision"), [("power", "bf16"), ("binsearch", "fp32")])
def test_a_batch_that_fits_is_found(tmp_path: Path, mode: str, precision: str) -> None:
    """`BatchSizeFinder` tries larger batches, and then trains from the start with one that fits."""
    from lightning.pytorch.callbacks import BatchSizeFinder

    told = {"max_steps": 3, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    told |= {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "default_root_dir": str(tmp_path)}
    finder = BatchSizeFinder(mode=mode, steps_per_trial=2, margin=0.0)
    found, given = Scaled(), Scaled()
    trainer = pl.Trainer(strategy=strategy(precision), callbacks=[finder], **told)
    trainer.fit(found)
    size = found.batch_size
    assert 2 < size < 128
    given.batch_size = size
    other = pl.Trainer(strategy=strategy(precision), **told)
    other.fit(given)
    assert found.losses[-3:] == given.losses
    states = [each.optimizers[0].state_dict()["state"] for each in (trainer, other)]
    assert all(torch.equal(entry[name], states[1][index][name]) for index, entry in states[0].items() for name in entry)
    release(found), release(given)


def test_only_evaluated(tmp_path: Path) -> None:
    """Validation without `fit` keeps the budget, and has the same loss."""
    loader = torch.utils.data.DataLoader([row(index) for index in range(4)], batch_size=2)
    told = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "devices": 1}
    plain, found = Automatic(), Automatic()
    (expected,) = pl.Trainer(**told).validate(plain, loader, verbose=False)
    (got,) = pl.Trainer(strategy=strategy(), **told).validate(found, loader, verbose=False)
    assert got == expected
    assert is_managed(found)
    release(found)


class Grouped(Apart):
    """Has parameters of several sorts: frozen, in 16 bits, and of the module itself, which is managed as a whole."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.network.model.layers[0].requires_grad_(False)
        self.head.to(torch.bfloat16)
        self.register_buffer("count", torch.zeros(1))

    def training_step(self, batch: Any, index: int) -> Any:
        logits = self.head(self.network(batch["input_ids"]).logits.to(self.head.weight.dtype)).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.01, fused=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", [Automatic, Grouped])
def test_evaluated_before_it_is_trained(tmp_path: Path, kind: type, precision: str) -> None:
    """As for a baseline: the results of ``fit`` alone, to the bit, also for another trainer and another strategy."""
    loader = torch.utils.data.DataLoader([row(index) for index in range(4)], batch_size=2)
    told = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    alone, evaluated = kind(), kind()
    types = [(type(each), each.dtype) for each in evaluated.parameters()]
    first = fit(alone, tmp_path, strategy(precision))
    for _ in range(2):
        pl.Trainer(strategy=strategy(precision), devices=1, **told).validate(evaluated, loader, verbose=False)
    counted = statistics(evaluated)
    assert counted.bytes_per_parameter < 7, "masters, and no other states"
    assert counted.tiers["device"].peak_bytes <= 400_000
    second = fit(evaluated, tmp_path, strategy(precision))
    assert evaluated.losses == alone.losses
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (first, second)]
    assert states[0].keys() == states[1].keys()
    for index, entry in states[0].items():
        assert all(torch.equal(states[1][index][name], value) for name, value in entry.items()), index
    release(alone), release(evaluated)
    assert [type(each) for each in evaluated.parameters()] == [kind for kind, _ in types]


def test_weights_that_are_loaded_for_an_evaluation_are_trained_from(tmp_path: Path) -> None:
    """`validate(ckpt_path=...)` loads into the managed model; ``fit`` goes on from there, unrounded."""
    loader = torch.utils.data.DataLoader([row(index) for index in range(4)], batch_size=2)
    told = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    saved = Automatic(1)
    fit(saved, tmp_path, max_steps=1).save_checkpoint(tmp_path / "saved.ckpt")
    alone, evaluated = Automatic(), Automatic()
    alone.load_state_dict(saved.state_dict())
    fit(alone, tmp_path, strategy("bf16"))
    trainer = pl.Trainer(strategy=strategy("bf16"), devices=1, **told)
    trainer.validate(evaluated, loader, ckpt_path=str(tmp_path / "saved.ckpt"), verbose=False)
    fit(evaluated, tmp_path, strategy("bf16"))
    assert evaluated.losses == alone.losses
    release(alone), release(evaluated)


def test_a_management_of_the_users_own_is_not_ended(tmp_path: Path) -> None:
    """Only that of an evaluation is: also if the same model was evaluated before, and released."""
    loader = torch.utils.data.DataLoader([row(index) for index in range(4)], batch_size=2)
    told = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    module = Automatic()
    pl.Trainer(strategy=strategy("bf16"), devices=1, **told).validate(module, loader, verbose=False)
    release(module)
    chunked(module.network, None, budget=Budget(host="64MiB"))
    with pytest.raises(AlreadyManaged, match="release"):
        fit(module, tmp_path, strategy("bf16"))
    assert is_managed(module)
    release(module)


def test_what_is_not_managed_goes_where_batches_go() -> None:
    """A device where nothing can be computed shows what was moved."""
    module = Automatic()
    module.metric = nn.BatchNorm1d(4, affine=False)
    module.register_buffer("scale", torch.ones(1))
    chunked(module.network, None, budget=Budget(host="64MiB"))
    told = ChunkedStrategy(device="meta")
    told.connect(module)
    told.model_to_device()
    assert {module.device.type, module.scale.device.type, module.metric.running_mean.device.type} == {"meta"}
    assert {each.device.type for each in module.network.parameters()} == {"cpu"}
    release(module)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"ChunkedStrategy\(precision=...\) says what is computed in"):
        fit(Automatic(), tmp_path, strategy(), precision="bf16-mixed")

    class Two(Manual):
        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(self.parameters()), torch.optim.AdamW(self.parameters())]

    with pytest.raises(InvalidInput, match="configure_optimizers returned 2 optimizers"):
        fit(Two(), tmp_path, strategy())
