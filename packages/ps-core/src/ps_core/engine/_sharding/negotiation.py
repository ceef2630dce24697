"""Exchange proposals with the other ranks, and run what they decide out of the schedule's order.

See [Note: one order of collectives] in `collective_schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ps_core.engine._sharding.collective_order import CollectiveOp, CollectiveOrder
from ps_core.engine._sharding.collective_schedule import (
    Collective,
    Decision,
    Headroom,
    Proposal,
    ProposalKind,
    holders,
    is_final,
)
from ps_core.engine._sharding.in_flight import InFlightCollectives
from ps_core.engine._sharding.sharded_residency import ShardedResidency


class Negotiator:
    """The training thread's side of the negotiation."""

    def __init__(
        self, residency: ShardedResidency, steps: InFlightCollectives, order: CollectiveOrder, me: int
    ) -> None:
        self._shards, self._in_flight, self._order, self._me = residency, steps, order, me

    def propose(
        self, kind: ProposalKind, arg: int = 0, room: int = Headroom.TIGHT
    ) -> tuple[Decision, Sequence[Proposal]]:
        """Send a proposal; return what all ranks decide, and all proposals."""
        while True:
            pending = self._order.send(kind, arg, room)
            pending.wait()
            if all(step.done for step in self._in_flight.under_way):
                self._in_flight.collect_finished()
                return self._order.pop_decision()
            self.run_pending_decision()  # the proposal was not sent: another decision came first

    def request(self, kind: ProposalKind, arg: int) -> None:
        """Request a collective that is not next in the schedule; all ranks run the one they agree on."""
        decision, proposals = self.propose(kind, arg)
        self.run_decision(decision, proposals)

    def wait(self, step: CollectiveOp) -> None:
        """Wait until a collective is done."""
        while not self._in_flight.wait(step):
            if self._order.has_decision:
                self.run_pending_decision()
        self._in_flight.collect_finished()

    def run_pending_decision(self) -> None:
        """Run what a rank requested, then the collectives that were passed over for it."""
        self._in_flight.collect_finished()
        decision, proposals = self._order.pop_decision()
        self.run_decision(decision, proposals)

    def run_decision(self, decision: Decision, proposals: Sequence[Proposal]) -> None:
        """Run a collective out of order; those that were passed over come after it."""
        group = self._shards.groups[decision.arg]
        if decision.kind is ProposalKind.SUM and not is_final(proposals, decision.arg):
            self._order.send(ProposalKind.READY).wait()
            _, proposals = self._order.pop_decision()
        collective, left = Collective(decision.kind, decision.arg), list(self._in_flight.under_way)
        same = [step for step in left if step.collective == collective]
        needed = (
            self._in_flight.sum_bytes(group)
            if collective.kind is ProposalKind.SUM
            else group.chunks[group.weight].bytes
        )
        if not self._in_flight.finds_hole(needed):
            for each in reversed(left):
                if each not in same:
                    self._in_flight.release_buffers(each)
        if collective.kind is ProposalKind.GATHER:
            takes = self._me in self._order.takers(collective, proposals)
            old = next((step for step in same if step.whole is not None), None) if takes else None
            step = self._in_flight.gather(group, None, wanted=takes) if old is None else self._instead(old)
        else:
            gives = self._me in holders(proposals, group.index)
            step = self._instead(same[0]) if same else self._in_flight.sum(group, None, gives=gives)
            for each in left:  # the sum may take the place of the weight's shard
                if (
                    each.collective == Collective(ProposalKind.GATHER, group.index)
                    and each.whole is None
                    and not each.slots
                ):
                    self._in_flight.offer(each)
        step.proposals = proposals
        self._in_flight.under_way.appendleft(step)
        self._order.submit(step)
        if left:
            self.wait(step)
        for each in left:
            if each.collective.kind is ProposalKind.SUM and each.slot is None:
                self._in_flight.allocate_buffers(each)
            self._order.submit(each)

    def _instead(self, old: CollectiveOp) -> CollectiveOp:
        """Make a collective of the schedule the one to run now; at its own position nothing is left to do."""
        step = replace(old, position=None, pending=None)
        old.whole = old.slot = old.staged = None
        old.slots = ()
        if old.collective.kind is ProposalKind.GATHER:
            assert old.position is not None, "only such are left"
            self._order.skip_gather(old.position)
            self._in_flight.ahead[old.group] = step
            self._in_flight.offer(old)
        else:
            self._in_flight.allocate_buffers(old, alone=False)
        return step

    def finish_collectives(self) -> None:
        """Finish all collectives that are under way, and release unused gathers; call it between two moments."""
        with torch.no_grad():
            while self._in_flight.under_way:
                self.wait(self._in_flight.under_way[0])
            self._in_flight.drop_unused()
