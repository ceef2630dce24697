"""Drive a pass moment by moment, without a plan: the first pass, and passes that no plan fits.

The least recently used group is evicted first. Until the peak of non-model bytes is known, only the moment's own groups
are kept. So a pass fits if any can. Later the memory below that peak serves as a cache. If a moment takes more after
all, what only the cache keeps is evicted. A pass that left a plan may also move home slots down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ps_core._plan import Queue
from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._memory.make_room import has_room, make_room
from ps_core.engine._parameters.errors import compute_tier_too_small
from ps_core.engine._parameters.held_memory import check_held_memory
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
        self._present: list[ParamGroup] = []
        """Groups that the present moment uses."""
        self._lower_homes: Callable[[], None] | None = None
        """Moves home slots off the compute tier; None: that was done already, or no plan was left in this pass."""

    def expect(self, nonmodel_bytes: int | None) -> None:
        """Store the most non-model bytes of the next passes; None: not known."""
        self.highest_nonmodel_bytes = nonmodel_bytes

    def free_optional_bytes(self, needed_bytes: int) -> int:
        """Free up to ``needed_bytes`` of the compute tier that no moment needs; return how many were freed."""
        ledger = self._store.ledger
        before = ledger.used_bytes[0]
        self.highest_nonmodel_bytes = None
        self._evict_others(before - needed_bytes)
        if before - ledger.used_bytes[0] < needed_bytes:
            self._free_home_slots()
            self._evict_others(before - needed_bytes)
        return before - ledger.used_bytes[0]

    def _evict_others(self, wanted_bytes: int) -> None:
        """Evict groups that the present moment does not use, until so many bytes of the compute tier are in use."""
        for group in [group for group in self.fetched if group not in self._present]:
            if self._store.ledger.used_bytes[0] > wanted_bytes and self._residency.evict(group):
                del self.fetched[group]

    def _free_home_slots(self) -> None:
        """Move home slots down, once a pass; those of groups in use are copies then, and evicted as such."""
        lower, self._lower_homes = self._lower_homes, None
        if lower is not None:
            lower()
            copies = [group for group in self._residency.groups if 0 in group.weight_chunk.copies]
            self.fetched = dict.fromkeys(copies) | self.fetched

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """Fetch the groups of these parameters, and of these gradients, to the compute tier."""
        self._residency.transfers.check_disk()
        for record in reads:
            if record.contents is not SlotContents.WEIGHT:
                self._gradients.restore_weights(record.group)
        self._present = groups = list(dict.fromkeys((*(record.group for record in reads), *gains)))
        for group in groups:
            self.fetched.pop(group, None)
        self._make_room(groups, name)
        device = self._store.device
        for group in groups:
            slot = self._residency.fetch(group)
            if group.weight_chunk.home.tier:
                self.fetched[group] = None
            device.declare_access(Queue.COMPUTE, name, (slot.memory,), ())

    def _make_room(self, needed: list[ParamGroup], name: str) -> None:
        ledger, capacity = self._store.ledger, self._store.tiers[0].capacity_bytes
        nonmodel = self.highest_nonmodel_bytes or ledger.nonmodel_bytes
        cache = self.highest_nonmodel_bytes is not None
        victims = iter([group for group in self.fetched if group not in needed])

        def evict_next() -> bool:
            for group in victims:
                if self._residency.evict(group):
                    del self.fetched[group]
                    return True
            return False

        sizes = _missing_bytes(needed)
        make_room(lambda: cache and has_room(self._store, sizes, nonmodel_bytes=nonmodel), evict_next)
        total = ledger.used_bytes[0] + sum(sizes) + ledger.nonmodel_bytes
        if total > capacity:
            self._free_home_slots()
            self._evict_others(0)
            total = ledger.used_bytes[0] + sum(_missing_bytes(needed)) + ledger.nonmodel_bytes
        if total > capacity:
            groups, nonmodel = self._residency.groups, ledger.nonmodel_bytes
            check_held_memory(self._store, [group for group in self.fetched if group not in needed], name, total)
            raise compute_tier_too_small(self._store, groups, name, total, nonmodel, proven=True)

    def place_gradient(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Return False: the caller stores the gradient."""
        return False

    def finish(self) -> None:
        """Evict every group that has no live aliases; copy the others' newest bytes to their home slots."""
        self._lower_homes = None
        self._present = []
        for group in list(self.fetched):
            if self._residency.evict(group):
                del self.fetched[group]
            else:
                self._residency.transfers.write_home(group.weight_chunk)
                self._residency.expose(group)

    def adopt(
        self,
        groups: list[ParamGroup],
        present: Sequence[ParamGroup] = (),
        lower_homes: Callable[[], None] | None = None,
    ) -> None:
        """Take over the copies that a plan left on the compute tier, for a pass whose peak is not known.

        ``present``: the groups that the present moment uses. ``lower_homes`` moves the plan's home slots down, if the
        rest of the pass needs their memory.
        """
        self._present = list(present)
        self._lower_homes, self.highest_nonmodel_bytes = lower_homes, None
        self.fetched = {group: None for group in groups if 0 in group.weight_chunk.copies}


def _missing_bytes(groups: list[ParamGroup]) -> list[int]:
    """Return the sizes of the weights that are not on the compute tier."""
    chunks = [group.weight_chunk for group in groups]
    return [chunk.bytes for chunk in chunks if chunk.home.tier and chunk.copies.get(0) is None]
