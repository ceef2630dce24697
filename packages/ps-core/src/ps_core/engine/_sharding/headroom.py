"""Decide what this rank's compute tier has room for: groups ahead of need, gradients, sums, all groups at once.

Only the decision after a first pass is shared between ranks (`headroom_after_first_pass`); no result depends on it.
"""

from __future__ import annotations

from ps_core.engine._memory.make_room import make_room
from ps_core.engine._parameters.param_state import ParamGroup
from ps_core.engine._sharding.collective_schedule import Headroom, ProposalKind
from ps_core.engine._sharding.in_flight import InFlightCollectives
from ps_core.engine._sharding.negotiation import Negotiator
from ps_core.engine._sharding.sharded_residency import ShardedResidency

_MARGIN = 2
"""Groups stay gathered from forward to backward where there is so many times the room for all else: batches grow."""
_AHEAD = 2
"""Groups gathered ahead of need, as long as there are shards that had better have the room."""


class GatherHeadroom:
    """Decides by what is there, and by what passes took so far."""

    def __init__(
        self, residency: ShardedResidency, steps: InFlightCollectives, negotiator: Negotiator, prefetch: int | None
    ) -> None:
        self._shards, self._in_flight, self._negotiator, self._prefetch = residency, steps, negotiator, prefetch
        self._store = residency.store
        self._largest_bytes = max((group.weight_chunk.bytes for group in residency.groups), default=0)

    def has_room_ahead(self, group: ParamGroup, *, trains: bool, keeps: bool) -> bool:
        """Return True if there is room for a group that is not needed yet.

        ``trains``: a backward pass may come. ``keeps``: there was room for all groups at once.
        """
        if self._prefetch is not None and len(self._in_flight.ahead) >= self._prefetch:
            return False
        size = 0 if self._store.spare.has(group.weight_chunk.bytes) else group.weight_chunk.bytes
        if keeps:
            return self._in_flight.has_new_room(size)
        if self._prefetch is None and self._shards.promoter.waiting and len(self._in_flight.ahead) >= _AHEAD:
            return False
        besides = max(0, self._store.ledger.highest_nonmodel_bytes - self._store.ledger.nonmodel_bytes)
        if trains:  # what a moment of backward takes besides
            besides += self._largest_bytes + self._in_flight.sum_bytes(group)
        return self._in_flight.has_new_room(size, besides)

    def make_room(self, size: int, *, backward: bool, bound: bool) -> None:
        """Try to have so much room: wait for sums, or have one taken early, but not where ``bound``.

        Room for growing non-model bytes is left, as far as waiting for sums or demoting shards can make it.
        """

        def demote_during_pass() -> int:
            return self._in_flight.demote_during_pass(size)

        def sum_early() -> bool:
            if self._in_flight.staged and not bound:
                self._negotiator.request(ProposalKind.SUM, min(group.index for group in self._in_flight.staged))
                return True
            return False

        make_room(
            lambda: self._in_flight.has_room(size, self._swell_bytes(backward=backward)),
            self._wait_for_sum,
            demote_during_pass,
        )
        make_room(
            lambda: self._in_flight.finds_unused(size),
            lambda: self._wait_for_sum() or demote_during_pass() or sum_early(),
        )

    def _swell_bytes(self, *, backward: bool) -> int:
        """Return by how much non-model bytes may still grow; in backward, they fall from moment to moment."""
        store = self._store
        most = max(0, store.ledger.highest_nonmodel_bytes - store.ledger.nonmodel_bytes)
        return min(most, store.ledger.highest_rise_bytes) if backward else most

    def _wait_for_sum(self) -> bool:
        """Wait for one that is under way, if there is any."""
        under_way = next((step for step in self._in_flight.under_way if step.collective.kind is ProposalKind.SUM), None)
        if under_way is not None:
            self._negotiator.wait(under_way)
        return under_way is not None

    def headroom_after_first_pass(self) -> Headroom:
        """Return what fits beside the peak of the passes so far: no look-ahead, one group, or all groups."""
        store, groups = self._store, self._shards.groups
        states = sum(chunk.home.bytes for group in groups for chunk in group.chunks.values() if chunk.home.tier == 0)
        besides = _MARGIN * (store.ledger.peak_bytes[0] - states)
        if states + besides + sum(group.weight_chunk.bytes for group in groups) <= store.tiers[0].capacity_bytes:
            return Headroom.ALL
        ahead = (
            self._prefetch != 0 and store.ledger.peak_bytes[0] + self._largest_bytes <= store.tiers[0].capacity_bytes
        )
        return Headroom.NEXT if ahead else Headroom.TIGHT
