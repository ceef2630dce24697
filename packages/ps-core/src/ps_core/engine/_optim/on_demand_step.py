"""Step without a plan, and read and write parameters and optimizer states in home slots; between passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ps_core._extents import Kind
from ps_core._plan import Queue
from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._memory.chunk import Chunk, Slot
from ps_core.engine._optim.group_step import SettingsOf, step_group
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state_transitions import GradientPlace, SlotContents
from ps_core.engine._support.interrupts import defer_interrupts_installing


class OnDemandStepper:
    """Step groups, and read and write states, in home slots between passes."""

    def __init__(self, residency: Residency, gradients: GradientStore, groups: list[ParamGroup]) -> None:
        self._residency = residency
        self._store = residency.store
        self._gradients = gradients
        self._groups = groups

    def compare(self) -> None:
        """Do nothing: there are no other ranks to compare with."""

    def compare_step(
        self, records: Sequence[ParamState], settings_of: SettingsOf, max_norm: float | None, loss_scale: float
    ) -> None:
        """Do nothing: there are no other ranks to compare with."""

    # Steps.

    def step(self, settings_of: SettingsOf, factor: float) -> None:
        """Step every group with a gradient; raise `DoesNotFit` before any is stepped, if one has no room."""
        groups = []
        for group in self._groups:
            if any(record.gradient is not GradientPlace.NONE for record in group.tensors):
                groups.append(group)
        if not self._store.resident:
            self._check_room(groups)
        for group in groups:
            self.step_one(group, settings_of, factor)

    def has_room(self) -> bool:
        """Return True if each group with a gradient has room for its copies on some tier."""
        for group in self._groups:
            gains = any(record.gradient is not GradientPlace.NONE for record in group.tensors)
            if gains and self._tier_with_room(group) is None:
                return False
        return True

    def step_one(self, group: ParamGroup, settings_of: SettingsOf, factor: float) -> None:
        """Step one group."""
        kinds, tier = _kinds_of(group), self._store.work_tier(group.chunks[Kind.P32].home.tier)
        if not self._store.resident:
            tier = self._step_tier(group)
        slots = self._copies_on(group, kinds, tier)
        copies = {kind: group.chunks[kind].copies.get(tier) for kind in kinds}
        queue = Queue.CPU if tier else Queue.COMPUTE
        step_group(group, slots, settings_of, factor, partial(self._residency.transfers.do_now, queue))
        for kind, slot in slots.items():
            self._write_home(group.chunks[kind], slot)
        for kind, copy in copies.items():
            if copy is not None and copy is not slots[kind]:
                group.chunks[kind].add_copy(copy)  # it has live aliases, which keep the old values

    def _check_room(self, groups: list[ParamGroup]) -> None:
        """Reserve what the largest copies of one group take on each tier, and release it again."""
        largest: dict[int, list[int]] = {}
        for group in groups:
            tier = self._step_tier(group)
            sizes = _sizes_of_copies(group, tier)
            if sum(sizes) > sum(largest.get(tier, ())):
                largest[tier] = sizes
        for tier, sizes in largest.items():
            slots: list[Slot] = []
            try:
                for size in sizes:
                    slots.append(self._store.reserve(tier, size))
            finally:
                for slot in slots:
                    self._residency.transfers.release_slot(slot)

    def _step_tier(self, group: ParamGroup) -> int:
        """Return the tier to step a group on."""
        tier = self._tier_with_room(group)
        return self._store.work_tier(group.chunks[Kind.P32].home.tier) if tier is None else tier

    def _tier_with_room(self, group: ParamGroup) -> int | None:
        """Return the tier of a group's master, or else another one, with room for copies; None: none has room."""
        store = self._store
        nearest = store.work_tier(group.chunks[Kind.P32].home.tier)
        if group.fixed_tier is not None:
            return nearest
        for tier in (nearest, *(each for each in range(len(store.tiers)) if not store.is_disk(each))):
            size, besides = sum(_sizes_of_copies(group, tier)), 0 if tier else store.ledger.nonmodel_bytes
            if not size or size + besides <= store.free_bytes(tier):
                return tier
        return None

    def _copies_on(self, group: ParamGroup, kinds: list[Kind], tier: int) -> dict[Kind, Slot]:
        """Return slots on a tier with these kinds' current bytes; if there is no room for all, undo and raise."""
        slots: dict[Kind, Slot] = {}
        try:
            for kind in kinds:
                slots[kind] = self._copy_on(group, kind, tier)
        except BaseException:
            for kind, slot in slots.items():
                self._write_home(group.chunks[kind], slot)
            raise
        return slots

    def _copy_on(self, group: ParamGroup, kind: Kind, tier: int) -> Slot:
        """Return a slot on a tier with one kind's current bytes: the home slot, or a temporary one."""
        chunk = group.chunks[kind]
        self._residency.transfers.write_home(chunk)
        if chunk.home.tier == tier:
            return chunk.home
        slot = self._store.reserve(tier, chunk.bytes)
        if tier not in chunk.copies:
            chunk.add_copy(slot)  # registered, since copying it back to the home slot may fail
        return self._residency.transfers.copy_to(chunk, slot)

    def _write_home(self, chunk: Chunk, slot: Slot) -> None:
        """Copy a slot's contents to the home slot if that is stale, and release the slot."""
        if slot is chunk.home:
            return
        if chunk.home_is_stale:
            self._residency.transfers.copy_to(chunk, chunk.home)
        if chunk.copies.get(slot.tier) is slot:
            chunk.drop_copy(slot.tier)
        self._residency.transfers.release_slot(slot)

    def free_sums(self) -> None:
        """Release the accumulators that no plan contains."""
        self._gradients.sums.free_unused()

    def before_gradient(self, records: Sequence[ParamState]) -> None:
        """Do nothing: the user may read what backward left."""

    # Contents.

    @defer_interrupts_installing
    def weight(self, record: ParamState) -> torch.Tensor:
        """Return a copy of the parameter on the CPU, in the type that it is computed with."""
        if record.contents is SlotContents.WEIGHT:
            return self._copy(record, record.group.weight)
        return self._copy(record, Kind.P32).to(record.dtype)

    @defer_interrupts_installing
    def read(self, record: ParamState, kind: Kind) -> torch.Tensor:
        """Copy a kind of a parameter to CPU memory, in fp32 and the parameter's shape."""
        return self.read_while_loading(record, kind)

    def read_while_loading(self, record: ParamState, kind: Kind) -> torch.Tensor:
        """Copy like `read`; several ranks compare what they load only after the load."""
        if kind is Kind.P32 and Kind.P32 not in record.group.chunks:
            return self._copy(record, record.group.weight).float()
        return self._copy(record, kind)

    @contextmanager
    def opened(self, group: ParamGroup, kind: Kind, *, write: bool) -> Iterator[torch.Tensor]:
        """Yield one kind of a group as a vector that the host thread may read, and with ``write`` change."""
        chunk = group.chunks[kind]
        memory = self._residency.contents(chunk)
        what = f"{'write' if write else 'read'} {kind.value} of {group.name}"
        self._store.device.declare_access(Queue.CPU, what, (memory,), (memory,) if write else ())
        try:
            yield memory.view(group.dtype_of(kind))
        finally:
            if write:
                self._residency.changed_at_home(chunk, memory)

    def _copy(self, record: ParamState, kind: Kind) -> torch.Tensor:
        flat = self._residency.vector(record, kind)
        self._store.device.declare_access(Queue.CPU, f"read {record.name}", (flat,), ())
        target = torch.empty_strided(record.shape, record.stride, dtype=flat.dtype, device="cpu")
        return target.copy_(flat.as_strided(record.shape, record.stride, flat.storage_offset()))

    @defer_interrupts_installing
    def write(self, record: ParamState, kind: Kind, value: torch.Tensor) -> None:
        """Replace a record's values of a kind; for the master, also the weight and tied parameters."""
        changes_parameter = kind in (Kind.P32, record.group.weight)
        for each in record.tied if changes_parameter and record.tied else [record]:
            self._write(each, kind, value)

    def _write(self, record: ParamState, kind: Kind, value: torch.Tensor) -> None:
        group = record.group
        kinds = [kind]
        if kind is Kind.P32:
            value = value.to(torch.float32)  # the 16-bit weight is rounded from it, as in every step
            kinds = [each for each in (group.weight, Kind.P32) if each in group.chunks]
            if record.gradient is GradientPlace.IN_WEIGHT_SLOT:
                self._gradients.restore_weights(group)
        for each in dict.fromkeys(kinds):
            flat = torch.empty(record.numel, dtype=group.dtype_of(each), device="cpu")
            flat.as_strided(record.shape, record.stride).copy_(value)
            self._residency.replace(record, each, flat)
        if kind in (Kind.P32, group.weight):
            record.mark_replaced()


def _kinds_of(group: ParamGroup) -> list[Kind]:
    """Return the kinds that a group's step reads or writes."""
    kinds = list(dict.fromkeys((group.weight, Kind.P32, *group.state_kinds)))
    if any(record.gradient is GradientPlace.IN_ACCUMULATOR for record in group.tensors):
        kinds.append(Kind.ACC)
    return kinds


def _sizes_of_copies(group: ParamGroup, tier: int) -> list[int]:
    """Return the bytes of each copy that a group's step takes on a tier."""
    chunks = [group.chunks[kind] for kind in _kinds_of(group)]
    return [chunk.bytes for chunk in chunks if chunk.home.tier != tier]
