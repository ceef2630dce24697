"""Decide which passes are measured although there is a plan: counting non-model bytes takes time.

A moment's memory may depend on arguments besides tensors: a number of samples, or a flag. So a pass is measured if none
with such arguments was measured since the plan was made, and not too many passes were.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from ps_core.engine._tracing.batch_shape import BatchShape

_MOST_VALUES = 64
"""So many training passes, and as many evaluations, of a plan are measured because their numbers or texts are new."""
_Arguments: TypeAlias = tuple[bool, tuple[tuple[Any, ...], ...]]
"""Is it a pass with gradients, and what are the arguments besides tensors of each of its calls?"""


class MeasuredBatches:
    """Remember the batches whose non-model bytes are known while one plan is in force."""

    def __init__(self) -> None:
        self._measured: dict[_Arguments, BatchShape] = {}
        """The batches that the plan in force was made for, or that were measured since; see `_arguments_of`."""
        self._values_left = {True: _MOST_VALUES, False: _MOST_VALUES}
        """Number of passes that are still measured for new arguments, with gradients and without."""
        self.last_known: dict[bool, BatchShape | None] = {True: None, False: None}
        """The call that began the last pass that was not new, with gradients and without."""
        self._known_calls: BatchShape | None = None
        """The calls of the last pass of several that was not new."""
        self.unmeasured: BatchShape | None = None
        """The last pass of several calls, if none like it is known to be measured; else None."""
        self.on_one_tier: BatchShape | None = None
        """Without a plan, where everything is on one tier: the batches whose bytes are known; None: there are none."""

    def begin_plan(self, batch: BatchShape | None, *, training: bool = True) -> None:
        """Forget what was measured before: another plan, for this batch, or none is in force.

        ``training``: the plan is from a pass with gradients. What an evaluation takes is not known then.
        """
        self._measured, self._values_left = {}, {True: _MOST_VALUES, False: _MOST_VALUES}
        self.last_known, self._known_calls, self.on_one_tier = {True: None, False: None}, None, None
        if batch is not None:
            whole = replace(batch, others=())
            for each in (replace(whole, later=()), whole):
                self._measured[_arguments_of(each, training)] = each

    def is_new(self, first: BatchShape | None, *, training: bool) -> bool:
        """Return True if a pass that begins with this call is to be measured: none with such arguments was.

        Also return True, once, if any call of the training pass before had new arguments: this pass may be like it.
        """
        calls = None
        if training:
            calls, self.unmeasured = self.unmeasured, None
        if calls is not None and self._are_calls_new(calls):
            return True
        return first is not None and self._is_first_call_new(first, training)

    def _is_first_call_new(self, batch: BatchShape, training: bool) -> bool:
        if self._has_new_arguments(batch, training):
            return True
        self.last_known[training] = batch
        return False

    def _are_calls_new(self, batch: BatchShape) -> bool:
        if self._has_new_arguments(batch, training=True):
            return True
        self._known_calls = batch
        return False

    def _has_new_arguments(self, batch: BatchShape, training: bool) -> bool:
        measured = self._measured.get(_arguments_of(batch, training))
        return self._values_left[training] > 0 and (measured is None or not measured.covers(batch))

    def note_call(self, batch: BatchShape) -> None:
        """Note a further call of an open pass; ``batch`` has all calls of that pass so far."""
        known, call = self._known_calls, batch.later[-1]
        like = None if known is None or len(batch.later) > len(known.later) else known.later[len(batch.later) - 1]
        if (
            self.unmeasured is not None
            or known is None
            or like is None
            or (batch.values, batch.shapes) != (known.values, known.shapes)
            or (call.values, call.shapes) != (like.values, like.shapes)
        ):
            self.unmeasured = batch
        if self.on_one_tier is not None and not self.on_one_tier.covers(batch):
            self.on_one_tier = None

    def note_measured(self, batch: BatchShape, *, training: bool) -> None:
        """Note that a pass was measured to its end, and fits."""
        self.unmeasured = None
        first = replace(batch, later=())
        new = [first] if self._is_first_call_new(first, training) else []
        if batch.later and training and self._are_calls_new(batch):
            new.append(batch)
        self._values_left[training] -= bool(new)
        for each in new:
            key = _arguments_of(each, training)
            self._measured[key] = self._measured[key].beside(each) if key in self._measured else each

    def note_on_one_tier(self, batch: BatchShape, *, whole: bool) -> None:
        """Note that a pass without a plan was measured; ``whole``: its step has no more passes to come."""
        both = batch if self.on_one_tier is None else self.on_one_tier.beside(batch)
        self.on_one_tier = both if whole else None


def _arguments_of(batch: BatchShape, training: bool) -> _Arguments:
    """Return the arguments besides tensors of all calls of a pass."""
    return training, (batch.values, *(each.values for each in batch.later))
