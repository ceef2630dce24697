"""Moments as they happen: which groups each one touched, which gradients came, how high the tide was.

[Note: moments]
A moment begins when a call touches a group that the moment before did not read, or a gradient arrives for a group that
it neither read nor brought gradients for. So a moment is a run of work on one group or a few, about a layer; the same
model on the same kind of batch makes the same moments again. Parameters whose memory somebody still holds on to (a
checkpoint's recomputed block) are *held*: they belong to the moment although it does not touch them, and where they
lie they stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ps_core._trace import Amounts, Moment, Phase, Tensor, Trace
from ps_core.engine._parameters.state import ParamGroup, ParamState


@dataclass(slots=True)
class MomentRecord:
    """One moment."""

    backward: bool
    reads: tuple[int, ...]
    """Groups whose weight the moment was begun for."""
    gains: tuple[int, ...]
    """Groups it was begun for because a gradient arrived."""
    held: tuple[int, ...] = ()
    """Parameters whose memory somebody has held on to since the moment before."""
    name: str = ""
    touched: dict[int, None] = field(default_factory=dict)
    """Tensors, in order."""
    grads: dict[int, None] = field(default_factory=dict)
    """Tensors whose gradients arrived."""
    nonmodel_bytes: int = 0
    work: Amounts | None = None
    """As a fake pass counted it; None: to be guessed."""


@dataclass(slots=True)
class PassRecording:
    """The moments of one pass."""

    beats: list[MomentRecord] = field(default_factory=list)
    regular: bool = True
    """One forward, then one backward, and nothing in between."""
    training: bool = True
    """Whether it was to have a backward pass."""
    overrun: bool = False
    """A moment took more of the compute tier than its plan had left for it."""

    @property
    def ends_backward(self) -> bool:
        """Whether its last moment so far is one of backward."""
        return bool(self.beats) and self.beats[-1].backward

    @property
    def complete(self) -> bool:
        """Whether it can be planned from."""
        ended = bool(self.beats) and self.ends_backward is self.training
        return self.regular and ended and (not self.training or any(beat.grads for beat in self.beats))

    def trace(
        self, model: str, records: list[ParamState], groups: list[ParamGroup], constant_bytes: int, tokens: int
    ) -> Trace:
        """The trace of this pass over these parameters; ``constant_bytes`` of non-model data are always there."""
        tensors = tuple(
            Tensor(name=record.name, numel=record.numel, trainable=record.group.trainable) for record in records
        )
        place = {record.index: number for number, record in enumerate(records)}
        moments: list[Moment] = []
        for beat, guess in zip(self.beats, self._work(records, tokens), strict=True):
            amounts = beat.work or Amounts(guess)
            read = [place[index] for index in dict.fromkeys((*beat.touched, *beat.held)) if index in place]
            for group in beat.reads:
                if not any(place[record.index] in read for record in groups[group].tensors):
                    read.append(place[groups[group].tensors[0].index])
            before = moments[-1].reads if moments else ()
            moments.append(
                Moment(
                    name=beat.name,
                    phase=Phase.BACKWARD if beat.backward else Phase.FORWARD,
                    reads=tuple(read),
                    grads=tuple(place[index] for index in beat.grads if index in place),
                    holds=tuple(place[index] for index in beat.held if place.get(index) in before),
                    nonmodel_bytes=beat.nonmodel_bytes + constant_bytes,
                    **amounts._asdict(),
                )
            )
        return Trace(model=model, tensors=tensors, moments=tuple(moments), tokens=tokens)

    def _work(self, records: list[ParamState], tokens: int) -> Iterator[float]:
        """Operations of each moment: 2 a token and element in forward, 4 in backward, wherever that comes first.

        What backward holds on to was recomputed there: 2 more.
        """
        of = {record.index: record for record in records}
        backward = [beat for beat in self.beats if beat.backward]
        held = [(of[index].group.index, beat) for beat in backward for index in beat.held if index in of]
        recomputed = {group for group, beat in held if group not in beat.reads}
        seen: set[tuple[bool, int]] = set()
        for beat in self.beats:
            new = {(beat.backward, index) for index in (*beat.touched, *beat.grads) if index in of} - seen
            seen |= new
            yield tokens * sum(
                of[index].numel * (2.0 + 2.0 * backward + 2.0 * (backward and of[index].group.index in recomputed))
                for backward, index in new
            )
