"""Define the states of a parameter tensor, what may happen in each, and the resulting state of its chunk.

[Note: counted uses]
A tensor may be used several times in one iteration (tied weights). Uses may overlap (recomputation inside a backward
operator). So a tensor declares its `Uses`: forward uses, backward uses that read the payload, and gradient
contributions. It leaves COMPUTE when its last open use closes. If gradients go over the parameters, the slot may be
overwritten once no payload read is left. Contributions may still arrive after that, such as a tied embedding's gradient
at the embedding's backward. Earlier ones are kept apart until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from ps_core._errors import IllegalTransition, InvalidInput
from ps_core._trace import Phase, Trace


class TensorState(StrEnum):
    """Say where a tensor is in its iteration.

    FREE            No payload. Registered: the name, shape and type only. Memory: nothing.
    HOLD            The payload is the parameter (or a slot whose contents are dead and await a gradient). Registered:
                    its place in the chunk. Memory: its bytes on whichever tier the chunk is on; it may move.
    COMPUTE         At least one use is open. Registered: a view of the chunk on the computing tier. Memory: its bytes
                    there, and it is pinned; copies below count where they are.
    HOLD_AFTER_FWD  As HOLD; a forward operator has used it, and the forward pass (or the recomputation) goes on.
    HOLD_AFTER_BWD  As HOLD; a backward operator has used it. Where gradients go over parameters and no payload read
                    is left, the payload is the gradient so far. Memory: unchanged: no bytes for the gradient alone.
    """

    FREE = "free"
    COMPUTE = "compute"
    HOLD = "hold"
    HOLD_AFTER_FWD = "hold_after_fwd"
    HOLD_AFTER_BWD = "hold_after_bwd"


class Event(StrEnum):
    """Name what happens to a tensor.

    FORWARD_DONE comes once for every tensor when the whole forward pass is over. PASS_DONE ends an evaluation, or a
    micro-batch after which the payload is still the parameter. REBUILD makes it the parameter again from its fp32
    master (after a skipped step, or at the start). A forward event after FORWARD_DONE is recomputation.
    """

    ALLOCATE = "allocate"
    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    FORWARD_DONE = "forward_done"
    PRE_BACKWARD = "pre_backward"
    POST_BACKWARD = "post_backward"
    PASS_DONE = "pass_done"
    PRE_STEP = "pre_step"
    POST_STEP = "post_step"
    REBUILD = "rebuild"
    RELEASE = "release"


class ChunkState(StrEnum):
    """Say what state a chunk has by its tensors' states.

    FREE      No tensor has a payload; the slot can be used for something else.
    RELEASED  As FREE, for a chunk that other processes hold (a gathered group).
    COMPUTE   Some tensor is being used: pinned to the computing tier.
    HOLD      May sit on any tier, and may be evicted.
    """

    FREE = "free"
    RELEASED = "released"
    COMPUTE = "compute"
    HOLD = "hold"

    @property
    def evictable(self) -> bool:
        """Return True if the chunk may be moved off its tier."""
        return self is ChunkState.HOLD


def _table() -> MappingProxyType[tuple[TensorState, Event], TensorState]:
    free, compute, hold = TensorState.FREE, TensorState.COMPUTE, TensorState.HOLD
    after_fwd, after_bwd = TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD
    rows: tuple[tuple[Event, tuple[TensorState, ...], TensorState | None], ...] = (
        # event, states it may happen in, state it leads to (None: the same)
        (Event.ALLOCATE, (free,), hold),
        (Event.PRE_FORWARD, (hold, after_fwd, after_bwd, compute), compute),
        (Event.POST_FORWARD, (compute,), after_fwd),
        (Event.FORWARD_DONE, (hold, after_fwd), hold),
        (Event.FORWARD_DONE, (free,), None),
        (Event.PRE_BACKWARD, (hold, after_fwd, after_bwd, compute), compute),
        (Event.POST_BACKWARD, (compute,), after_bwd),
        (Event.PASS_DONE, (hold, after_fwd, after_bwd), hold),
        (Event.PASS_DONE, (free,), None),
        (Event.PRE_STEP, (after_bwd,), compute),
        (Event.POST_STEP, (compute,), hold),
        (Event.REBUILD, (hold, after_bwd), hold),
        (Event.RELEASE, (hold, after_fwd, after_bwd), free),
    )
    return MappingProxyType({(state, event): to or state for event, states, to in rows for state in states})


TRANSITIONS = _table()
"""Every legal (state, event) and the state it leads to. COMPUTE is left only when the last open use closes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """Count how often one micro-batch uses a tensor; see [Note: counted uses]."""

    forward: int = 0
    payload_reads: int = 0
    """Backward uses that need the parameter itself."""
    gradients: int = 0
    """Backward uses that make a gradient, or a part of one."""


