"""A pass of a shared model: groups gathered as the schedule says, gradients summed over processes as they come.

[Note: who sums what when]
A group's gradients are put side by side in a slot. Once all that are expected are there, the sum over processes can
begin, beside the rest of backward, where the schedule has it; see [Note: taking turns] in `schedule`. What is
incomplete at the end (a tensor without a gradient) waits until all have said which tensors got one: the union is
summed, with zeros where a process has nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

import torch

from ps_core._errors import RanksDiverged, UnsupportedParameter
from ps_core._plan import Queue
from ps_core.engine._execution.components import Components
from ps_core.engine._execution.on_demand import OnDemandDriver
from ps_core.engine._memory.store import TierStore
from ps_core.engine._parameters.state import ParamGroup, ParamState
from ps_core.engine._sharding.collective_order import CollectiveOp, CollectiveOrder, StagedGradients
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives
from ps_core.engine._sharding.gradients import ShardedGradients, ShardedStepper
from ps_core.engine._sharding.headroom import GatherHeadroom
from ps_core.engine._sharding.in_flight import GatherWatcher, InFlightCollectives
from ps_core.engine._sharding.negotiation import Negotiator
from ps_core.engine._sharding.residency import ShardedResidency
from ps_core.engine._sharding.schedule import (
    Collective,
    Headroom,
    Proposal,
    ProposalKind,
    ScheduledCollective,
    gathered_once,
    holders,
    next_schedule,
)

_TRAINING, _LATE = 1, 2
"""Kinds of passes: bits. A late one begins with backward, for a graph that an earlier pass left."""


def sharded_components(
    store: TierStore,
    groups: list[ParamGroup],
    watcher: GatherWatcher,
    together: AsyncCollectives,
    *,
    overwrites: bool,
    prefetch: int | None,
) -> Components:
    """The engine's rooms for a process that has a shard of the model."""
    residency = ShardedResidency(store, groups, watcher, together)
    gradients = ShardedGradients(residency, together, overwrites=overwrites)
    updater = ShardedStepper(residency, gradients, groups)
    return Components(residency, gradients, updater, ShardedDriver(residency, gradients, together, watcher, prefetch))


