"""Run collectives in one order on all ranks, on the thread that communicates with them.

See [Note: one order of collectives] in `collective_schedule`. The training thread prepares collectives. The other
thread runs them in order, as far as all ranks agree. Where another rank needs something else first, those that were not
done yet are passed over. The training thread finds the decision the next time it looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch

from ps_core._plan import Queue
from ps_core.engine._devices.device import Event
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._memory.transfer_observer import TransferObserver
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._sharding.collective_schedule import (
    WINDOW,
    Collective,
    CompletedCollective,
    Decision,
    Headroom,
    Proposal,
    ProposalKind,
    ScheduledCollective,
    choose,
    givers,
    takers,
    tensors_of,
)
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives, CollectiveSession, Pending
from ps_core.engine._sharding.streams import CollectiveOrdering


@dataclass(slots=True, eq=False)
class StagedGradients:
    """A group's gradients, side by side."""

    slot: Slot
    records: dict[ParamState, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class CollectiveOp:
    """One collective, prepared by this process."""

    collective: Collective
    group: ParamGroup
    position: int | None
    """In the schedule; None: a rank requested it out of order."""
    shard: torch.Tensor
    """This rank's shard, for a gather. The shard that receives the sum, for a sum."""
    whole: torch.Tensor | None = None
    """Where gathered shards go, or the gradients to sum. None: this rank takes or gives nothing."""
    scratch: torch.Tensor | None = None
    slots: tuple[Slot, ...] = ()
    """Slots to release afterwards."""
    slot: Slot | None = None
    """The slot that receives the result; None: none, or its buffers were released for lack of memory."""
    staged: StagedGradients | None = None
    """The gradients that it gives."""
    proposals: Sequence[Proposal] = ()
    """The proposals that led to it, where a rank requested it."""
    ready: Sequence[Event] = ()
    """Events that it comes after."""
    over: Event | None = None
    """Behind it, where it is work of a stream."""
    pending: Pending | None = None
    done: bool = False
    index: int = -1
    """Its place among the pass's collectives; -1: no rank wanted it."""
    tensors: int = 0
    """Whose gradients were summed."""


@dataclass(slots=True)
class LocalState:
    """This rank's gradients for sums, as bits; both threads change them, under the lock."""

    staged: int = 0
    complete: int = 0
    tensors: int = 0
    coming: int = 0
    """Groups whose gradients may still come."""
    given: int = 0
    """Groups whose sum was taken."""
    ended: bool = False
    """Nothing more comes."""


class CollectiveOrder:
    """One process's part in the order of things."""

    def __init__(
        self,
        together: AsyncCollectives,
        groups: Sequence[ParamGroup],
        ordering: CollectiveOrdering,
        watcher: TransferObserver,
    ) -> None:
        self._together, self._ordering, self._watcher = together, ordering, watcher
        self._groups = len(groups)
        self._tensors = 1 + max((record.index for group in groups for record in group.tensors), default=-1)
        self._mask = [sum(1 << record.index for record in group.tensors) for group in groups]
        self._lock = Lock()
        self.known = LocalState()
        self.backward = False
        """True: this rank is in its backward pass."""
        self.schedule: list[ScheduledCollective] = []
        self._collectives: list[Collective] = []
        self.prepared = 0
        """Positions before it were prepared by this process."""
        self.position = 0
        """Positions before it were done by all."""
        self._agreed: tuple[Sequence[Proposal], int, int] = ((), 0, 0)
        """Proposals, the position they were sent at, and the position up to which all ranks follow the schedule."""
        self._decision: tuple[Decision, Sequence[Proposal]] | None = None
        self._round = 0
        """Choices that the driver acted on; whatever was begun before the last of them is void, unless it is done."""
        self._wants = 0
        """Positions of gathers that this process will use."""
        self.done: list[CompletedCollective] = []

    # The driver's side.

    def open(self, schedule: list[ScheduledCollective], coming: int) -> None:
        """Begin a pass with this schedule; ``coming``: groups, as bits, whose gradients may come."""
        self.schedule, self._collectives = schedule, [entry.collective for entry in schedule]
        self.prepared = self.position = self._wants = 0
        self._agreed, self._decision = ((), 0, 0), None
        self.known, self.backward = LocalState(coming=coming), False
        self.done = []

    @property
    def following(self) -> bool:
        """True if the next position of the schedule may be prepared."""
        return self.prepared < min(len(self.schedule), self.position + WINDOW)

    def find(self, collective: Collective) -> int | None:
        """Return the position of a collective in the rest of the schedule; None if it is not there."""
        for place in range(self.prepared, len(self._collectives)):
            if self._collectives[place] == collective:
                return place
        return None

    def follow(self, step: CollectiveOp) -> None:
        """Submit the collective at the next position of the schedule."""
        with self._lock:
            if step.position == self.prepared:
                self.prepared += 1
            if step.collective.kind is ProposalKind.GATHER and step.whole is not None and step.position is not None:
                self._wants |= 1 << step.position
        self.submit(step)

    def submit(self, step: CollectiveOp) -> None:
        """Submit a collective: of the schedule (again), or one that all ranks agreed on."""
        step.ready = self._ordering.ready()
        step.pending = self._together.start(partial(self._carry_out, step, self._round))

    def skip_gather(self, position: int) -> None:
        """Skip the gather at a position: the group was gathered out of order."""
        with self._lock:
            self._wants &= ~(1 << position)

    def send(self, kind: ProposalKind, arg: int = 0, room: int = Headroom.TIGHT) -> Pending:
        """Send a proposal to all ranks; `pop_decision` returns what they decide."""
        return self._together.start(partial(self._send, kind, arg, room, self._round))

    @property
    def has_decision(self) -> bool:
        """True if there is a decision that the training thread has to carry out."""
        return self._decision is not None

    def pop_decision(self) -> tuple[Decision, Sequence[Proposal]]:
        """Return what all ranks are to do, and the proposals that led to it."""
        assert self._decision is not None, "a proposal was sent"
        self._round += 1  # before it is gone, or what was begun earlier could still be done
        found, self._decision = self._decision, None
        return found

    def takers(self, collective: Collective, proposals: Sequence[Proposal]) -> list[int]:
        """Return the ranks that receive a gather requested out of order."""
        return takers(proposals, collective, self._collectives, self.position, None)

    def stage(self, record: ParamState) -> None:
        """Note that a gradient is there."""
        with self._lock:
            self.known.staged |= 1 << record.group.index
            self.known.tensors |= 1 << record.index

    def complete(self, group: ParamGroup) -> None:
        """Note that all gradients of a group are there."""
        with self._lock:
            self.known.complete |= 1 << group.index & ~self.known.given

    def expect(self, coming: int) -> None:
        """Backward is on: gradients of these groups may still come, and of no others."""
        with self._lock:
            self.known.coming, self.backward = coming, True

    def end(self) -> None:
        """Note that no more gradients come in this pass."""
        with self._lock:
            self.known.ended = True

    def final(self, group: ParamGroup) -> bool:
        """True if no further gradients of the group can come on this rank."""
        return bool(self._final() >> group.index & 1)

    def _final(self) -> int:
        known = self.known
        if known.ended:
            return (1 << self._groups) - 1
        open_ones = known.coming & ~known.given | known.staged
        return (known.complete | ~open_ones) & ((1 << self._groups) - 1)

    # The other thread's side.

    def _proposal(self, kind: ProposalKind, arg: int, room: int = Headroom.TIGHT) -> Proposal:
        with self._lock:
            known, wants = self.known, 0
            if kind is ProposalKind.FOLLOW:
                arg = min(self.prepared, self.position + WINDOW)
                wants = self._wants >> self.position & ((1 << WINDOW) - 1)
            return Proposal(kind, arg, wants, known.staged, self._final(), known.tensors, room, self.backward)

    def _exchange(self, session: CollectiveSession, proposal: Proposal) -> tuple[Decision, list[Proposal]]:
        text = proposal.pack(self._groups, self._tensors)
        texts = session.exchange(text, "what comes next")
        proposals = [Proposal.unpack(each, self._groups, self._tensors) for each in texts]
        ahead = 0
        for collective in self._collectives[self.position :]:
            ahead |= 1 << collective.group if collective.kind is ProposalKind.SUM else 0
        decision = choose(proposals, ahead)
        if decision.kind is ProposalKind.FOLLOW:
            self._agreed = (proposals, self.position, decision.arg)
        return decision, proposals

    def _send(self, kind: ProposalKind, arg: int, room: int, number: int, session: CollectiveSession) -> None:
        if self._decision is None and number == self._round:
            self._decision = self._exchange(session, self._proposal(kind, arg, room))

    def _carry_out(self, step: CollectiveOp, number: int, session: CollectiveSession) -> None:
        if self._decision is not None or number != self._round:
            return  # it is for the driver to do something else first
        if step.position is None:
            self._do(session, step, step.proposals, self.position)
            return
        if step.position >= self._agreed[2]:
            decision, proposals = self._exchange(session, self._proposal(ProposalKind.FOLLOW, 0))
            if decision.kind is not ProposalKind.FOLLOW:
                self._decision = decision, proposals
                return
        agreed, base, _ = self._agreed
        self._do(session, step, agreed, base)
        self.position += 1

    def _do(self, session: CollectiveSession, step: CollectiveOp, proposals: Sequence[Proposal], base: int) -> None:
        collective, group = step.collective, step.group
        buffers = self._ordering.begin(session, step.ready)
        if collective.kind is ProposalKind.GATHER:
            chosen = takers(proposals, collective, self._collectives, base, step.position)
            if chosen:
                gather = partial(buffers.all_gather, step.whole, step.shard, group.name, chosen)
                self._run(f"gather {group.name}", gather)
        else:
            chosen = givers(proposals, collective, self._collectives, base, step.position)
            if chosen:
                assert step.scratch is not None, "a sum has scratch"
                step.tensors = tensors_of(proposals) & self._mask[collective.group]
                what, dtype = f"gradients of {group.name}", group.dtype
                add = partial(buffers.reduce_scatter, step.shard, step.whole, step.scratch, what)
                self._run(f"reduce-scatter of {group.name}", partial(add, kind=dtype, givers=chosen))
            with self._lock:
                if step.whole is not None:
                    self.known.staged &= ~(1 << collective.group)
                    self.known.tensors &= ~self._mask[collective.group]
                    self.known.complete &= ~(1 << collective.group)
                self.known.given |= 1 << collective.group
        if chosen:
            step.over = self._ordering.end()
            step.index = len(self.done)
            self.done.append(CompletedCollective(collective, step.position is not None, step.tensors))
        step.done = True

    def _run(self, what: str, collective: Callable[[], object]) -> None:
        """Run a collective, recorded if the model is profiled."""
        recorder = self._watcher.recorder
        if recorder is None:
            collective()
        else:
            recorder.record(Queue.COLL, what, collective)
