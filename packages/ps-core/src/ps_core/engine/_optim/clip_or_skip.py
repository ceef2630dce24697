"""Decide once what a step does with the gradients: also where it breaks off, and the rest of it is asked for.

What was stepped by then has no gradient any more, so the norm of what is left would clip the rest by another factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

import torch

from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._parameters.state_transitions import GradientPlace

_DEVICE = attrgetter("device")


@dataclass(frozen=True, slots=True)
class StepDecision:
    """Says what the step does with all gradients: multiply by a factor, or skip."""

    norm: float
    skip: bool
    factor: float
    """Undoes the loss scale and clips."""


def decide(records: list[ParamState], parts: list[torch.Tensor], max_norm: float | None, scale: float) -> StepDecision:
    """Compute the global norm, and return whether to skip the step and the factor for gradients."""
    total, finite = 0.0, True
    for record, (squares, flag) in zip(records, numbers(parts), strict=True):
        total += squares * record.factor**2
        finite = finite and not flag
    norm = math.sqrt(total) / scale if total >= 0 else math.nan
    if not finite or not math.isfinite(norm):
        return StepDecision(norm if finite else math.inf, True, 0.0)
    return StepDecision(norm, False, clip_factor(norm, max_norm) / scale)


def numbers(parts: list[torch.Tensor]) -> list[list[float]]:
    """Return the values of every part, copied from each device in one transfer."""
    found: dict[int, list[float]] = {}
    devices = set(map(_DEVICE, parts))
    if len(devices) == 1:
        rows: list[list[float]] = torch.stack(parts).tolist()
        return rows
    for device in devices:
        chosen = [index for index, part in enumerate(parts) if part.device == device]
        found.update(zip(chosen, torch.stack([parts[index] for index in chosen]).tolist(), strict=True))
    return [found[index] for index in range(len(parts))]


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients of this norm; as in ``torch.nn.utils.clip_grad_norm_``."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


@dataclass(frozen=True, slots=True)
class BrokenStep:
    """A step that broke off."""

    decision: StepDecision
    left: frozenset[int]
    """The records that it did not come to."""
    asked: tuple[float | None, float]


class StepDecisions:
    """The decisions of one model's steps."""

    def __init__(self, gradients: GradientStore) -> None:
        self._gradients = gradients
        self.begun: BrokenStep | None = None
        """The step that broke off, if the next one may be the rest of it."""

    def forget(self) -> None:
        """Gradients come, or are not what they were."""
        self.begun = None

    @contextmanager
    def deciding(self, pending: list[ParamState], max_norm: float | None, loss_scale: float) -> Iterator[StepDecision]:
        """Yield the decision for the length of the step."""
        begun, asked = self.begun, (max_norm, loss_scale)
        self.begun = None
        if begun is not None and begun.left == _indices(pending) and begun.asked == asked:
            decision = begun.decision
        else:
            parts = [record.norm_part for record in pending if record.norm_part is not None]
            if len(parts) < len(pending):
                parts = self._gradients.norm_parts(pending)
            decision = decide(pending, parts, *asked)
        try:
            yield decision
        except BaseException:
            left = _indices(record for record in pending if record.gradient is not GradientPlace.NONE)
            self.begun = BrokenStep(decision, left, asked)
            raise


def _indices(records: Iterable[ParamState]) -> frozenset[int]:
    return frozenset(record.index for record in records)
