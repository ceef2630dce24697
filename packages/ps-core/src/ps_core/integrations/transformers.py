"""Use Hugging Face's Trainer under a memory budget, without passing an optimizer.

`ChunkedTrainer` and `ChunkedTrainingArguments` replace `Trainer` and `TrainingArguments`. For other trainers that are
built on these, such as those of TRL, put the two mixins first::

    @dataclass
    class Arguments(ManagedArguments, trl.SFTConfig): ...

    class SFTTrainer(ManagedTrainerMixin, trl.SFTTrainer): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ps_core import Budget, InvalidInput, Options
from ps_core.engine import is_managed, statistics
from ps_core.integrations._missing import missing
from ps_core.integrations._torch_optimizers import ManagedSettings, check_connected, manage_with, values_on_rank_0

try:
    from transformers import GenerationMixin, Trainer, TrainingArguments
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, _is_peft_model

    from ps_core.integrations.accelerate import ManagedAccelerator
except ModuleNotFoundError as error:
    raise missing(error, "transformers") from error

__all__ = ["ChunkedTrainer", "ChunkedTrainingArguments", "ManagedArguments", "ManagedTrainerMixin"]

_LOGGED = ("tiers.", "moved_bytes.")
_OF_PRECISION = "precision= says what is computed in"
_OF_THE_TRAINER = (
    "device_memory= says how much of the accelerator is used, and the trainer takes collectives= for several processes"
)
_INSTEAD = {
    "bf16": f"{_OF_PRECISION} (SFTConfig needs bf16=False, for it turns this on by itself)",
    **dict.fromkeys(("fp16", "bf16_full_eval", "fp16_full_eval"), _OF_PRECISION),
    **dict.fromkeys(("fsdp", "deepspeed"), _OF_THE_TRAINER),
    "torch_compile": "compile the model's blocks, as in `for block in model.model.layers: block.compile()`",
}
"""Arguments of the library's that are refused, with what takes their place."""


@dataclass
class ManagedArguments:
    """Add arguments for the budget and the precision to `TrainingArguments` or a subclass of it."""

    precision: str = field(default="bf16", metadata={"help": "what is computed in: bf16, fp16 or fp32"})
    managed_device: str = field(default="auto", metadata={"help": "auto, cpu, emulated or cuda"})
    device_memory: str | None = field(default=None, metadata={"help": "the accelerator's budget, as 20GiB"})
    host_memory: str | None = field(default=None, metadata={"help": "the computer's budget, as 100GiB"})
    disk: str | None = field(default=None, metadata={"help": "disk space for a third tier, as 500GiB"})
    disk_dir: str | None = field(default=None, metadata={"help": "the folder of the disk tier"})

    def __post_init__(self) -> None:
        """Check that the library itself will not change precision or split the model."""
        super().__post_init__()  # type: ignore[misc]  # TrainingArguments', which comes next
        for name, instead in _INSTEAD.items():
            if getattr(self, name, None):
                raise InvalidInput(
                    f"{name}={getattr(self, name)!r} does not go with a memory budget: leave {name} out; {instead}"
                )

    @property
    def place_model_on_device(self) -> bool:
        """Return False: the engine moves the model, as far as the budget allows."""
        return False

    def to_budget(self) -> Budget:
        """Return the memory that the arguments allow."""
        return Budget(device=self.device_memory, host=self.host_memory, disk=self.disk, disk_dir=self.disk_dir)


