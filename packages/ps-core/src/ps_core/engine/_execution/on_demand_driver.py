"""Drive a pass moment by moment, without a plan: the first pass, and passes that no plan fits.

The least recently used group is evicted first. Until the peak of non-model bytes is known, only the moment's own groups
are kept. So a pass fits if any can. Later the memory below that peak serves as a cache.
"""

from __future__ import annotations

import torch

from ps_core._plan import Queue
from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._memory.make_room import has_room, make_room
from ps_core.engine._parameters.errors import compute_tier_too_small
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state_transitions import SlotContents


class OnDemandDriver:
    """Fetch groups to the compute tier when a moment needs them."""

    tracked = True
    """True: non-model bytes have to be counted while this drives."""
    follows_plan = False
    for_rest = None

    def __init__(self, residency: Residency, gradients: GradientStore) -> None:
        self._residency = residency
        self._store = residency.store
        self._gradients = gradients
        self.fetched: dict[ParamGroup, None] = {}
        """Groups with a copy on the compute tier, least recently used first."""
        self.highest_nonmodel_bytes: int | None = None
        """The peak of the next passes; None: not known yet."""

    def expect(self, nonmodel_bytes: int | None) -> None:
        """Store the most non-model bytes of the next passes; None: not known."""
        self.highest_nonmodel_bytes = nonmodel_bytes

    def free_optional_bytes(self, needed_bytes: int) -> int:
        """Free up to ``needed_bytes`` of the compute tier that no moment needs; return how many were freed."""
        return 0

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """Fetch the groups of these parameters, and of these gradients, to the compute tier."""
        self._residency.transfers.check_disk()
        for record in reads:
            if record.contents is not SlotContents.WEIGHT:
                self._gradients.restore_weights(record.group)
        groups = list(dict.fromkeys((*(record.group for record in reads), *gains)))
        for group in groups:
            self.fetched.pop(group, None)
        wanted = [
            group for group in groups if group.weight_chunk.home.tier and group.weight_chunk.copies.get(0) is None
        ]
        self._make_room(wanted, set(groups), name)
        device = self._store.device
        for group in groups:
            slot = self._residency.fetch(group)
            if group.weight_chunk.home.tier:
                self.fetched[group] = None
            device.declare_access(Queue.COMPUTE, name, (slot.memory,), ())

    def _make_room(self, wanted: list[ParamGroup], needed: set[ParamGroup], name: str) -> None:
        capacity = self._store.tiers[0].capacity_bytes
        nonmodel = self.highest_nonmodel_bytes or self._store.ledger.nonmodel_bytes
        cache = self.highest_nonmodel_bytes is not None
        victims = iter([group for group in self.fetched if group not in needed])

        def evict_next() -> bool:
            for group in victims:
                if self._residency.evict(group):
                    del self.fetched[group]
                    return True
            return False

        sizes = [group.weight_chunk.bytes for group in wanted]
        make_room(lambda: cache and has_room(self._store, sizes, nonmodel_bytes=nonmodel), evict_next)
        total = self._store.ledger.used_bytes[0] + sum(sizes) + self._store.ledger.nonmodel_bytes
        if total > capacity:
            groups, nonmodel = self._residency.groups, self._store.ledger.nonmodel_bytes
            raise compute_tier_too_small(self._store, groups, name, total, nonmodel, proven=True)

    def place_gradient(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Return False: the caller stores the gradient."""
        return False

    def finish(self) -> None:
        """Evict every group that has no live aliases; copy the others' newest bytes to their home slots."""
        for group in list(self.fetched):
            if self._residency.evict(group):
                del self.fetched[group]
            else:
                self._residency.transfers.write_home(group.weight_chunk)
                self._residency.expose(group)

    def adopt(self, groups: list[ParamGroup]) -> None:
        """Take over the copies that a plan left on the compute tier."""
        self.fetched = {group: None for group in groups if 0 in group.weight_chunk.copies}