def count_uses(trace: Trace) -> tuple[Uses, ...]:
    """Count each tensor's uses in the trace's moments."""
    forward: Counter[int] = Counter()
    reads: Counter[int] = Counter()
    gradients: Counter[int] = Counter()
    for moment in trace.moments:
        (forward if moment.phase is Phase.FORWARD else reads).update(moment.reads)
        gradients.update(moment.grads)
    return tuple(
        Uses(forward=forward[index], payload_reads=reads[index], gradients=gradients[index])
        for index in range(len(trace.tensors))
    )


def chunk_state(states: Iterable[TensorState], *, remote: bool = False) -> ChunkState:
    """Return the state of a chunk whose tensors are in ``states``; ``remote``: other processes hold its payload."""
    found = set(states)
    if TensorState.COMPUTE in found:
        return ChunkState.COMPUTE
    if found <= {TensorState.FREE}:
        return ChunkState.RELEASED if remote else ChunkState.FREE
    return ChunkState.HOLD


@dataclass(slots=True)
class _Record:
    """One tensor's state, and how many of its `Uses` are over."""

    name: str
    uses: Uses
    overwrites: bool
    state: TensorState = TensorState.FREE
    forward_done: bool = False
    forwards: int = 0
    reads: int = 0
    gradients: int = 0
    open: Counter[tuple[Event, bool, bool]] = field(default_factory=Counter)
    """Uses that have begun: the event that closes one, whether it reads the payload, whether it brings a gradient."""

    def opened(self, closes: Event) -> int:
        return sum(count for use, count in self.open.items() if use[0] is closes)

    @property
    def reads_left(self) -> int:
        return self.uses.payload_reads - self.reads

    @property
    def overwritten(self) -> bool:
        return self.overwrites and self.gradients > 0 and self.reads_left == 0

    def begin(self) -> None:
        self.forward_done = False
        self.forwards = self.reads = self.gradients = 0


def _may_forward(record: _Record, reads: bool, gradient: bool) -> bool:
    if record.forward_done:
        return record.reads_left > 0  # recomputation, while a backward use still wants the parameter
    return record.forwards + record.opened(Event.POST_FORWARD) < record.uses.forward


def _may_finish_forward(record: _Record, reads: bool, gradient: bool) -> bool:
    return not record.forward_done and record.forwards == record.uses.forward


def _may_backward(record: _Record, reads: bool, gradient: bool) -> bool:
    begun = [use for use in record.open.elements() if use[0] is Event.POST_BACKWARD]
    return (
        record.forward_done
        and (reads or gradient)
        and record.reads + sum(use[1] for use in begun) + reads <= record.uses.payload_reads
        and record.gradients + sum(use[2] for use in begun) + gradient <= record.uses.gradients
    )


def _may_close_forward(record: _Record, reads: bool, gradient: bool) -> bool:
    return record.opened(Event.POST_FORWARD) > 0


def _may_close_backward(record: _Record, reads: bool, gradient: bool) -> bool:
    # A recomputation is part of the backward operator around it.
    return record.open[Event.POST_BACKWARD, reads, gradient] > 0 and not record.opened(Event.POST_FORWARD)


def _may_end_pass(record: _Record, reads: bool, gradient: bool) -> bool:
    if not record.forward_done:
        return True
    finished = record.reads_left == 0 and record.gradients == record.uses.gradients
    return finished and (record.state is TensorState.FREE or not record.overwritten)


def _may_step(record: _Record, reads: bool, gradient: bool) -> bool:
    return record.gradients == record.uses.gradients > 0 and record.reads_left == 0


def _may_close_step(record: _Record, reads: bool, gradient: bool) -> bool:
    return record.opened(Event.POST_STEP) > 0


def _may_rebuild(record: _Record, reads: bool, gradient: bool) -> bool:
    untouched = not record.forward_done and record.forwards == 0
    return untouched or (record.overwritten and record.gradients == record.uses.gradients)


def _may_release(record: _Record, reads: bool, gradient: bool) -> bool:
    partial = 0 < record.gradients < record.uses.gradients
    return not (partial and record.overwritten)


