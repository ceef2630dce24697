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
from typing import Any

from ps_core import Budget, InvalidInput, Options
from ps_core.engine import is_managed, statistics
from ps_core.integrations._missing import missing
from ps_core.integrations._torch_optimizers import ManagedSettings, manage_with

try:
    from transformers import Trainer, TrainingArguments
except ModuleNotFoundError as error:
    raise missing(error, "transformers") from error

__all__ = ["ChunkedTrainer", "ChunkedTrainingArguments", "ManagedArguments", "ManagedTrainerMixin"]

_LOGGED = ("tiers.", "moved_bytes.")


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
        for name in ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "fsdp", "deepspeed", "torch_compile"):
            if getattr(self, name, None):
                raise InvalidInput(
                    f"{name}={getattr(self, name)!r} does not go with a memory budget: leave {name} out, or give "
                    f"{name}=False (SFTConfig turns bf16 on by itself); precision= says what is computed in, "
                    "device_memory= how much of the accelerator is used"
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
    accelerator: Any
    optimizer_cls_and_kwargs: Any

    def engine_options(self) -> Options:
        """Return the engine's `Options`; a subclass may return others."""
        return Options()

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer by the arguments, and put the model under management with its settings."""
        if self.optimizer is not None and not is_managed(self.model):
            raise InvalidInput(
                "the Trainer was given an optimizer of its own: leave optimizers= out, or call chunked(...) yourself "
                "and hand its model and optimizer to transformers.Trainer"
            )
        if self.optimizer is not None:
            return self.optimizer
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise InvalidInput(
                f"{self.args.world_size} processes with {self.args.n_gpu} devices each: this trainer uses one process "
                "and one device; set CUDA_VISIBLE_DEVICES to one, or use ps_dist in a loop of your own"
            )
        with _all_trained(self.model):
            made = super().create_optimizer(model)  # type: ignore[misc]  # Trainer's, which comes next
        settings = ManagedSettings(
            budget=self.args.to_budget(),
            device=self.args.managed_device,
            precision=self.args.precision,
            options=self.engine_options(),
            accumulation_steps=self.args.gradient_accumulation_steps,
        )
        self.optimizer = manage_with(self.model, made, settings, self.args.device)
        if self.args.precision == "fp16":
            self.accelerator.scaler = self.optimizer.scaler
        return self.optimizer

    def log(self, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """Log the bytes on each tier and moved on each link beside what `Trainer` logs of a step."""
        if "loss" in logs and is_managed(self.model):
            counted = statistics(self.model).as_dict().items()
            logs |= {name: float(value) for name, value in counted if name.startswith(_LOGGED)}
        super().log(logs, *more, **named)  # type: ignore[misc]  # Trainer's, which comes next


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
