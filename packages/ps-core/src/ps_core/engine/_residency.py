"""Bringing groups to the compute tier and back, one at a time, in an order that is always safe.

What is here is used on demand, and between passes. A plan's own moves are the business of `_replay`; both work on the
same store, homes and stamps, so either can take over from the other between two moments.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ps_core._plan import Queue
from ps_core._program import Kind
from ps_core.engine._parameter import changes, point_at
from ps_core.engine._records import Bound, GroupRecord, TensorRecord
from ps_core.engine._store import Home, Slot, Store


class Watcher(Protocol):
    """Told of every move, for statistics."""

    def moved(self, source: int, target: int, size: int) -> None:
        """Bytes went from one tier to another."""

    def evicted(self) -> None:
        """A group left the compute tier."""


class Residency:
    """Which groups are on the compute tier, and which parameters point there."""

    def __init__(self, store: Store, groups: list[GroupRecord], watcher: Watcher) -> None:
        self.store = store
        self.groups = groups
        self.watcher = watcher
        self.owners: dict[int, TensorRecord] = {}
        """By the address of a storage: whose residency it is."""
        self.tampered: list[TensorRecord] = []
        """Parameters that left with changes in place, which are lost; to be told of at the next occasion."""

    # Parameters.

    def bind(self, record: TensorRecord) -> Bound:
        """Let the parameter be its part of its group's copy on the compute tier."""
        if record.bound is not None:
            return record.bound
        group = record.group
        slot = group.home.newest(0)
        assert slot is not None, "a group is brought in before its parameters are bound"
        first = record.offset * record.dtype.itemsize
        with torch.inference_mode(False):  # or it could never be saved for backward
            # By way of a capsule, which no stream waits for.
            own = from_dlpack(to_dlpack(slot.memory[first : first + record.numel * record.dtype.itemsize]))
            view = own.view(record.dtype).as_strided(record.shape, record.stride)
        del own
        point_at(record.parameter, view)
        storage = view.untyped_storage()
        record.version = changes(record.parameter)
        record.bound = Bound(slot, view, storage, torch._C._storage_Use_Count(storage._cdata))
        self.owners[storage._cdata] = record
        return record.bound

    def unbind(self, record: TensorRecord) -> None:
        """Let the parameter be nowhere."""
        bound = record.bound
        if bound is not None:
            point_at(record.parameter, record.placeholder)
            del self.owners[bound.storage._cdata]
            record.bound = None

    def check_untouched(self, record: TensorRecord, slot: Slot) -> None:
        """Notice a change in place that nobody was told of; the copy that has it is not to be used."""
        if record.bound is not None and changes(record.parameter) != record.version:
            self.tampered.append(record)
            if not record.group.home.dirty:
                slot.stamp = -1  # home still has the bytes as they were

    # Groups.

    def bring(self, group: GroupRecord) -> Slot:
        """Have the newest weight on the compute tier, where there must be room for it."""
        home = group.home
        slot = home.newest(0)
        if slot is not None:
            return slot
        if 0 not in home.copies:  # else one is there that is behind, for whoever holds on to its memory
            home.copies[0] = self.store.reserve(0, home.bytes)
        return self.copy_to(home, home.copies[0])

    def copy_to(self, home: Home, slot: Slot) -> Slot:
        """Fill a slot with an extent's newest bytes; whatever comes after may read it."""
        device, source = self.store.device, home.source()
        if source.tier == slot.tier:
            queue = Queue.CPU if slot.tier else Queue.COMPUTE
            self.await_all(queue)
            device.work(queue, "a copy within a tier", (source.memory,), (slot.memory,))
            slot.memory[: home.bytes].copy_(source.memory[: home.bytes])
        else:
            queue = Queue.H2D if slot.tier < source.tier else Queue.D2H
            self.await_all(queue)
            device.copy(queue, slot.memory[: home.bytes], source.memory[: home.bytes])
            event = device.record(queue)
            for other in (Queue.COMPUTE, Queue.CPU):
                device.wait(other, event)
            self.watcher.moved(source.tier, slot.tier, home.bytes)
        slot.extent, slot.stamp = home.extent, home.stamp
        return slot

    def await_all(self, queue: Queue) -> None:
        """Let whatever comes next on a queue find every other queue's work done."""
        device = self.store.device
        for other in (Queue.COMPUTE, Queue.H2D, Queue.D2H):
            if other is not queue:
                device.wait(queue, device.record(other))

    def write_home(self, home: Home) -> None:
        """Have the newest bytes at home."""
        if home.dirty:
            self.copy_to(home, home.slot)

    def drop(self, group: GroupRecord) -> bool:
        """Take a group's copy off the compute tier, saved at home if it is the newest; False if it is held on to."""
        home = group.home
        slot = home.copies.get(0)
        if slot is None:
            return True
        if group.aliased:
            return False
        for record in group.tensors:
            self.check_untouched(record, slot)
            self.unbind(record)
        if slot.stamp == home.stamp:
            self.write_home(home)
        del home.copies[0]
        self.give_back(slot)
        self.watcher.evicted()
        return True

    def give_back(self, slot: Slot) -> None:
        """Release a slot once everything that was launched is done with it."""
        self.await_all(Queue.COMPUTE)
        self.store.release(slot, Queue.COMPUTE)

    def rebuild(self, group: GroupRecord, records: list[TensorRecord]) -> None:
        """Make these payloads the parameters again, from the masters."""
        home, master = group.home, group.homes[Kind.P32]
        if group.weight is Kind.P32 or not records:
            return
        source, target = self.at_home(master), self.at_home(home)
        queue = Queue.CPU if target.tier else Queue.COMPUTE
        self.store.device.work(queue, f"rebuild {group.name}", (source.memory,), (target.memory,))
        whole = target.flat(group.dtype, group.chunk_numel)
        values = source.flat(torch.float32, group.chunk_numel)
        for record in records:
            whole[record.span].copy_(values[record.span])
        home.changed(target)

    def at_home(self, home: Home) -> Slot:
        """The home slot, holding the newest bytes, for the host thread to work on."""
        self.write_home(home)
        self.await_all(Queue.CPU)
        return home.slot
