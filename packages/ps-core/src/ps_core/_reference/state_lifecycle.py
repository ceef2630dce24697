"""Follow tensor states through a plan's execution: each instruction becomes the events that it means.

One process follows its tensors. Each of several follows the gathered tensors: FREE until gathered, and again when the
group is dropped. Behind these the book has an entry for each shard.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ps_core._extents import Kind, SegmentName
from ps_core._plan import Accumulate, Cast, Gather, Op, ReduceScatter, Step
from ps_core._program import Program, Visit
from ps_core._states import Event, StateBook, TensorState, Uses, count_uses
from ps_core._trace import Phase


@dataclass(slots=True)
class Lifecycle:
    """Drive a `StateBook`; an order of instructions that a tensor's states do not allow raises `IllegalTransition`."""

    program: Program
    early: frozenset[int] = frozenset()
    """Groups that are stepped within backward."""
    book: StateBook = field(init=False)
    _turned: bool = False

    def __post_init__(self) -> None:
        program, trace = self.program, self.program.trace
        uses = count_uses(trace) if program.training else tuple(Uses(forward=use.forward) for use in count_uses(trace))
        names = [tensor.name for tensor in trace.tensors]
        if self._sharded:
            steps = [Uses(gradients=len(visits[:1])) for visits in program.gradient_visits]
            names, uses = [*names, *(f"shard of group {index}" for index in range(len(steps)))], (*uses, *steps)
        self.book = StateBook(names, uses, overwrites=program.overwrites)
        for index in self._kept:
            self.book.apply(index, Event.ALLOCATE)

    @property
    def _sharded(self) -> bool:
        return self.program.sharded

    @property
    def _kept(self) -> range:
        """Return the entries of the book that always hold data."""
        return range(len(self.program.trace.tensors) if self._sharded else 0, len(self.book))

    def _entries(self, group: int) -> tuple[int, ...]:
        """Return the entries that a group's step changes."""
        if self._sharded:
            return (len(self.program.trace.tensors) + group,)
        return self.program.layout.groups[group].tensors

    def before_run(self, visit: Visit) -> None:
        """Note that a moment is about to run."""
        moment = self.program.trace.moments[visit.index]
        if moment.phase is Phase.FORWARD:
            for tensor in moment.reads:
                self.book.apply(tensor, Event.PRE_FORWARD)
            return
        self._turn()
        for tensor in dict.fromkeys((*moment.reads, *moment.grads)):
            if self.book.state(tensor) is TensorState.FREE:
                self.book.apply(tensor, Event.ALLOCATE)
            self.book.apply(tensor, Event.PRE_BACKWARD, reads=tensor in moment.reads, gradient=tensor in moment.grads)

    def after_run(self, visit: Visit) -> None:
        """Note that a moment has run; its gradients are not written yet."""
        moment = self.program.trace.moments[visit.index]
        if moment.phase is Phase.FORWARD:
            for tensor in moment.reads:
                self.book.apply(tensor, Event.POST_FORWARD)
            return
        for tensor in dict.fromkeys((*moment.reads, *moment.grads)):
            self.book.apply(tensor, Event.POST_BACKWARD, reads=tensor in moment.reads, gradient=tensor in moment.grads)

    def _turn(self) -> None:
        if not self._turned:
            self._turned = True
            for index in range(len(self.book)):
                self.book.apply(index, Event.FORWARD_DONE)

    def after(self, op: Op) -> None:
        """Note that an instruction other than a moment was carried out."""
        match op:
            case Gather():
                self._set_free(op.group, free=False)
            case ReduceScatter() if self.program.overwrites:
                self._gain(op.group)
            case Accumulate() if self._sharded:
                self._gain(op.group)
            case Step():
                for event in (Event.PRE_STEP, Event.POST_STEP):
                    self._each(op.group, event)
            case Cast():
                self._each(op.group, Event.REBUILD)

    def dropped(self, kind: Kind, group: int) -> None:
        """Note that a slot that held a group is released."""
        if kind is Kind.FULL:
            self._set_free(group, free=True)

    def _set_free(self, group: int, *, free: bool) -> None:
        for tensor in self.program.layout.groups[group].tensors:
            if (self.book.state(tensor) is TensorState.FREE) is not free:
                self.book.apply(tensor, Event.RELEASE if free else Event.ALLOCATE)

    def _gain(self, group: int) -> None:
        """Note that a shard's gradient has arrived."""
        for event in (Event.PRE_BACKWARD, Event.POST_BACKWARD):
            for entry in self._entries(group):
                self.book.apply(entry, event, reads=False, gradient=True)

    def _each(self, group: int, event: Event) -> None:
        for entry in self._entries(group):
            self.book.apply(entry, event)

    def end(self, segment: SegmentName) -> None:
        """Note that a segment is over. Tensors that a step or a skipped step will change stay as they are."""
        if segment in (SegmentName.PROLOGUE, SegmentName.STEP):
            return
        waiting: set[int] = set()
        stepped = {entry for group in self.program.stepped if group not in self.early for entry in self._entries(group)}
        if segment is SegmentName.MICRO_LAST:
            waiting = stepped
        elif segment is SegmentName.SKIP:
            if self.program.overwrites:
                return
            for entry in sorted(stepped):
                self.book.apply(entry, Event.PASS_DONE)
            return
        for group in range(len(self.program.layout.groups) if self._sharded else 0):
            self._set_free(group, free=True)  # a buffer may have been used for something else before it was given back
        if segment.is_micro:
            self._turn()
        self._turned = False
        for index in range(len(self.book)):
            if index not in waiting:
                self.book.apply(index, Event.PASS_DONE)
