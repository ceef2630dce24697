"""Two processes train with a library's own DDP, then share the model by the engine; what both leave must be equal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ps_dist
from _hugging_face import llama, row
from ps_core import Budget, InvalidInput, Options
from ps_core.engine import is_managed, statistics

ROWS = [row(index) for index in range(24)]
EVALUATED = ROWS[:7]
"""So few that one process gets one fewer than the other."""
BUDGET = {"device": 320_000, "host": "64MiB"}
OPTIONS = Options(group_bytes=8192, poison=True)
TOLD: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "learning_rate": 0.01,
    "weight_decay": 0.1,
    "max_grad_norm": 0.0,
    "seed": 3,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Arguments of the Trainer that all cases share."""
MEMORY = {"managed_device": "emulated", "device_memory": str(BUDGET["device"]), "host_memory": BUDGET["host"]}
Trained = tuple[Any, list[Any]]
"""The model, and numbers that were logged on the way."""


def with_trainer(together: Any, folder: Path, *, adapters: bool = False, precision: str = "fp32") -> Trained:
    """Evaluations, a checkpoint of all, the best model at the end, and another run from the checkpoint."""
    from transformers import Trainer, TrainingArguments

    from ps_core.integrations.transformers import ChunkedTrainer, ChunkedTrainingArguments

    class Small(ChunkedTrainer):
        def engine_options(self) -> Options:
            return OPTIONS

    model = llama()
    if adapters:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    told = TOLD | {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_eval_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "greater_is_better": True,  # so that the best is an earlier one
        "metric_for_best_model": "eval_loss",
    }
    rows = {"train_dataset": ROWS, "eval_dataset": EVALUATED}
    if together is None:
        trainer = Trainer(model, TrainingArguments(**told), **rows)
    else:
        arguments = ChunkedTrainingArguments(**told, **MEMORY, precision=precision)
        with pytest.raises(InvalidInput, match="2 processes run this program"):
            Small(model, arguments, **rows)
        trainer = Small(model, arguments, **rows, collectives=together)
    trainer.train()
    assert trainer.state.best_global_step == 2
    first = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    names = ("loss", "eval_loss", "learning_rate")
    logged = [[each.get(name) for name in names] for each in trainer.state.log_history[:-1]]
    logged.append([float(value.double().sum()) for value in first.values()])
    saved = torch.load(folder / "checkpoint-6" / "optimizer.pt")["state"]
    assert all(value.device.type == "cpu" for entry in saved.values() for value in entry.values())
    return trainer.model, logged


def with_accelerate(together: Any, folder: Path) -> Trained:
    """A frozen parameter, a schedule; the state saved, changed, and loaded."""
    from accelerate import Accelerator

    from ps_core.integrations.accelerate import ChunkedAccelerator

    if together is None:
        accelerator = Accelerator(cpu=True)
    else:
        more = {"budget": Budget(**BUDGET), "precision": "fp32", "options": OPTIONS}
        accelerator = ChunkedAccelerator(cpu=True, **more, collectives=together)
    model: Any = llama()
    model.model.norm.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(ROWS, batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []

    def epoch() -> None:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())

    epoch()
    accelerator.save_state(str(folder / "state"))
    epoch()
    accelerator.load_state(str(folder / "state"))
    epoch()
    assert losses[-len(loader) :] == losses[len(loader) : -len(loader)]
    accelerator.save_model(model, str(folder / "saved"))
    return accelerator.unwrap_model(model), losses