class ManagedTrainerMixin:
    """Train under the budget of the arguments; put this before `Trainer` or a subclass of it."""

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    optimizer_cls_and_kwargs: Any

    def __init__(self, *arguments: Any, collectives: Any = None, **named: Any) -> None:
        """Make the trainer; with ``collectives`` (``ps_dist.connect()``), the processes that torchrun started share
        the model.
        """
        self._collectives = collectives
        super().__init__(*arguments, **named)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and leave it to the engine to share the model between processes."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # Trainer's, which comes next
        check_connected(self._collectives, self.args.world_size)
        self.accelerator.__class__ = ManagedAccelerator  # Trainer has no place to pass one in

    def engine_options(self) -> Options:
        """Return the engine's `Options`; a subclass may return others."""
        return Options()

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer by the arguments, and put the model under management with its settings."""
        if self.optimizer is not None and not is_managed(self.model):
            raise InvalidInput(
                "the Trainer was given an optimizer of its own: leave optimizers= out, or call chunked(...) yourself "
                "and pass its model and optimizer to this trainer"
            )
        if self.optimizer is not None:
            return self.optimizer
        if self.args.n_gpu > 1:
            raise InvalidInput(
                f"this process sees {self.args.n_gpu} devices and uses one: set CUDA_VISIBLE_DEVICES to one, or start "
                f"torchrun --nproc-per-node={self.args.n_gpu} and pass collectives=ps_dist.connect()"
            )
        with _all_trained(self.model):
            made = super().create_optimizer(model)  # type: ignore[misc]  # Trainer's, which comes next
        settings = ManagedSettings(
            budget=self.args.to_budget(),
            device=self.args.managed_device,
            precision=self.args.precision,
            options=self.engine_options(),
            accumulation_steps=self.args.gradient_accumulation_steps,
            collectives=self._collectives,
        )
        self.optimizer = manage_with(self.model, made, settings, self.args.device)
        if self.args.precision == "fp16":
            self.accelerator.scaler = self.optimizer.scaler
        return self.optimizer

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Train on a batch; ``generate`` runs forward passes on every process until all have finished."""
        with _generates_together(self.model, self.args.world_size):
            return super().training_step(*arguments, **named)  # type: ignore[misc]  # Trainer's, which comes next

    def prediction_step(self, *arguments: Any, **named: Any) -> Any:
        """Evaluate a batch; ``generate`` runs forward passes on every process until all have finished."""
        with _generates_together(self.model, self.args.world_size):
            return super().prediction_step(*arguments, **named)  # type: ignore[misc]  # Trainer's, which comes next

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and self.args.world_size > 1 and is_managed(self.model):
            with values_on_rank_0([self.model], every_process=self.args.save_on_each_node):
                state_dict = self.model.state_dict()  # all processes take part
        super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]  # Trainer's, which comes next

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.world_size == 1:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]  # Trainer's, which comes next
            return
        with values_on_rank_0([self.model], every_process=self.args.save_on_each_node):
            state = self.optimizer.state_dict()  # all processes take part
        if self.args.should_save:
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, *arguments: Any, **named: Any) -> None:
        with _adapters_as_they_are(self.model):
            super()._load_from_checkpoint(*arguments, **named)  # type: ignore[misc]  # Trainer's, which comes next

    def _load_best_model(self) -> None:
        with _adapters_as_they_are(self.model):
            super()._load_best_model()  # type: ignore[misc]  # Trainer's, which comes next

    def log(self, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """Log the bytes on each tier and moved on each link beside what `Trainer` logs of a step."""
        if "loss" in logs and is_managed(self.model):
            counted = statistics(self.model).as_dict().items()
            logs |= {name: float(value) for name, value in counted if name.startswith(_LOGGED)}
        super().log(logs, *more, **named)  # type: ignore[misc]  # Trainer's, which comes next


@contextmanager
def _adapters_as_they_are(model: Any) -> Iterator[None]:
    """Make PEFT load adapters in the type they have: it would replace those of 16 bits by fp32 parameters."""
    if not _is_peft_model(model) or not is_managed(model):
        yield
        return
    model.load_adapter = partial(model.load_adapter, autocast_adapter_dtype=False)
    try:
        yield
    finally:
        del model.load_adapter


@contextmanager
def _generates_together(model: Any, processes: int) -> Iterator[None]:
    """Make ``generate`` of a shared model run forward passes on every process until all have finished."""
    shared = processes > 1 and is_managed(model)
    generators = [each for each in model.modules() if isinstance(each, GenerationMixin)] if shared else []
    try:
        for each in generators:
            each._is_fsdp_managed_module = True  # what transformers asks for it
        yield
    finally:
        for each in generators:
            each._is_fsdp_managed_module = False


@contextmanager
def _all_trained(model: Any) -> Iterator[None]:
    """Put frozen parameters into the optimizer too, in the group of their names: they may be unfrozen later."""
    frozen = [each for each in model.parameters() if each.is_floating_point() and not each.requires_grad]
    try:
        for each in frozen:
            each.requires_grad_(True)
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)


@dataclass
class ChunkedTrainingArguments(ManagedArguments, TrainingArguments):
    """`TrainingArguments` that also say the budget and the precision."""


class ChunkedTrainer(ManagedTrainerMixin, Trainer):
    """A `Trainer` whose model stays within the budget of its `ChunkedTrainingArguments`."""