class ShardedDriver(OnDemandDriver):
    """Drives every pass of a shared model."""

    def __init__(
        self,
        residency: ShardedResidency,
        gradients: ShardedGradients,
        together: AsyncCollectives,
        watcher: GatherWatcher,
        prefetch: int | None,
    ) -> None:
        super().__init__(residency, gradients)
        self._shards, self._sums, self._watcher = residency, gradients, watcher
        self._turns = CollectiveOrder(together, residency.groups, residency.beside)
        self._steps = InFlightCollectives(residency, gradients, self._turns)
        self._talks = Negotiator(residency, self._steps, self._turns, together.process)
        self._space = GatherHeadroom(residency, self._steps, self._talks, prefetch)
        self._trainable = sum(1 << group.index for group in residency.groups if group.trainable)
        self._schedules: dict[int, list[ScheduledCollective]] = {}
        """By kind of pass."""
        self._expected: dict[int, dict[int, int]] = {}
        """Tensors of each group that got gradients in the last pass of a kind, as bits."""
        self._kind: int | None = None
        """Of the pass that is on; None: the processes do not agree on it."""
        self._on = False
        """Whether the other processes were told that a pass is on."""
        self._backward = False
        self._touched = 0
        """Groups that were used in this pass, as bits."""
        self._used: set[int] = set()
        """Of the gathers of this pass, those that this process used."""
        self._keeps: bool | None = None
        """Whether groups stay until their gradients leave; None: not agreed on yet, for the first pass is to show."""
        self._bound = False
        """Whether what comes next is agreed on already, so that no word may be said."""
        self._hoists = False
        """Whether gathers go ahead of sums; agreed on at the same time."""

    # Moments.

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """Have what the moment reads, and keep nothing else (or everything, where there is plenty of room)."""
        backward = torch._C._current_graph_task_id() != -1
        self._open(backward=backward)
        groups = list(dict.fromkeys(record.group for record in reads))
        if groups and not self._keeps:
            for group in [group for group in self._in if group not in groups]:
                self._let_go(group)
        self._shards.sweep()
        self._note(groups, backward=backward)
        for group in groups:
            self._have(group, name)
            self._in[group] = None
            slot = group.weight_chunk.newest(0)
            assert slot is not None, "it was gathered"
            self._store.device.work(Queue.COMPUTE, name, (slot.memory,), ())
        self._advance()

    def _open(self, *, backward: bool) -> None:
        """Let the other processes know that a pass begins."""
        if self._on:
            return
        self._sums.alike.compare()
        training = self.training or backward
        kind = _TRAINING * training + _LATE * backward
        self._turns.open([], 0)
        _, words = self._talks.say(ProposalKind.HELLO, kind)
        kinds = [word.arg for word in words]
        if len({each & _TRAINING for each in kinds}) > 1:
            raise RanksDiverged(f"the ranks do different things: {_who(kinds)}; every rank must do the same passes")
        self._kind = kind if len(set(kinds)) == 1 else None
        self._turns.open(self._schedules.get(kind, []) if self._kind == kind else [], self._trainable * training)
        self._on, self._bound, self._touched = True, False, 0
        self._used.clear()

    def _note(self, groups: list[ParamGroup], *, backward: bool) -> None:
        """Which gradients may still come."""
        began, self._backward = backward and not self._backward, self._backward or backward
        touched = self._touched
        for group in groups:
            touched |= 1 << group.index
        if began or (self._backward and touched != self._touched):
            late = self._kind is None or self._kind & _LATE
            self._turns.expect(self._trainable if late else touched & self._trainable)
        self._touched = touched

    def _have(self, group: ParamGroup, name: str) -> None:
        """Have a group gathered."""
        if group.weight_chunk.newest(0) is not None and group not in self._steps.ahead:
            return
        early = group in self._steps.ahead
        while group.weight_chunk.newest(0) is None:
            step = self._steps.ahead.get(group)
            if step is not None and step.done and step not in self._steps.on_way:
                del self._steps.ahead[group]  # it was changed since
                continue
            if step is None:
                step = self._follow_to(group, name)
            if step is None:
                self._clear_way(group.weight_chunk.bytes)
                self._talks.ask(ProposalKind.GATHER, group.index)
            else:
                self._talks.wait(step)
        step = self._steps.ahead.pop(group, None)
        if step is not None:
            self._used.add(step.index)
        self._watcher.fetched(early=early)

    def _follow_to(self, group: ParamGroup, name: str) -> CollectiveOp | None:
        """Follow the schedule to where a group is gathered; None: it is not there, or cannot be followed so far yet."""
        place, step = self._turns.find(Collective(ProposalKind.GATHER, group.index)), None
        while place is not None and self._turns.prepared <= place:
            if not self._turns.following:
                self._talks.wait(self._steps.on_way[0])
                continue
            position = self._turns.prepared
            if position == place:
                self._clear_way(group.weight_chunk.bytes)
            step = self._prepare(position, wanted=position == place)
            if step is None:
                return None
        return step

    def _prepare(self, position: int, *, wanted: bool) -> CollectiveOp | None:
        """Follow the schedule by one; None: this cannot be said yet."""
        act, mine = self._turns.schedule[position]
        group = self._shards.groups[act.group]
        if act.turn is ProposalKind.SUM:
            if not self._turns.settled(group):
                return None
            step = self._make_sum(group, position)
        else:
            wanted = wanted or (self._wants(group, mine=mine) and self._may_come_ahead(group))
            step = self._steps.gather(group, position, wanted=wanted)
        self._steps.on_way.append(step)
        self._turns.follow(step)
        return step

    def _advance(self) -> None:
        """Say what comes next, as far as it is certain and there is room, and do what others asked for."""
        if self._turns.parked:
            self._talks.resolve()
        self._steps.take_in()
        while self._turns.following:
            act, mine = self._turns.schedule[self._turns.prepared]
            group = self._shards.groups[act.group]
            if act.turn is ProposalKind.GATHER and self._wants(group, mine=mine) and not self._may_come_ahead(group):
                return
            there = group in self._in or group in self._steps.ahead
            if act.turn is ProposalKind.GATHER and mine and there and not self._keeps:
                return  # it is there for a use before this one, and may go in between
            if self._prepare(self._turns.prepared, wanted=False) is None:
                return

    def _wants(self, group: ParamGroup, *, mine: bool) -> bool:
        """Whether this process will use a gather of the schedule, as far as it can tell."""
        there = group in self._steps.ahead or group.weight_chunk.newest(0) is not None
        return mine and not there and not self._bound

    def _may_come_ahead(self, group: ParamGroup) -> bool:
        """Whether a group may be gathered before it is used."""
        if self._shards.unknown:
            return False
        return self._space.has_ahead(
            group, trains=self._kind is None or bool(self._kind & _TRAINING), keeps=bool(self._keeps)
        )

    def _clear_way(self, size: int) -> None:
        """Try to have so much room on the compute tier."""
        self._space.clear_way(size, backward=self._backward, bound=self._bound)

    def free_optional_bytes(self, needed_bytes: int) -> int:
        """Drop groups gathered ahead of need and kept slots, then demote shards, until so many bytes are free.

        Collectives under way are waited for: whether a moment fits must not depend on which rank is how fast.
        """
        before = self._store.ledger.used_bytes[0]
        self._talks.settle()
        self._store.free_spare()
        freed = before - self._store.ledger.used_bytes[0]
        return freed if freed >= needed_bytes else freed + self._shards.risers.sink(needed_bytes - freed)

    def make_way(self, missing_bytes: int) -> None:
        """Demote every shard between passes; ``missing_bytes``: the device ran out of memory for so many."""
        self._talks.settle()
        self._shards.risers.sink_all(missing_bytes)

    def _let_go(self, group: ParamGroup) -> None:
        self._shards.drop(group)
        self._in.pop(group, None)
        group.forget_moment()

    # Gradients.

    def take(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Put a gradient beside its group's others; the last one lets the sum begin."""
        if gradient.layout is not torch.strided:
            raise UnsupportedParameter(
                f"the gradient of {record.name!r} is {gradient.layout}: expected a dense one; use sparse=False"
            )
        self._open(backward=True)
        group = record.group
        while (step := self._steps.sum_on_way(group)) is not None:  # the schedule may have two
            self._talks.wait(step)
        staged = self._steps.staged.get(group) or self._stage(group)
        target = record.shaped(staged.slot.flat(group.dtype, group.chunk_numel))
        self._store.device.work(Queue.COMPUTE, f"gradient of {record.name}", (), (target,))
        if record in staged.records:
            target.add_(gradient)
        else:
            target.copy_(gradient)
        staged.records[record] = None
        self._sums.announce(record)
        self._turns.stage(record)
        if len(staged.records) == len(group.tensors) or self._is_usual(group, staged):
            self._turns.complete(group)
            self._advance()
        return True

    def _is_usual(self, group: ParamGroup, staged: StagedGradients) -> bool:
        """Whether these are the tensors that got gradients the last time."""
        usual = self._expected.get(-1 if self._kind is None else self._kind, {}).get(group.index)
        return usual is not None and usual == sum(1 << record.index for record in staged.records)

    def _stage(self, group: ParamGroup) -> StagedGradients:
        self._clear_way(group.weight_chunk.bytes)
        slot = self._steps.reserve(group.weight_chunk.bytes, f"gradients of {group.name}")
        staged = self._steps.staged[group] = StagedGradients(slot)
        return staged

    def _make_sum(self, group: ParamGroup, position: int | None) -> CollectiveOp:
        """Ready to sum, once no more than so many sums are under way."""
        while (earlier := self._steps.too_many_sums()) is not None:
            self._talks.wait(earlier)
        self._clear_way(self._steps.sum_bytes(group))
        step = self._steps.sum(group, position, gives=group in self._steps.staged)
        if self._keeps and group in self._in:
            self._let_go(group)
        return step

    # The end.

    def finish(self) -> None:
        """Sum what is left, and let everything go."""
        backward = self._backward
        quiet = (RanksDiverged,) if sys.exc_info()[1] is not None else ()  # what broke the pass off tells more
        try:
            with suppress(*quiet):
                self._open(backward=False)
                self._end()
        finally:
            self._on = self._backward = False
            self._shards.note_end()
            for group in list(self._in):
                self._let_go(group)
            for group in list(self._steps.ahead):
                self._let_go(group)
            self._steps.clear()
            self._shards.sweep()
            if not self._keeps:
                self._store.free_spare()
        if backward and len(self._store.tiers) == 1:
            self.tracked = False  # one pass has shown that it fits
        if not self._trainable:
            self._shards.risers.rise()  # no step ever comes

    def _end(self) -> None:
        """Do what others want, until all are at the end of the pass."""
        self._turns.end()
        while True:
            choice, words = self._talks.say(ProposalKind.END, room=self._space.beyond())
            if choice.turn is ProposalKind.END:
                break
            if choice.turn is ProposalKind.FOLLOW:
                self._bound = True
                while self._turns.prepared < choice.arg:
                    self._prepare(self._turns.prepared, wanted=False)
                self._bound = False
            else:
                self._talks.serve(choice, words)
        self._bound = True
        for group in reversed(self._shards.groups):
            if holders(words, group.index):
                step = self._make_sum(group, None)
                step.words = words
                self._steps.on_way.append(step)
                self._turns.submit(step)
        while self._steps.on_way:
            self._talks.wait(self._steps.on_way[0])
        self._learn(words)

    def _learn(self, words: Sequence[Proposal]) -> None:
        """What was done is the schedule of the next pass of the kind."""
        done = self._turns.done
        first = self._keeps is None and any(each.act.turn is ProposalKind.SUM for each in done)
        if first:
            room = min(word.room for word in words)
            self._keeps, self._hoists = room == Headroom.ALL, room >= Headroom.NEXT
        if self._kind is not None:
            self._schedules[self._kind] = next_schedule(done, self._used, hoist=self._hoists)
            expected = self._expected[self._kind] = dict[int, int]()
            for each in done:
                if each.act.turn is ProposalKind.SUM:
                    expected[each.act.group] = expected.get(each.act.group, 0) | each.tensors
        if first and self._keeps:
            self._schedules = {kind: gathered_once(entries) for kind, entries in self._schedules.items()}


def _who(kinds: Sequence[int]) -> str:
    train = [str(rank) for rank, kind in enumerate(kinds) if kind & _TRAINING]
    look = [str(rank) for rank, kind in enumerate(kinds) if not kind & _TRAINING]
    return f"rank {', '.join(train)} trains, while rank {', '.join(look)} does a forward pass without gradients"
