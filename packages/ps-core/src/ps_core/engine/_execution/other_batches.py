"""Decide what becomes of batches that a plan was not made for.

[Note: batches in turn]
A loop may use batches of several structures in turn, as with labels and without. If their passes have the same moments,
one plan serves them all: it leaves free what the largest of them needs in each moment. If not, the plan in force stays,
and the other passes run on demand. Such a plan is changed for another twice at once, in case the loop goes on with
other batches. After that the other batches must come in 2, 4, 8 ... steps in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ps_core._extents import SegmentName
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._tracing.batch_shape import BatchShape
from ps_core.engine._tracing.first_pass import begins_like, same_moments
from ps_core.engine._tracing.pass_recording import MomentRecord, PassRecording, Recorded

_CHANGES_AT_ONCE = 2
_JOINS = 3
_MOST_EVALUATIONS = 8
"""Evaluations of so many shapes are remembered."""


class OtherBatches:
    """Remember which batches the plan in force serves besides its own, and how often batches changed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Remember nothing yet; ``say`` logs a line about the model."""
        self._say, self._told = say, False
        self._changes = 0
        """Number of plans made that do not serve the batches of the plan before."""
        self._before: PassRecording | None = None
        """The last pass of several calls."""
        self._larger_calls = 0
        self.in_a_row = 0
        """Steps in a row that the plan in force did not serve, and that no plan was made for."""
        self._joins_left = _JOINS
        """Number of failures that `join` still allows: plans for several kinds of batches that do not fit."""
        self._dropped: Recorded | None = None
        """The last forward pass whose graph was dropped, as in a validation without ``torch.no_grad()``."""
        self._evaluated: tuple[BatchShape, int] | None = None
        """The batch of the last evaluation on demand, and its peak of non-model bytes."""
        self.evaluations: tuple[BatchShape, ...] = ()
        """Batches of evaluations that the plan serves: they ran on demand, and took no more than it leaves free."""
        self.too_large: tuple[BatchShape, ...] = ()
        """Batches of evaluations that left the plan, because they took more than it leaves free."""

    def note_dropped(self, recording: PassRecording, batch: BatchShape) -> None:
        """Remember a forward pass with gradients that no backward pass followed."""
        if self._dropped is None or batch.covers(self._dropped[1]):
            self._dropped = recording, batch

    def beside_dropped(self, recording: PassRecording, batch: BatchShape) -> PassRecording:
        """Return the pass with room in forward for one whose graph was dropped, if it is like that one."""
        if self._dropped is None or not batch.covers(self._dropped[1]):
            return recording
        dropped, count = self._dropped[0], len(self._dropped[0].moments)
        if not begins_like(dropped, recording):
            return recording
        forward = [_with_room(*pair) for pair in zip(recording.moments[:count], dropped.moments, strict=True)]
        return replace(recording, moments=forward + recording.moments[count:])

    def forget_dropped(self) -> None:
        """Forget the forward pass with gradients that no backward pass followed: no plan has room for it."""
        self._dropped = None

    def begin_plan(self) -> None:
        """Forget what the plan before served; another plan, or none, is in force."""
        self.evaluations, self.too_large, self.in_a_row = (), (), 0

    def note_too_large(self, batch: BatchShape) -> None:
        """Note that an evaluation left the plan, because it took more than the plan leaves free."""
        self.too_large = (batch, *self.too_large[: _MOST_EVALUATIONS - 1])

    def end_row(self) -> None:
        """Note a step that the plan in force served."""
        self.in_a_row = 0

    def note_failure(self) -> None:
        """Note that no plan fits for passes that `join` put together."""
        self._joins_left -= 1

    def note_evaluation(
        self, plan: EnginePlan | None, recording: PassRecording, batch: BatchShape, constant_bytes: int
    ) -> None:
        """Note what an evaluation took; the plan serves such ones if this one had its moments and no more bytes."""
        self._evaluated = batch, recording.peak_nonmodel_bytes + constant_bytes
        if plan is None:
            return
        planned = plan.segments[SegmentName.EVAL].moments
        if recording.training or len(recording.moments) != len(planned):
            return
        for moment, like in zip(recording.moments, planned, strict=True):
            if moment.held or not like.reads.issuperset(moment.reads):
                return
            if moment.nonmodel_bytes + constant_bytes > like.nonmodel_bytes:
                return
        others = [each for each in self.evaluations if not batch.covers(each)]
        self.evaluations = (batch, *others[: _MOST_EVALUATIONS - 1])

    def peak_of_evaluation(self, batch: BatchShape | None) -> int | None:
        """Return the most non-model bytes of an evaluation, if the last one was no smaller, with the same numbers."""
        if batch is None or self._evaluated is None:
            return None
        last, peak = self._evaluated
        return peak if last.values == batch.values and last.covers(batch) else None

    def covers_evaluation(self, batch: BatchShape | None) -> bool:
        """Return True if an evaluation of this batch, or of a larger one, took no more than the plan leaves free."""
        return any(each.covers(batch) for each in self.evaluations)

    def why_unserved(self, batch: BatchShape | None, planned_for: BatchShape, *, training: bool) -> str:
        """Return why a plan does not serve a pass that begins with this batch; an empty text if it does."""
        if batch is None:
            return "a part of the model is called by itself"
        if not training:
            if any(each.values == batch.values and batch.covers(each) for each in self.too_large):
                return "an evaluation that takes more than the plan leaves free"
            if self.covers_evaluation(batch):
                return ""
        if not planned_for.covers(batch):
            return planned_for.difference(batch)
        several = planned_for.later and not training
        return "an evaluation calls the model once, and the plan's pass calls it several times" if several else ""

    def confirms(self, recording: PassRecording, source: Recorded | None) -> bool:
        """Return True if a pass of several calls repeats the one before, or the one that the plan is from (``source``).

        A loop's first pass may have one more, whose graph was still alive.
        """
        before, self._before = self._before, recording
        known = [] if source is None else [source[0]]
        return any(same_moments(each, recording) for each in (*known, *([] if before is None else [before])))

    def note_larger_call(self) -> bool:
        """Note a later call with a larger batch; return True if the next pass is to be recorded for it."""
        self._larger_calls += 1
        return self._larger_calls & (self._larger_calls - 1) == 0

    def is_due(self, batch: BatchShape, planned_for: BatchShape) -> bool:
        """Return True if a plan is to be made for this batch in place of the present one; called once a step."""
        if batch.replaces(planned_for):
            return True  # it grew: the new plan serves both
        self.in_a_row += 1
        if self.in_a_row < 2 ** max(0, self._changes - _CHANGES_AT_ONCE + 1):
            if not self._told:
                self._told = True
                self._say(
                    "batches of several structures or shapes come in turn, and their passes differ: the plan stays, "
                    "and batches that it does not serve run on demand"
                )
            return False
        self._changes += 1
        return True

    def join(self, first: PassRecording, second: PassRecording) -> PassRecording | None:
        """Return a pass that leaves room in each moment for both; None: their moments differ, or such plans fail."""
        if not self._joins_left or not same_moments(first, second):
            return None
        moments = [_with_room(*pair) for pair in zip(first.moments, second.moments, strict=True)]
        return replace(first, moments=moments, foreseen=first.foreseen or second.foreseen)


def _with_room(mine: MomentRecord, yours: MomentRecord) -> MomentRecord:
    """Return a moment with as many non-model bytes as the larger of two."""
    return replace(mine, nonmodel_bytes=max(mine.nonmodel_bytes, yours.nonmodel_bytes))