_GUARDS: MappingProxyType[Event, Callable[[_Record, bool, bool], bool]] = MappingProxyType(
    {
        Event.PRE_FORWARD: _may_forward,
        Event.POST_FORWARD: _may_close_forward,
        Event.FORWARD_DONE: _may_finish_forward,
        Event.PRE_BACKWARD: _may_backward,
        Event.POST_BACKWARD: _may_close_backward,
        Event.PASS_DONE: _may_end_pass,
        Event.PRE_STEP: _may_step,
        Event.POST_STEP: _may_close_step,
        Event.REBUILD: _may_rebuild,
        Event.RELEASE: _may_release,
    }
)

_CLOSED_BY = MappingProxyType(
    {
        Event.PRE_FORWARD: Event.POST_FORWARD,
        Event.PRE_BACKWARD: Event.POST_BACKWARD,
        Event.PRE_STEP: Event.POST_STEP,
    }
)
_BEGINS_ANEW = frozenset({Event.PASS_DONE, Event.POST_STEP, Event.REBUILD})
_USES_OF_BACKWARD = ((True, True), (True, False), (False, True))


class StateBook:
    """The state of every tensor on one process."""

    def __init__(self, names: Sequence[str], uses: Sequence[Uses], *, overwrites: bool) -> None:
        if len(names) != len(uses):
            raise InvalidInput(f"{len(names)} names for the uses of {len(uses)} tensors")
        self._records = [_Record(name, use, overwrites) for name, use in zip(names, uses, strict=True)]

    @classmethod
    def of_trace(cls, trace: Trace, *, overwrites: bool) -> StateBook:
        """Return a book for a trace's tensors, all of them FREE."""
        return cls([tensor.name for tensor in trace.tensors], count_uses(trace), overwrites=overwrites)

    def __len__(self) -> int:
        return len(self._records)

    def state(self, tensor: int) -> TensorState:
        """Return the state a tensor is in."""
        return self._records[tensor].state

    def chunk(self, tensors: Iterable[int], *, remote: bool = False) -> ChunkState:
        """Return the state of the chunk that these tensors make up."""
        return chunk_state((self._records[tensor].state for tensor in tensors), remote=remote)

    def may_overwrite(self, tensor: int) -> bool:
        """Return True if a gradient may overwrite the payload now: forward is over, and no read is left."""
        record = self._records[tensor]
        return record.overwrites and record.forward_done and record.reads_left == 0

    def gradient_complete(self, tensor: int) -> bool:
        """Return True if every contribution to the gradient has arrived; False for a tensor that gets none."""
        record = self._records[tensor]
        return record.gradients == record.uses.gradients > 0

    def legal(self, tensor: int) -> tuple[Event, ...]:
        """Return the events that may happen to a tensor now."""
        record = self._records[tensor]
        return tuple(event for event in Event if any(_is_legal(record, event, *flags) for flags in _USES_OF_BACKWARD))

    def apply(self, tensor: int, event: Event, *, reads: bool = True, gradient: bool = False) -> TensorState:
        """Apply an event to a tensor; raise `IllegalTransition`, and change nothing, if it cannot happen.

        ``reads`` and ``gradient`` matter to backward events only: whether the use needs the parameter, and whether it
        makes a gradient. The closing event must say the same as the opening one.
        """
        record = self._records[tensor]
        if not _is_legal(record, event, reads, gradient):
            raise IllegalTransition(
                subject=record.name,
                state=record.state.name,
                event=event.value,
                expected=tuple(legal.value for legal in self.legal(tensor)),
            )
        target = TRANSITIONS[record.state, event]
        if event in _CLOSED_BY:
            closes = _CLOSED_BY[event]
            record.open[(closes, reads, gradient) if closes is Event.POST_BACKWARD else (closes, True, False)] += 1
        elif event in _CLOSED_BY.values():
            target = self._close(record, event, reads, gradient, target)
        if event is Event.FORWARD_DONE:
            record.forward_done = True
        elif event in _BEGINS_ANEW:
            record.begin()
        record.state = target
        return target

    @staticmethod
    def _close(record: _Record, event: Event, reads: bool, gradient: bool, target: TensorState) -> TensorState:
        use = (event, reads, gradient) if event is Event.POST_BACKWARD else (event, True, False)
        record.open[use] -= 1
        if event is Event.POST_FORWARD:
            record.forwards += not record.forward_done
        elif event is Event.POST_BACKWARD:
            record.reads += reads
            record.gradients += gradient
        return TensorState.COMPUTE if record.open.total() else target


def _is_legal(record: _Record, event: Event, reads: bool, gradient: bool) -> bool:
    if (record.state, event) not in TRANSITIONS:
        return False
    guard = _GUARDS.get(event)
    return guard is None or guard(record, reads, gradient)
