"""A pass of a shared model: groups gathered as the schedule says, gradients summed over processes as they come.

[Note: who sums what when]
A group's gradients are put side by side in a slot. Once all that are expected are there, the sum over ranks can begin,
while backward goes on. The schedule says when: [Note: one order of collectives] in `collective_schedule`. A group may
be incomplete at the end, as a tensor got no gradient. It waits until all ranks have told which tensors got one. Then
the union is summed, with zeros where a rank has nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

import torch

from ps_core._errors import RanksDiverged, UnsupportedParameter
from ps_core._plan import Queue
from ps_core.engine._execution.build_components import Components
from ps_core.engine._execution.on_demand_driver import OnDemandDriver
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._sharding.collective_order import CollectiveOp, CollectiveOrder, StagedGradients
from ps_core.engine._sharding.collective_schedule import (
    Collective,
    Headroom,
    Proposal,
    ProposalKind,
    ScheduledCollective,
    gathered_once,
    holders,
    next_schedule,
)
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives
from ps_core.engine._sharding.headroom import GatherHeadroom
from ps_core.engine._sharding.in_flight import GatherWatcher, InFlightCollectives
from ps_core.engine._sharding.negotiation import Negotiator
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._sharding.sharded_step import ShardedStepper

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
    """Return the engine's components for a rank that has a shard of the model."""
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
        self._together, self._prefetch = together, prefetch
        self._stale = False
        """True: the groups have changed, or are about to change, since `_begin_anew`."""
        self._begin_anew()
        self._kind: int | None = None
        """The kind of the running pass; None: the ranks do not agree on it."""
        self._on = False
        """True: the other ranks were told that a pass is on."""
        self._backward = False
        self._touched = 0
        """Groups that were used in this pass, as bits."""
        self._used: set[int] = set()
        """The gathers of this pass that this rank used."""
        self._bound = False
        """True: what comes next is agreed on, so no proposal may be sent."""
        self._records_all = False

    def _begin_anew(self) -> None:
        """Number groups and parameters as they are now, and forget what earlier passes taught."""
        residency, together = self._shards, self._together
        self._order = CollectiveOrder(together, residency.groups, residency.ordering, self._watcher)
        self._in_flight = InFlightCollectives(residency, self._sums, self._order)
        self._negotiator = Negotiator(residency, self._in_flight, self._order, together.process)
        self._headroom = GatherHeadroom(residency, self._in_flight, self._negotiator, self._prefetch)
        self._trainable = sum(1 << group.index for group in residency.groups if group.trainable)
        self._schedules: dict[int, list[ScheduledCollective]] = {}
        """By kind of pass."""
        self._expected: dict[int, dict[int, int]] = {}
        """Tensors of each group that got gradients in the last pass of a kind, as bits."""
        self._keeps: bool | None = None
        """True: groups stay gathered until their gradients leave; None: decided after the first pass."""
        self._hoists = False
        """True: gathers go ahead of sums; decided at the same time."""
        self._stale = False

    def forget_groups(self) -> None:
        """Begin anew at the next pass, since groups are about to change; between passes, on all ranks."""
        self.make_way(0)
        self._stale = True

    def record_all(self) -> None:
        """Measure every pass, for plans to be made from."""
        self._records_all = True

    # Moments.

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """Gather the groups that the moment reads, and release all others unless all groups fit."""
        backward = torch._C._current_graph_task_id() != -1
        self._open(backward=backward)
        groups = list(dict.fromkeys(record.group for record in reads))
        if groups and not self._keeps:
            for group in [group for group in self.fetched if group not in groups]:
                self._evict(group)
        self._shards.release_unaliased()
        self._note(groups, backward=backward)
        for group in groups:
            self._ensure_gathered(group, name)
            self.fetched[group] = None
            slot = group.weight_chunk.newest(0)
            assert slot is not None, "it was gathered"
            self._store.device.declare_access(Queue.COMPUTE, name, (slot.memory,), ())
        self._advance()

    def _open(self, *, backward: bool) -> None:
        """Tell the other ranks that a pass begins."""
        if self._on:
            return
        if self._stale:
            self._begin_anew()
        self._sums.alike.compare()
        training = self.training or backward
        kind = _TRAINING * training + _LATE * backward
        self._order.open([], 0)
        _, proposals = self._negotiator.propose(ProposalKind.HELLO, kind)
        kinds = [proposal.arg for proposal in proposals]
        if len({each & _TRAINING for each in kinds}) > 1:
            raise RanksDiverged(f"the ranks do different things: {_who(kinds)}; every rank must do the same passes")
        self._kind = kind if len(set(kinds)) == 1 else None
        self._order.open(self._schedules.get(kind, []) if self._kind == kind else [], self._trainable * training)
        self._on, self._bound, self._touched = True, False, 0
        self._used.clear()

    def _note(self, groups: list[ParamGroup], *, backward: bool) -> None:
        """Note which gradients may still come, now that a moment uses these groups."""
        began, self._backward = backward and not self._backward, self._backward or backward
        touched = self._touched
        for group in groups:
            touched |= 1 << group.index
        if began or (self._backward and touched != self._touched):
            late = self._kind is None or self._kind & _LATE
            self._order.expect(self._trainable if late else touched & self._trainable)
        self._touched = touched

    def _ensure_gathered(self, group: ParamGroup, name: str) -> None:
        """Gather a group, and wait until it is there."""
        if group.weight_chunk.newest(0) is not None and group not in self._in_flight.ahead:
            return
        early = group in self._in_flight.ahead
        while group.weight_chunk.newest(0) is None:
            step = self._in_flight.ahead.get(group)
            if step is not None and step.done and step not in self._in_flight.under_way:
                del self._in_flight.ahead[group]  # it was changed since
                continue
            if step is None:
                step = self._follow_to(group, name)
            if step is None:
                self._make_room_for(group.weight_chunk.bytes)
                self._negotiator.request(ProposalKind.GATHER, group.index)
            else:
                self._negotiator.wait(step)
        step = self._in_flight.ahead.pop(group, None)
        if step is not None:
            self._used.add(step.index)
        self._watcher.fetched(early=early)

    def _follow_to(self, group: ParamGroup, name: str) -> CollectiveOp | None:
        """Follow the schedule to where a group is gathered; None: it is not there, or cannot be followed so far yet."""
        place, step = self._order.find(Collective(ProposalKind.GATHER, group.index)), None
        while place is not None and self._order.prepared <= place:
            if not self._order.following:
                self._negotiator.wait(self._in_flight.under_way[0])
                continue
            position = self._order.prepared
            if position == place:
                self._make_room_for(group.weight_chunk.bytes)
            step = self._prepare(position, wanted=position == place)
            if step is None:
                return None
        return step

    def _prepare(self, position: int, *, wanted: bool) -> CollectiveOp | None:
        """Prepare one collective of the schedule; None: that cannot be promised yet."""
        collective, mine = self._order.schedule[position]
        group = self._shards.groups[collective.group]
        if collective.kind is ProposalKind.SUM:
            if not self._order.final(group):
                return None
            step = self._make_sum(group, position)
        else:
            wanted = wanted or (self._wants(group, mine=mine) and self._may_come_ahead(group))
            step = self._in_flight.gather(group, position, wanted=wanted)
        self._in_flight.under_way.append(step)
        self._order.follow(step)
        return step

    def _advance(self) -> None:
        """Prepare collectives of the schedule as far as memory allows, and run what other ranks requested."""
        if self._order.has_decision:
            self._negotiator.run_pending_decision()
        self._in_flight.collect_finished()
        while self._order.following:
            collective, mine = self._order.schedule[self._order.prepared]
            group = self._shards.groups[collective.group]
            if (
                collective.kind is ProposalKind.GATHER
                and self._wants(group, mine=mine)
                and not self._may_come_ahead(group)
            ):
                return
            there = group in self.fetched or group in self._in_flight.ahead
            if collective.kind is ProposalKind.GATHER and mine and there and not self._keeps:
                return  # it is there for a use before this one, and may go in between
            if self._prepare(self._order.prepared, wanted=False) is None:
                return

    def _wants(self, group: ParamGroup, *, mine: bool) -> bool:
        """True if this rank expects to use a gather of the schedule."""
        there = group in self._in_flight.ahead or group.weight_chunk.newest(0) is not None
        return mine and not there and not self._bound

    def _may_come_ahead(self, group: ParamGroup) -> bool:
        """True if a group may be gathered before it is used."""
        if self._shards.unknown:
            return False
        return self._headroom.has_room_ahead(
            group, trains=self._kind is None or bool(self._kind & _TRAINING), keeps=bool(self._keeps)
        )

    def _make_room_for(self, size: int) -> None:
        """Try to have so much room on the compute tier."""
        self._headroom.make_room(size, backward=self._backward, bound=self._bound)

    def free_optional_bytes(self, needed_bytes: int) -> int:
        """Drop groups gathered ahead of need and kept slots, then demote shards, until so many bytes are free.

        Collectives under way are waited for: whether a moment fits must not depend on which rank is how fast.
        """
        before = self._store.ledger.used_bytes[0]
        self._negotiator.finish_collectives()
        self._store.free_spare()
        freed = before - self._store.ledger.used_bytes[0]
        return freed if freed >= needed_bytes else freed + self._shards.promoter.demote(needed_bytes - freed)

    def make_way(self, missing_bytes: int) -> None:
        """Demote every shard between passes; ``missing_bytes``: the device ran out of memory for so many."""
        self._negotiator.finish_collectives()
        self._shards.promoter.demote_all(missing_bytes)

    def _evict(self, group: ParamGroup) -> None:
        self._shards.evict(group)
        self.fetched.pop(group, None)
        group.forget_moment()

    # Gradients.

    def place_gradient(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Copy a gradient into its group's buffer; the last one lets the reduce-scatter begin."""
        if gradient.layout is not torch.strided:
            raise UnsupportedParameter(
                f"the gradient of {record.name!r} is {gradient.layout}: expected a dense one; use sparse=False"
            )
        self._open(backward=True)
        group = record.group
        while (step := self._in_flight.sum_on_way(group)) is not None:  # the schedule may have two
            self._negotiator.wait(step)
        staged = self._in_flight.staged.get(group) or self._stage(group)
        target = record.shaped(staged.slot.flat(group.dtype, group.chunk_numel))
        self._store.device.declare_access(Queue.COMPUTE, f"gradient of {record.name}", (), (target,))
        if record in staged.records:
            target.add_(gradient)
        else:
            target.copy_(gradient)
        staged.records[record] = None
        self._sums.mark_given(record)
        self._order.stage(record)
        if len(staged.records) == len(group.tensors) or self._is_usual(group, staged):
            self._order.complete(group)
            self._advance()
        return True

    def _is_usual(self, group: ParamGroup, staged: StagedGradients) -> bool:
        """True if these are the tensors that got gradients in the last pass of this kind."""
        usual = self._expected.get(-1 if self._kind is None else self._kind, {}).get(group.index)
        return usual is not None and usual == sum(1 << record.index for record in staged.records)

    def _stage(self, group: ParamGroup) -> StagedGradients:
        self._make_room_for(group.weight_chunk.bytes)
        slot = self._in_flight.reserve(group.weight_chunk.bytes, f"gradients of {group.name}")
        staged = self._in_flight.staged[group] = StagedGradients(slot)
        return staged

    def _make_sum(self, group: ParamGroup, position: int | None) -> CollectiveOp:
        """Prepare a sum of a group's gradients, once few enough sums are under way."""
        while (earlier := self._in_flight.too_many_sums()) is not None:
            self._negotiator.wait(earlier)
        self._make_room_for(self._in_flight.sum_bytes(group))
        step = self._in_flight.sum(group, position, gives=group in self._in_flight.staged)
        if self._keeps and group in self.fetched:
            self._evict(group)
        return step

    # The end.

    def finish(self) -> None:
        """Reduce the gradients that are left, and release all gathered groups."""
        backward = self._backward
        quiet = (RanksDiverged,) if sys.exc_info()[1] is not None else ()  # what broke the pass off tells more
        try:
            with suppress(*quiet):
                self._open(backward=False)
                self._end()
        finally:
            self._on = self._backward = False
            self._shards.note_end()
            for group in list(self.fetched):
                self._evict(group)
            for group in list(self._in_flight.ahead):
                self._evict(group)
            self._in_flight.clear()
            self._shards.release_unaliased()
            if not self._keeps:
                self._store.free_spare()
        if backward and len(self._store.tiers) == 1 and not self._records_all:
            self.tracked = False  # one pass has shown that it fits
        if not self._trainable:
            self._shards.promoter.promote()  # no step ever comes

    def _end(self) -> None:
        """Do what others want, until all are at the end of the pass."""
        self._order.end()
        while True:
            decision, proposals = self._negotiator.propose(
                ProposalKind.END, room=self._headroom.headroom_after_first_pass()
            )
            if decision.kind is ProposalKind.END:
                break
            if decision.kind is ProposalKind.FOLLOW:
                self._bound = True
                while self._order.prepared < decision.arg:
                    self._prepare(self._order.prepared, wanted=False)
                self._bound = False
            else:
                self._negotiator.run_decision(decision, proposals)
        self._bound = True
        for group in reversed(self._shards.groups):
            if holders(proposals, group.index):
                step = self._make_sum(group, None)
                step.proposals = proposals
                self._in_flight.under_way.append(step)
                self._order.submit(step)
        while self._in_flight.under_way:
            self._negotiator.wait(self._in_flight.under_way[0])
        self._learn(proposals)

    def _learn(self, proposals: Sequence[Proposal]) -> None:
        """Make this pass's collectives the schedule of the next pass of its kind."""
        done = self._order.done
        first = self._keeps is None and any(each.collective.kind is ProposalKind.SUM for each in done)
        if first:
            room = min(proposal.room for proposal in proposals)
            self._keeps, self._hoists = room == Headroom.ALL, room >= Headroom.NEXT
        if self._kind is not None:
            self._schedules[self._kind] = next_schedule(done, self._used, hoist=self._hoists)
            expected = self._expected[self._kind] = dict[int, int]()
            for each in done:
                if each.collective.kind is ProposalKind.SUM:
                    expected[each.collective.group] = expected.get(each.collective.group, 0) | each.tensors
        if first and self._keeps:
            self._schedules = {kind: gathered_once(entries) for kind, entries in self._schedules.items()}


def _who(kinds: Sequence[int]) -> str:
    train = [str(rank) for rank, kind in enumerate(kinds) if kind & _TRAINING]
    look = [str(rank) for rank, kind in enumerate(kinds) if not kind & _TRAINING]
    return f"rank {', '.join(train)} trains, while rank {', '.join(look)} does a forward pass without gradients"