def with_lightning(together: Any, folder: Path) -> Trained:
    """Validations, a schedule, a checkpoint, and another run from it."""
    import lightning.pytorch as pl

    from ps_core.integrations.lightning import ChunkedParallelStrategy

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = llama()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.network(**batch).loss
            self.log("train", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("validated", self.network(**batch).loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def fit(epochs: int, resumed: Path | None = None) -> tuple[Any, Any]:
        strategy: Any = "ddp"
        if together is not None:
            strategy = ChunkedParallelStrategy(together, budget=Budget(**BUDGET), precision="fp32", options=OPTIONS)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            strategy=strategy, devices=2, accelerator="cpu", max_epochs=epochs, default_root_dir=folder, **quiet
        )
        module = Module()
        loaders = DataLoader(ROWS, batch_size=2), DataLoader(EVALUATED, batch_size=2)
        trainer.fit(module, *loaders, ckpt_path=resumed)
        return trainer, module

    trainer, _ = fit(2)
    trainer.save_checkpoint(folder / "two.ckpt")
    found = [{name: float(value) for name, value in trainer.callback_metrics.items()}]
    _, module = fit(3, folder / "two.ckpt")
    return module.network, found


def with_generation(together: Any, folder: Path) -> Trained:
    """Predictions that are generated, on one process for longer; the optimizer's file on each of two computers."""
    from accelerate.utils import gather_object
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from ps_core.integrations.transformers import ManagedArguments, ManagedTrainerMixin

    @dataclass
    class Arguments(ManagedArguments, Seq2SeqTrainingArguments):  # type: ignore[misc]
        """Add the fields of `ManagedArguments` to those of the library."""

    class Small(ManagedTrainerMixin, Seq2SeqTrainer):  # type: ignore[misc]
        def engine_options(self) -> Options:
            return OPTIONS

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    model: Any = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    model.generation_config.update(do_sample=True, eos_token_id=[1, 2, 3, 4, 5, 6])  # rows end at different lengths
    told = TOLD | {"output_dir": str(folder), "max_steps": 2, "save_strategy": "no", "per_device_eval_batch_size": 1}
    told |= {
        "save_on_each_node": True,
        "per_device_train_batch_size": 1,
        "predict_with_generate": True,
        "generation_max_length": 24,
    }
    if together is None:
        trainer = Seq2SeqTrainer(model, Seq2SeqTrainingArguments(**told), train_dataset=ROWS)
    else:
        trainer = Small(model, Arguments(**told, **MEMORY, precision="fp32"), train_dataset=ROWS, collectives=together)
    trainer.train()
    lengths: list[int] = []
    generate = model.generate

    def counted(**named: Any) -> Any:
        tokens = generate(**named)
        lengths.append(tokens.shape[1])
        return tokens

    model.generate = counted
    found = trainer.predict(EVALUATED)
    del model.generate
    assert len(set(map(tuple, gather_object([lengths])))) == 2, "both wrote as many tokens in every batch"
    computer = folder / str(trainer.args.process_index)
    computer.mkdir()
    trainer._save_optimizer_and_scheduler(str(computer))
    state = torch.load(computer / "optimizer.pt")["state"]
    assert not any(value.is_meta for entry in state.values() for value in entry.values())
    return model, [found.predictions.tolist(), found.metrics["test_loss"], lengths]


LIBRARIES: dict[str, Callable[..., Trained]] = {
    "trainer": with_trainer,
    "generation": with_generation,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
}


def main(library: str, folder: Path) -> None:
    """Write whether weights and logged numbers are equal to the last bit, and what the engine counted."""
    options = {"adapters": True} if library == "adapters" else {}
    if library == "generation":
        os.environ["LOCAL_RANK"] = "0"  # the first process of its computer
    train = LIBRARIES["trainer" if options else library]
    plain, expected = train(None, folder / "plain", **options)
    with ps_dist.connect(timeout_s=60) as together:
        model, found = train(together, folder / "ours", **options)
        assert is_managed(model)
        wanted, weights = plain.state_dict(), model.state_dict()
        equal = [torch.equal(value, weights[name]) for name, value in wanted.items()]
        counted = statistics(model)
        told = {"equal": all(equal) and len(weights) == len(wanted), "logged": found == expected}
        peak = counted.tiers["device"].peak_bytes
        told |= {"evictions": counted.evictions, "unplanned": counted.passes - counted.planned_passes, "peak": peak}
        if options:
            narrow, _ = train(together, folder / "narrow", **options, precision="bf16")
            told["narrow"] = statistics(narrow).steps
        (folder / f"{together.process}.json").write_text(json.dumps(told), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
