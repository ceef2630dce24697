"""What a step does with the gradients, decided once: also where the step breaks off and the rest of it is asked for.

What was stepped by then has no gradient any more, so the norm of what is left would clip the rest by another factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ps_core.engine._gradients.store import GradientStore
from ps_core.engine._optim.group_step import StepDecision, decide
from ps_core.engine._parameters.state import ParamState
from ps_core.engine._parameters.transitions import GradientPlace


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that broke off."""

    decision: StepDecision
    left: frozenset[int]
    """The records that it did not come to."""
    asked: tuple[float | None, float]


class StepDecisions:
    """The decisions of one model's steps."""

    def __init__(self, gradients: GradientStore) -> None:
        self._gradients = gradients
        self._begun: _Begun | None = None

    def forget(self) -> None:
        """Gradients come, or are not what they were."""
        self._begun = None

    @contextmanager
    def deciding(self, pending: list[ParamState], max_norm: float | None, loss_scale: float) -> Iterator[StepDecision]:
        """The decision, for the length of the step."""
        begun, asked = self._begun, (max_norm, loss_scale)
        self._begun = None
        if begun is not None and begun.left == _indices(pending) and begun.asked == asked:
            decision = begun.decision
        else:
            decision = decide(pending, self._gradients.norm_parts(pending), *asked)
        try:
            yield decision
        except BaseException:
            left = _indices(record for record in pending if record.gradient is not GradientPlace.NONE)
            self._begun = _Begun(decision, left, asked)
            raise


def _indices(records: Iterable[ParamState]) -> frozenset[int]:
    return frozenset(record.index for record in records)
