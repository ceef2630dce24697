"""Taking turns with the other processes: words are said, and collectives done, by the thread that talks to them.

See [Note: taking turns] in `schedule`. The thread of the training (the *driver*) prepares steps; the other one carries
them out in order, as far as all agree. When another process has something else in mind, the steps that were not done
yet are left, and the driver finds the choice the next time it comes by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch

from ps_core.engine._devices.device import Event
from ps_core.engine._memory.slot import Slot
from ps_core.engine._parameters.state import ParamGroup, ParamState
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives, CollectiveSession, Pending
from ps_core.engine._sharding.schedule import (
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
from ps_core.engine._sharding.streams import CollectiveOrdering


@dataclass(slots=True, eq=False)
class StagedGradients:
    """A group's gradients, side by side."""

    slot: Slot
    records: dict[ParamState, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class CollectiveOp:
    """One collective, prepared by this process."""

    act: Collective
    group: ParamGroup
    position: int | None
    """In the schedule; None: it was asked for."""
    shard: torch.Tensor
    """Of a gather: this process's part. Of a sum: what it fills."""
    whole: torch.Tensor | None = None
    """Of a gather: where it goes. Of a sum: this process's gradients. None: it does not want, or has, any."""
    scratch: torch.Tensor | None = None
    slots: tuple[Slot, ...] = ()
    """To be given back."""
    slot: Slot | None = None
    """What it fills; None: nothing, or it was taken apart for want of room."""
    staged: StagedGradients | None = None
    """The gradients that it gives."""
    words: Sequence[Proposal] = ()
    """From which it follows, where it was asked for."""
    ready: Sequence[Event] = ()
    """What it comes after."""
    over: Event | None = None
    """Behind it, where it is work of a stream."""
    pending: Pending | None = None
    done: bool = False
    index: int = -1
    """Among what was done in the pass; -1: nobody wanted it."""
    tensors: int = 0
    """Whose gradients were summed."""


@dataclass(slots=True)
class LocalState:
    """What this process has for sums, as bits; changed by both threads, under the lock."""

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

    def __init__(self, together: AsyncCollectives, groups: Sequence[ParamGroup], beside: CollectiveOrdering) -> None:
        self._together, self._beside = together, beside
        self._groups = len(groups)
        self._tensors = 1 + max((record.index for group in groups for record in group.tensors), default=-1)
        self._mask = [sum(1 << record.index for record in group.tensors) for group in groups]
        self._lock = Lock()
        self.known = LocalState()
        self.backward = False
        """Whether this process is on its way back."""
        self.schedule: list[ScheduledCollective] = []
        self._acts: list[Collective] = []
        self.prepared = 0
        """Positions before it were prepared by this process."""
        self.position = 0
        """Positions before it were done by all."""
        self._agreed: tuple[Sequence[Proposal], int, int] = ((), 0, 0)
        """From these words, said at a position, all follow up to another."""
        self._parked: tuple[Decision, Sequence[Proposal]] | None = None
        self._round = 0
        """Choices that the driver acted on; whatever was begun before the last of them is void, unless it is done."""
        self._wants = 0
        """Positions of gathers that this process will use."""
        self.done: list[CompletedCollective] = []

    # The driver's side.

    def open(self, schedule: list[ScheduledCollective], coming: int) -> None:
        """A pass begins."""
        self.schedule, self._acts = schedule, [entry.act for entry in schedule]
        self.prepared = self.position = self._wants = 0
        self._agreed, self._parked = ((), 0, 0), None
        self.known, self.backward = LocalState(coming=coming), False
        self.done = []

    @property
    def following(self) -> bool:
        """Whether the next position may be prepared."""
        return self.prepared < min(len(self.schedule), self.position + WINDOW)

    def find(self, act: Collective) -> int | None:
        """Where in the rest of the schedule something is."""
        for place in range(self.prepared, len(self._acts)):
            if self._acts[place] == act:
                return place
        return None

    def follow(self, step: CollectiveOp) -> None:
        """Have the next of the schedule done."""
        with self._lock:
            if step.position == self.prepared:
                self.prepared += 1
            if step.act.turn is ProposalKind.GATHER and step.whole is not None and step.position is not None:
                self._wants |= 1 << step.position
        self.submit(step)

    def submit(self, step: CollectiveOp) -> None:
        """Have a step done: of the schedule (again), or one that all agreed on."""
        step.ready = self._beside.ready()
        step.pending = self._together.start(partial(self._carry_out, step, self._round))

    def leave(self, position: int) -> None:
        """What was to be gathered there came otherwise."""
        with self._lock:
            self._wants &= ~(1 << position)

    def speak(self, turn: ProposalKind, arg: int = 0, room: int = Headroom.TIGHT) -> Pending:
        """Say a word; `take_choice` gives what follows."""
        return self._together.start(partial(self._speak, turn, arg, room, self._round))

    @property
    def parked(self) -> bool:
        """Whether there is a choice to act on."""
        return self._parked is not None

    def take_choice(self) -> tuple[Decision, Sequence[Proposal]]:
        """What all are to do, and the words from which it follows."""
        assert self._parked is not None, "somebody spoke"
        self._round += 1  # before it is gone, or what was begun earlier could still be done
        found, self._parked = self._parked, None
        return found

    def takers(self, act: Collective, words: Sequence[Proposal]) -> list[int]:
        """Who gets a gather that was asked for."""
        return takers(words, act, self._acts, self.position, None)

    def stage(self, record: ParamState) -> None:
        """A gradient is there."""
        with self._lock:
            self.known.staged |= 1 << record.group.index
            self.known.tensors |= 1 << record.index

    def complete(self, group: ParamGroup) -> None:
        """All of a group's gradients are."""
        with self._lock:
            self.known.complete |= 1 << group.index & ~self.known.given

    def expect(self, coming: int) -> None:
        """Backward is on: gradients of these groups may still come, and of no others."""
        with self._lock:
            self.known.coming, self.backward = coming, True

    def end(self) -> None:
        """No more gradients come."""
        with self._lock:
            self.known.ended = True

    def settled(self, group: ParamGroup) -> bool:
        """Whether no more will come of a group's gradients than is there."""
        return bool(self._settled() >> group.index & 1)

    def _settled(self) -> int:
        known = self.known
        if known.ended:
            return (1 << self._groups) - 1
        open_ones = known.coming & ~known.given | known.staged
        return (known.complete | ~open_ones) & ((1 << self._groups) - 1)

    # The other thread's side.

    def _word(self, turn: ProposalKind, arg: int, room: int = Headroom.TIGHT) -> Proposal:
        with self._lock:
            known, wants = self.known, 0
            if turn is ProposalKind.FOLLOW:
                arg = min(self.prepared, self.position + WINDOW)
                wants = self._wants >> self.position & ((1 << WINDOW) - 1)
            return Proposal(turn, arg, wants, known.staged, self._settled(), known.tensors, room, self.backward)

    def _exchange(self, bench: CollectiveSession, word: Proposal) -> tuple[Decision, list[Proposal]]:
        text = word.pack(self._groups, self._tensors)
        texts = bench.exchange(text, "what comes next")
        words = [Proposal.unpack(each, self._groups, self._tensors) for each in texts]
        ahead = 0
        for act in self._acts[self.position :]:
            ahead |= 1 << act.group if act.turn is ProposalKind.SUM else 0
        choice = choose(words, ahead)
        if choice.turn is ProposalKind.FOLLOW:
            self._agreed = (words, self.position, choice.arg)
        return choice, words

    def _speak(self, turn: ProposalKind, arg: int, room: int, number: int, bench: CollectiveSession) -> None:
        if self._parked is None and number == self._round:
            self._parked = self._exchange(bench, self._word(turn, arg, room))

    def _carry_out(self, step: CollectiveOp, number: int, bench: CollectiveSession) -> None:
        if self._parked is not None or number != self._round:
            return  # it is for the driver to do something else first
        if step.position is None:
            self._do(bench, step, step.words, self.position)
            return
        if step.position >= self._agreed[2]:
            choice, words = self._exchange(bench, self._word(ProposalKind.FOLLOW, 0))
            if choice.turn is not ProposalKind.FOLLOW:
                self._parked = choice, words
                return
        agreed, base, _ = self._agreed
        self._do(bench, step, agreed, base)
        self.position += 1

    def _do(self, bench: CollectiveSession, step: CollectiveOp, words: Sequence[Proposal], base: int) -> None:
        act, group = step.act, step.group
        buffers = self._beside.begin(bench, step.ready)
        if act.turn is ProposalKind.GATHER:
            chosen = takers(words, act, self._acts, base, step.position)
            if chosen:
                buffers.all_gather(step.whole, step.shard, group.name, chosen)
        else:
            chosen = givers(words, act, self._acts, base, step.position)
            if chosen:
                assert step.scratch is not None, "a sum has scratch"
                step.tensors = tensors_of(words) & self._mask[act.group]
                what, kind = f"gradients of {group.name}", group.dtype
                buffers.reduce_scatter(step.shard, step.whole, step.scratch, what, kind=kind, givers=chosen)
            with self._lock:
                if step.whole is not None:
                    self.known.staged &= ~(1 << act.group)
                    self.known.tensors &= ~self._mask[act.group]
                    self.known.complete &= ~(1 << act.group)
                self.known.given |= 1 << act.group
        if chosen:
            step.over = self._beside.end()
            step.index = len(self.done)
            self.done.append(CompletedCollective(act, step.position is not None, step.tensors))
        step.done = True
