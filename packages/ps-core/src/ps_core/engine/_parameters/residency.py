"""Bringing groups to the compute tier and back, one at a time, in an order that is always safe.

What is here is used on demand, and between passes. A plan's own moves are the business of `_execution.replay`; both
work on the same store, homes and stamps, so either can take over from the other between two moments.
"""

from __future__ import annotations

import time

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # documented, but not in __all__

from ps_core._plan import Queue
from ps_core._program import Kind
from ps_core.engine._memory.observer import TransferObserver
from ps_core.engine._memory.slot import Chunk, Slot, SlotView
from ps_core.engine._memory.store import TierStore
from ps_core.engine._parameters.managed_parameter import set_data, version_of
from ps_core.engine._parameters.state import ParamGroup, ParamState
from ps_core.engine._parameters.transitions import SlotContents
from ps_core.engine._parameters.uncounted_writes import ExposedParameters
from ps_core.engine._support.interrupts import defer_interrupts_installing

_UNBUDGETED_BYTES = 2**16


class Residency:
    """Which groups are on the compute tier, and which parameters point there."""

    def __init__(self, store: TierStore, groups: list[ParamGroup], watcher: TransferObserver) -> None:
        self.store = store
        self.groups = groups
        self.watcher = watcher
        self.owners: dict[int, ParamState] = {}
        """By the address of a storage: whose residency it is."""
        self.tampered: list[ParamState] = []
        """Parameters that left with changes in place, which are lost; to be told of at the next occasion."""
        self.exposed = ExposedParameters(self)

    # Parameters.

    def bind(self, record: ParamState) -> SlotView:
        """Let the parameter be its part of its group's copy on the compute tier."""
        if record.bound is not None:
            return record.bound
        group = record.group
        slot = group.weight_chunk.newest(0)
        assert slot is not None, "a group is brought in before its parameters are bound"
        bound = slot.bounds.get(record)
        if bound is not None:
            set_data(record.parameter, bound.view)
        else:
            bound = _bound(record, slot)
        if version_of(record.parameter) != record.counted_version:  # by an alias of memory where it was before
            record.counted_version = version_of(record.parameter)
            self.tampered.append(record)
        record.bound = bound
        self.owners[bound.storage._cdata] = record
        return bound

    def unbind(self, record: ParamState) -> None:
        """Let the parameter be nowhere."""
        bound = record.bound
        if bound is not None:
            self._check_untouched(record, bound.slot)
            set_data(record.parameter, record.placeholder)
            del self.owners[bound.storage._cdata]
            record.bound = None

    def _check_untouched(self, record: ParamState, slot: Slot) -> None:
        """Notice a change in place that nobody was told of; the copy that has it is not to be used."""
        if self.exposed.bounds:
            self.exposed.check(record)
        if version_of(record.parameter) != record.counted_version:
            self.tampered.append(record)
            self.undo_changes(record, slot)

    def expose(self, group: ParamGroup) -> None:
        """Note that somebody holds on to memory of a group when its pass ends."""
        for record in group.tensors:
            if record.bound is not None and record.bound.aliased:
                self.exposed.add(record)

    def pop_tampered(self) -> list[ParamState]:
        """Return the parameters whose changes in place are lost, and forget about them."""
        found, self.tampered = self.tampered, []
        return found

    def undo_changes(self, record: ParamState, slot: Slot) -> None:
        """Do without what was written to a slot: another copy has the parameter as it was, or else its master."""
        record.counted_version, chunk = version_of(record.parameter), record.group.weight_chunk
        if self._copies_besides(chunk, slot):
            chunk.invalidate(slot)
        elif record.group.weight is Kind.P16 and record.group.trainable and record.contents is SlotContents.WEIGHT:
            self.rebuild(record.group, [record])

    def _copies_besides(self, chunk: Chunk, slot: Slot) -> list[Slot]:
        """The newest copies but for this one."""
        return [
            each for each in (chunk.home, *chunk.copies.values()) if each is not slot and each.version == chunk.version
        ]

    def sides(self, record: ParamState, slot: Slot) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a parameter's elements in a slot, and those they were made from; None: there is no other copy."""
        group, own = record.group, self.part_of(slot, record, record.dtype)
        if copies := self._copies_besides(group.weight_chunk, slot):
            return own, self.part_of(max(copies, key=lambda each: each.tier), record, record.dtype)
        if group.weight is Kind.P16 and group.trainable:
            return own, self.part_of(group.chunks[Kind.P32].source(), record, torch.float32)
        return own, next((self.part_of(slot, other, record.dtype) for other in record.others), None)

    # Groups.

    def fetch(self, group: ParamGroup) -> Slot:
        """Have the newest weight on the compute tier, where there must be room for it."""
        chunk = group.weight_chunk
        slot = chunk.newest(0)
        if slot is not None:
            return slot
        if 0 not in chunk.copies:  # else one is there that is behind, for whoever holds on to its memory
            chunk.add_copy(self.store.reserve(0, chunk.bytes))
        return self.copy_to(chunk, chunk.copies[0])

    def copy_to(self, chunk: Chunk, slot: Slot) -> Slot:
        """Fill a slot with an extent's newest bytes; whatever comes after may read it."""
        source, queue = self._source(chunk), None
        apart = abs(source.tier - slot.tier)
        if apart > 1 or (source.place is not None and slot.place is not None):
            self._copy_via_host(source, slot, chunk.bytes)
        elif apart:
            queue = self._launch(source, slot, chunk.bytes)
        else:
            self._within(source, slot, chunk.bytes)
        chunk.fill(slot)
        if queue is not None:
            self._arrived(queue)  # a disk that fails takes the stamp away again
        return slot

    def _within(self, source: Slot, target: Slot, size: int) -> None:
        queue = Queue.CPU if target.tier else Queue.COMPUTE
        self.wait_for_other_queues(queue)
        self.store.device.work(queue, "a copy within a tier", (source.memory,), (target.memory,))
        target.memory[:size].copy_(source.memory[:size])

    def _launch(self, source: Slot, target: Slot, size: int, *, begin: int = 0, to: int = 0) -> Queue:
        """A copy to a neighbouring tier, on this queue."""
        queue = self.store.link(source, target)
        self.wait_for_other_queues(queue)
        self.store.copy(queue, target, source, size, begin=begin, to=to)
        self.watcher.moved(source.tier, target.tier, size)
        return queue

    def _arrived(self, queue: Queue) -> None:
        """Let what comes next find a move done."""
        device, started = self.store.device, time.perf_counter()
        event = device.record(queue)
        for other in (Queue.COMPUTE, Queue.CPU):
            device.wait(other, event)
        self.watcher.waited(time.perf_counter() - started)

    def wait_for_other_queues(self, queue: Queue) -> None:
        """Let whatever comes next on a queue find every other queue's work done."""
        device, started = self.store.device, time.perf_counter()
        for other in self.store.queues:
            if other is not queue:
                device.wait(queue, device.record(other))
        self.watcher.waited(time.perf_counter() - started)

    def write_home(self, chunk: Chunk) -> None:
        """Have the newest bytes at home; but not on a disk that failed."""
        if chunk.home_is_stale and not (chunk.home.place is not None and self.broken):
            self.copy_to(chunk, chunk.home)

    def _source(self, chunk: Chunk) -> Slot:
        """A slot with the newest bytes; where a disk that failed had the only ones, this raises that again."""
        if not chunk.has_current_copy:
            self.check_disk()
        return chunk.source()

    def check_disk(self) -> None:
        """Raise again if the disk tier has failed."""
        if self.store.file is not None and self.store.file.failure is not None:
            raise self.store.file.failure

    @property
    def broken(self) -> bool:
        """Whether nothing can be written to the disk tier any more."""
        return self.store.file is not None and self.store.file.failure is not None

    def evict(self, group: ParamGroup) -> bool:
        """Take a group's copy off the compute tier, saved at home if it is the newest; False if it is held on to."""
        chunk = group.weight_chunk
        slot = chunk.copies.get(0)
        if slot is None:
            return True
        if group.aliased:
            return False
        for record in group.tensors:
            self.unbind(record)
        if slot.version == chunk.version:
            self.write_home(chunk)
            if chunk.home_is_stale:
                return False  # the disk failed: what is here is all there is
        chunk.drop_copy(0)
        self.release_slot(slot)
        self.watcher.evicted()
        return True

    def release_slot(self, slot: Slot) -> None:
        """Release a slot once everything that was launched is done with it."""
        self.wait_for_other_queues(Queue.COMPUTE)
        self.store.release(slot, Queue.COMPUTE)
        if slot.offset >= 0:
            self.store.arena.return_pages(slot.offset)

    def rebuild(self, group: ParamGroup, records: list[ParamState]) -> None:
        """Make these payloads the parameters again, from the masters."""
        chunk, master = group.weight_chunk, group.chunks[Kind.P32]
        if group.weight is Kind.P32 or not records:
            return
        if chunk.home.place is not None or master.home.place is not None:
            for record in records:
                self.replace(record, group.weight, self.vector(record, Kind.P32))
            return
        source, target = self.at_home(master), self.at_home(chunk)
        queue = Queue.CPU if target.tier else Queue.COMPUTE
        self.store.device.work(queue, f"rebuild {group.name}", (source.memory,), (target.memory,))
        whole = target.flat(group.dtype, group.chunk_numel)
        values = source.flat(torch.float32, group.chunk_numel)
        for record in records:
            whole[record.span].copy_(values[record.span])
        chunk.mark_written(target)

    def at_home(self, chunk: Chunk) -> Slot:
        """The home slot, holding the newest bytes, for the host thread to work on."""
        self.write_home(chunk)
        self.wait_for_other_queues(Queue.CPU)
        return chunk.home

    # For the host thread. What is on the disk is read and written there, without a slot.

    @defer_interrupts_installing
    def contents(self, chunk: Chunk) -> torch.Tensor:
        """An extent's newest bytes, for the host thread: where they lie, or from the disk."""
        if chunk.home.place is None:
            return self.at_home(chunk).memory[: chunk.bytes]
        source = self._near(chunk)
        if source.place is None:
            self.wait_for_other_queues(Queue.CPU)
            return source.memory[: chunk.bytes]
        return self._read(source, 0, chunk.bytes)

    @defer_interrupts_installing
    def changed_at_home(self, chunk: Chunk, memory: torch.Tensor) -> None:
        """What `contents` gave was changed."""
        if chunk.home.place is not None:
            self._write(chunk.home, 0, memory)
        chunk.mark_written(chunk.home)

    def _near(self, chunk: Chunk) -> Slot:
        """The newest bytes of an extent with a home on the disk, there or in host memory."""
        source = self._source(chunk)
        if source.place is None and source.tier == 0 and self.store.tiers[0].name != "host":
            self.write_home(chunk)
            return chunk.home if not chunk.home_is_stale else source
        return source

    def vector(self, record: ParamState, kind: Kind) -> torch.Tensor:
        """A parameter's newest elements of a kind, to be read by the host thread: where they lie, or from the disk."""
        group = record.group
        chunk = group.chunks[kind]
        if chunk.home.place is None:
            return self.at_home(chunk).flat(group.dtype_of(kind), group.chunk_numel)[record.span]
        self.wait_for_other_queues(Queue.CPU)
        return self.part_of(self._near(chunk), record, group.dtype_of(kind))

    def part_of(self, slot: Slot, record: ParamState, dtype: torch.dtype) -> torch.Tensor:
        """A parameter's elements in some slot: a view, or where that is on the disk a copy in host memory."""
        if slot.place is None:
            return slot.flat(dtype, record.group.chunk_numel)[record.span]
        return self._read(slot, record.offset * dtype.itemsize, record.numel * dtype.itemsize).view(dtype)

    def _read(self, slot: Slot, start: int, size: int) -> torch.Tensor:
        assert slot.place is not None, "slots on the disk have a place there"
        memory = self.store.device.host(max(1, size))[:size]
        self.wait_for_other_queues(Queue.DISK_R)
        self.store.device.read(memory, slot.place, start, _nothing)
        self._arrived(Queue.DISK_R)
        self.watcher.moved(slot.tier, slot.tier - 1, size)
        return memory

    def replace(self, record: ParamState, kind: Kind, value: torch.Tensor) -> None:
        """Change a parameter's elements of a kind at home, for good."""
        group = record.group
        chunk, dtype = group.chunks[kind], group.dtype_of(kind)
        self.write_home(chunk)
        self.wait_for_other_queues(Queue.CPU)
        if chunk.home.place is None:
            target = chunk.home.flat(dtype, group.chunk_numel)[record.span]
            self.store.device.work(Queue.CPU, f"write {record.name}", (), (target,))
            target.copy_(value)
        else:
            source = value.to("cpu", dtype).contiguous().view(torch.uint8)
            self._write(chunk.home, record.offset * dtype.itemsize, source)
        chunk.mark_written(chunk.home)

    def _write(self, slot: Slot, start: int, source: torch.Tensor) -> None:
        assert slot.place is not None, "slots on the disk have a place there"
        self.wait_for_other_queues(Queue.DISK_W)
        self.store.device.write(slot.place, start, source)
        self._arrived(Queue.DISK_W)
        self.watcher.moved(slot.tier - 1, slot.tier, source.numel())

    def _copy_via_host(self, source: Slot, target: Slot, size: int) -> None:
        """Through the tier above the disk, in pieces as large as it has room for."""
        tier = len(self.store.tiers) - 2
        piece = min(size, self.store.free_bytes(tier) & -128)
        if piece > 0:
            via = self.store.reserve(tier, piece)
        else:  # a little beside the budget, as the disk's own buffers are
            via = Slot(tier, -1, min(size, _UNBUDGETED_BYTES), self.store.device.host(min(size, _UNBUDGETED_BYTES)))
        for start in range(0, size, via.bytes):
            count = min(via.bytes, size - start)
            self._arrived(self._launch(source, via, count, begin=start))
            self._arrived(self._launch(via, target, count, to=start))
        if piece > 0:
            self.release_slot(via)


def _nothing() -> None:
    """Whoever reads waits at once, and hears of a failure there."""


def _bound(record: ParamState, slot: Slot) -> SlotView:
    """The parameter's part of a slot, where it is from now on."""
    first = record.offset * record.dtype.itemsize
    with torch.inference_mode(False):  # or it could never be saved for backward
        # By way of a capsule, which no stream waits for.
        own = from_dlpack(to_dlpack(slot.memory[first : first + record.numel * record.dtype.itemsize]))
        view = own.view(record.dtype).as_strided(record.shape, record.stride)
    del own
    set_data(record.parameter, view)
    storage = view.untyped_storage()
    return SlotView(slot, view, storage, torch._C._storage_Use_Count(storage._cdata))
