"""Measure each step, and compute rates from it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import torch

from ps_core._trace import Phase, Trace
from ps_core._workloads.shapes import TransformerShape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload
from ps_core.engine import Statistics
from ps_models.train._model_facts import ModelFacts
from ps_models.train._options import TrainOptions

_PEAKS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.2, "V100": 125.0}
"""Dense 16-bit TFLOPS of some cards, as their makers state them."""
_RECENT = 20
"""The number of latest steps from which the remaining time is estimated."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step's row of ``metrics.jsonl``."""

    step: int
    loss: float
    """The mean loss of all micro-batches, before the update."""
    lr: float
    grad_norm: float
    """The gradient norm before clipping."""
    tokens_per_s: float
    memory: Mapping[str, Mapping[str, int]]
    """Bytes by tier: ``current_bytes``, ``peak_bytes`` since the process began, ``budget_bytes``."""
    moved_bytes: Mapping[str, int]
    """Bytes by link in this step."""
    tflops: float
    """TFLOPS, by 8 operations per parameter and token; 2 less without checkpointing, 2 less if only adapters are
    trained.
    """
    mfu: float | None = None
    """Model FLOPs as a fraction of the device's peak, if that is known."""
    skipped: bool = False
    """True if the step changed nothing, because a gradient or the loss was not finite."""
    val_loss: float | None = None
    """The validation loss after the update, in steps that have a validation."""

    def as_dict(self) -> dict[str, Any]:
        """Return a row for JSON: values that are not finite are None, unknown ones are left out."""
        found = {row.name: getattr(self, row.name) for row in fields(self)}
        unknown = {name for name in ("mfu", "val_loss") if found[name] is None}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in found.items()
            if name not in unknown
        }

    def flat(self) -> dict[str, float]:
        """Return numbers by names with dots, for loggers."""
        numbers: dict[str, float] = {}
        for name, value in self.as_dict().items():
            if isinstance(value, Mapping):
                for inner, held in value.items():
                    parts = held.items() if isinstance(held, Mapping) else [("", held)]
                    numbers.update({".".join(filter(None, (name, inner, last))): float(one) for last, one in parts})
            elif value is not None and name != "step":
                numbers[name] = float(value)
        return numbers


class Rates:
    """The operations of a step, and the device's peak rate."""

    def __init__(self, found: ModelFacts, options: TrainOptions, device: str) -> None:
        self._tokens = options.tokens_per_step
        self.parameters = found.parameters
        self.activation_bytes: int | None = None
        """The most bytes of a pass besides weights, states and gradients, computed from the shape; None: unknown."""
        forward = 2.0 * self.parameters * options.batch * options.seq
        if isinstance(found, TransformerShape):
            trace = _trace_of(found, options)
            forward = sum(moment.flops for moment in trace.moments if moment.phase is Phase.FORWARD)
            self.activation_bytes = max(moment.nonmodel_bytes for moment in trace.moments)
            self.parameters = trace.parameters
        # Backward makes the gradients of inputs and, unless only adapters are trained, those of weights.
        passes = 3 if options.lora is None else 2
        self._counted = 2 * (passes + options.checkpointing) * self.parameters * self._tokens
        self._model = passes * forward * options.accumulate
        self.peak_tflops = options.peak_tflops or (_card_peak() if device == "cuda" else None)

    def tokens_per_s(self, seconds: float) -> float:
        """Return the tokens per second of a step that took ``seconds``."""
        return self._tokens / seconds

    def tflops(self, seconds: float) -> float:
        """Return the TFLOPS of a step that took ``seconds``; see `StepMetrics`."""
        return self._counted / seconds / 1e12

    def mfu(self, seconds: float) -> float | None:
        """Return the model FLOPs utilisation of a step; None if the device's peak is not known."""
        return None if self.peak_tflops is None else self._model / seconds / 1e12 / self.peak_tflops


def _trace_of(found: TransformerShape, options: TrainOptions) -> Trace:
    return analytic_trace(
        found,
        Workload(
            batch=options.batch,
            seq=options.seq,
            precision_bytes=4 if options.precision == "fp32" else 2,
            checkpointing=options.checkpointing,
            chunked_loss=True,
        ),
    )


def _card_peak() -> float | None:
    name = torch.cuda.get_device_name()
    return next((peak for card, peak in _PEAKS.items() if card in name), None)


def memory_of(counted: Statistics) -> dict[str, dict[str, int]]:
    """Return every tier's bytes."""
    return {
        name: {
            "current_bytes": tier.current_bytes,
            "peak_bytes": tier.peak_bytes,
            "budget_bytes": tier.budget_bytes,
        }
        for name, tier in counted.tiers.items()
    }


class RemainingTime:
    """Estimate the time of the remaining steps by the recent ones, without the first, which also plans and compiles."""

    def __init__(self) -> None:
        self._recent: deque[float] | None = None

    def add(self, seconds: float) -> None:
        """Add the time of a step."""
        if self._recent is None:
            self._recent = deque(maxlen=_RECENT)
        else:
            self._recent.append(seconds)

    def left_s(self, steps: int) -> float | None:
        """Return the seconds that ``steps`` more steps will take, or None before the second step."""
        return median(self._recent) * steps if self._recent else None
