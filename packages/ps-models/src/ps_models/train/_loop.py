"""Run the training loop: plain PyTorch around `ps_core.engine`, resumable after any step."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ps_core import DoesNotFit, TierFailure
from ps_core.engine import ChunkedOptimizer, MemoryMeasurement, load_checkpoint, save_checkpoint, statistics
from ps_models.train._loggers import RunLogger
from ps_models.train._objectives import Batch, Objective
from ps_models.train._options import TrainOptions
from ps_models.train._ranks import TrainingRanks
from ps_models.train._run_folder import RunFolder
from ps_models.train._schedule import learning_rate
from ps_models.train._step_metrics import Rates, RemainingTime, StepMetrics, memory_of


@dataclass(frozen=True, kw_only=True)
class ManagedModel:
    """A managed model, the device of its inputs, and the ranks that train it."""

    model: nn.Module
    optimizer: ChunkedOptimizer
    inputs: torch.device
    ranks: TrainingRanks


@contextmanager
def short_collections() -> Iterator[None]:
    """Leave objects that exist already out of garbage collections: going through all takes as long as a fast step."""
    frozen_by_caller = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_by_caller:
            gc.unfreeze()


class Loop:
    """Train one run."""

    def __init__(
        self,
        options: TrainOptions,
        objective: Objective,
        managed: ManagedModel,
        folder: RunFolder,
        rates: Rates,
        loggers: Sequence[RunLogger],
    ) -> None:
        self.options, self.folder, self.rates = options, folder, rates
        self.model, self.optimizer, self._inputs = managed.model, managed.optimizer, managed.inputs
        self.objective, self._ranks = objective, managed.ranks
        self._held = managed.ranks.share(objective)
        self._loggers, self._remaining = loggers, RemainingTime()
        self.step = 0
        """The number of steps done, those of earlier calls included."""
        self.sequences = 0
        """The number of sequences used, which is the position in the data."""
        self.val_loss: float | None = None
        """The loss of the last validation."""
        self._least_val_loss = math.inf
        self._without_gain = 0
        """The number of validations in a row whose loss was not below ``_least_val_loss``."""
        self.moved_bytes: Counter[str] = Counter()
        """Bytes moved by link in this call's steps, without validations."""
        self.not_finite = ""
        """The loss that was NaN or infinite, so that training stopped, and what to try; empty: none was."""
        self.memory = MemoryMeasurement(self.model) if self._ranks.size == 1 else None
        """Measures the last step; None with several ranks."""
        self._saved = 0

    def say(self, text: str) -> None:
        """Report a text to all loggers."""
        for each in self._loggers:
            each.say(text)

    def resume(self) -> bool:
        """Load the newest checkpoint; return False if there is none."""
        self._ranks.agree("--out (a folder that all processes see): the newest checkpoint", self.folder.steps()[:1])
        found = self.folder.load_newest(self._load, self.say)
        if found is None:
            return False
        self.step = self._saved = int(found["step"])
        self.sequences, self.val_loss = int(found["sequences"]), found["val_loss"]
        least = found.get("least_val_loss")  # checkpoints of earlier versions have none
        self._least_val_loss = math.inf if least is None else float(least)
        self._without_gain = int(found.get("validations_without_gain", 0))
        if self.options.keep_best:
            best = found.get("best")
            if best is not None and best < self.folder.best()[1]:
                self.folder.set_best(self.step, float(best))  # as the call that was killed after the save had not done
            self.folder.check_best(self.step, self.say)
        return True

    @property
    def out_of_patience(self) -> bool:
        """Return True if the validation loss has not fallen for ``--patience`` validations, so that training ends."""
        return self.options.patience is not None and self._without_gain >= self.options.patience

    def _note_validation(self, loss: float) -> None:
        """Count validations without an improvement. All ranks have the same losses, so they count alike."""
        if loss < self._least_val_loss:
            self._least_val_loss, self._without_gain = loss, 0
        else:
            self._without_gain += 1

    def _load(self, path: Path) -> Mapping[str, Any]:
        groups = self.optimizer.param_groups
        numbers = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in groups]
        found: Mapping[str, Any] = load_checkpoint(path, self.model, self.optimizer)
        for group, told in zip(self.optimizer.param_groups, numbers, strict=True):
            group.update(told)  # as this call's options have them: they may change from call to call
        return found

    def run(self, asked: Callable[[], bool]) -> None:
        """Train up to the last step, or until ``asked``, and save; or until a loss is not finite."""
        options = self.options
        metrics = self.folder.metrics(self.step)
        try:
            self.model.train()
            while self.step < options.steps and not self.out_of_patience and not asked():
                row = self._run_step()
                metrics.write(row.as_dict())
                for each in self._loggers:
                    each.step(row, self._remaining.left_s(options.steps - self.step))
                self._check(row)
                if self.not_finite:
                    return
                if row.val_loss is not None:
                    self._note_validation(row.val_loss)
                best = False
                if options.keep_best and row.val_loss is not None:
                    best = self._ranks.first(row.val_loss < self.folder.best()[1])
                every = options.checkpoint_every
                if best or self.step == options.steps or (every and self.step % every == 0):
                    metrics.sync()
                    sound = row.val_loss is not None and math.isfinite(row.val_loss)
                    self._save(sound=sound, best=row.val_loss if best else None)
            if self.step > self._saved:
                metrics.sync()
                self._save(sound=False)
        finally:
            metrics.close()

    def _check(self, row: StepMetrics) -> None:
        """Set ``not_finite`` if the step has such a loss; else note that the newest checkpoint is sound.

        A step's loss is that of the weights before it, which may be in the newest checkpoint. A validation's is that of
        the weights after it. All processes have the same sums, so they stop at the same step.
        """
        options = self.options
        if math.isfinite(row.loss):
            self.folder.note_sound(self._saved, options.keep)
        told = {"loss": row.loss, "validation loss": 0.0 if row.val_loss is None else row.val_loss}
        wrong = next((name for name, value in told.items() if not math.isfinite(value)), None)
        if wrong is not None and options.on_nan == "stop":
            left = self.folder.drop_unsound(row.step - 1) if wrong == "loss" else self._saved
            self.not_finite = f"step {row.step}: the {wrong} is {told[wrong]}; {self._what_to_try(left)}"
            return
        if row.skipped and (options.precision != "fp16" or self.optimizer.scaler.get_scale() < 1):
            self.say(f"step {row.step} changed nothing: a gradient was not finite; try a smaller --lr")

    def _what_to_try(self, left: int) -> str:
        """Return what to try, and where the same command resumes: after step ``left``, or from the start (0)."""
        options = self.options
        clip = f"a smaller --clip (now {options.clip:g})" if options.clip else "--clip 1 (now not clipped)"
        wider = ", --precision bf16" if options.precision == "fp16" else ""
        found = f"the last sound checkpoint, {self.folder.checkpoint(left)}" if left else "the start, for no checkpoint"
        rest = "" if left else " is sound"
        return (
            f"try a smaller --lr (now {options.lr:g}), a longer --warmup (now {options.warmup_steps}), {clip}{wider}: "
            f"so changed, the command goes on from {found}{rest}; with --on-nan continue training does not stop"
        )

    def _run_step(self) -> StepMetrics:
        """Run one step, and its validation if it has one."""
        options, before = self.options, statistics(self.model).moved_bytes
        started = time.perf_counter()
        rate = learning_rate(options, self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        measured = self.memory if self.step + 1 == options.steps else None
        with measured.passes() if measured else nullcontext():
            loss = self._ranks.total(self._gradients())
        stops = self.options.on_nan == "stop" and not math.isfinite(loss)
        if not stops:
            with measured.update() if measured else nullcontext():
                self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        self._remaining.add(seconds)
        self.step += 1
        self.sequences += options.batch * options.accumulate
        counted = statistics(self.model)
        validates = self.step == options.steps or (options.eval_every and self.step % options.eval_every == 0)
        if validates and not stops:
            self.val_loss = self.validate()
        norm = None if stops else self.optimizer.last_norm
        moved = {link: count - before.get(link, 0) for link, count in counted.moved_bytes.items()}
        self.moved_bytes.update(moved)
        return StepMetrics(
            step=self.step,
            loss=loss,
            lr=rate,
            grad_norm=math.nan if norm is None else norm,
            memory=memory_of(counted),
            moved_bytes=moved,
            skipped=stops or self.optimizer.last_skipped,
            val_loss=self.val_loss if validates and not stops else None,
            tokens_per_s=self.rates.tokens_per_s(seconds) * self._ranks.size,
            tflops=self.rates.tflops(seconds),
            mfu=self.rates.mfu(seconds),
        )

    def _gradients(self) -> float:
        """Run all micro-batches of a step, once more if memory runs out; return their mean loss."""
        try:
            return self._passes()
        except (torch.OutOfMemoryError, DoesNotFit) as error:
            if self._ranks.size > 1:
                raise  # the other ranks are still in their passes
            reason = str(error).splitlines()[0]
        # Outside the handler: its traceback would keep the failed pass's tensors alive.
        self.say(f"step {self.step + 1} ran out of memory ({reason}); trying it once more")
        self.optimizer.zero_grad()
        return self._passes()

    def _passes(self) -> float:
        options, ranks, total = self.options, self._ranks, 0.0
        count = options.batch // ranks.size
        whole = self.objective.counted(self.sequences, options.batch * options.accumulate)
        for micro in range(options.accumulate):
            first = self.sequences + micro * options.batch + ranks.rank * count
            loss = self._loss(self.objective.batch(first, count)) / (whole / self.objective.counted(first, count))
            self.optimizer.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    def _loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(**{name: each.to(self._inputs) for name, each in batch.items()}).loss
        return loss

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss over the held-back sequences, the same each time."""
        self.model.eval()
        try:
            mine = sum([self._loss(batch).item() * count for batch, count in self._held])
        finally:
            self.model.train()
        return self._ranks.total(mine) / self._ranks.total(sum(count for _, count in self._held))

    def _save(self, *, sound: bool, best: float | None = None) -> None:
        extra = {"step": self.step, "sequences": self.sequences, "val_loss": self.val_loss}
        extra["least_val_loss"] = self._least_val_loss if math.isfinite(self._least_val_loss) else None
        extra["validations_without_gain"], extra["best"] = self._without_gain, best
        try:
            save_checkpoint(self.folder.checkpoint(self.step), self.model, self.optimizer, extra=extra)
        except TierFailure as error:
            if not isinstance(error.__cause__, OSError):
                raise
            newest = max(self.folder.steps(), default=0)
            raise TierFailure(
                f"{error.__cause__.filename or self.folder.checkpoint(self.step)}: the checkpoint could not be written "
                f"({error.__cause__.strerror}): make room; the same command goes on from "
                f"{f'step {newest}' if newest else 'the start'}"
            ) from error
        self._saved = self.step
        self.folder.saved(self.step, self.options.keep, sound=sound, best=best)
