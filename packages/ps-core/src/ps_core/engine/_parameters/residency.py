"""Fetch groups to the compute tier, evict them, and bind parameters to the slots there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # documented, but not in __all__

from ps_core._extents import Kind
from ps_core._plan import Queue
from ps_core.engine._memory.chunk import Chunk, MemoryView, Slot, SlotView
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._memory.transfer_observer import TransferObserver
from ps_core.engine._memory.transfers import Transfers
from ps_core.engine._parameters.errors import changed_in_place
from ps_core.engine._parameters.managed_parameter import version_of
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.state_transitions import SlotContents
from ps_core.engine._parameters.unseen_writes import ExposedParameters
from ps_core.engine._support.interrupts import defer_interrupts_installing

MOST_VIEWS = 2**13
"""Views of one block of memory that are kept for the next time, of some 1 KiB each; then all are made anew."""


class Residency:
    """Know which groups are on the compute tier, and which parameters are bound to slots there."""

    def __init__(self, store: TierStore, groups: list[ParamGroup], watcher: TransferObserver) -> None:
        self.store = store
        self.transfers = Transfers(store, watcher)
        self.groups = groups
        self.owners: dict[int, ParamState] = {}
        """The parameter that each bound storage belongs to, by the address of the StorageImpl."""
        self.tampered: list[ParamState] = []
        """Parameters whose changes in place were lost when they were evicted; the next error names them."""
        self.exposed = ExposedParameters(self)
        self.moving: AbstractContextManager[object] = nullcontext()
        """Entered while home slots are moved."""

    # Parameters.

    def bind_all(self, records: list[ParamState]) -> None:
        """Bind parameters to their groups' newest copies on the compute tier."""
        for record in records:
            bound = record.bound
            if bound is None:
                self.bind(record)
            elif bound.slot.version != record.group.weight_chunk.version:
                self.unbind(record)
                self.bind(record)

    def bind(self, record: ParamState) -> SlotView:
        """Point the parameter's data at its part of the group's slot on the compute tier."""
        if record.bound is not None:
            return record.bound
        slot = record.group.weight_chunk.newest(0)
        assert slot is not None, "a group is fetched before its parameters are bound"
        parameter, place = record.parameter, (slot.offset + record.offset * record.dtype.itemsize, record)
        with torch._C.DisableTorchFunctionSubclass():
            view = slot.views.get(place)
            if view is None:
                view = _view(record, slot)
                if len(slot.views) >= MOST_VIEWS:
                    slot.views.clear()
                slot.views[place] = view
            else:
                parameter.data = view.tensor
            version = parameter._version
        if version != record.counted_version:  # changed through an alias of its former memory
            record.counted_version = version
            self.tampered.append(record)
        record.bound = bound = SlotView(slot, *view)
        self.owners[bound.storage._cdata] = record
        return bound

    def unbind(self, record: ParamState) -> None:
        """Point the parameter's data at its placeholder, which takes no memory."""
        bound = record.bound
        if bound is None:
            return
        if self.exposed.bounds:
            self.exposed.check(record)
        parameter = record.parameter
        with torch._C.DisableTorchFunctionSubclass():
            version = parameter._version
        if version != record.counted_version:  # the user changed it: do not use this copy
            self.tampered.append(record)
            self.undo_changes(record, bound.slot)
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data = record.placeholder
        del self.owners[bound.storage._cdata]
        record.bound = None

    def unbind_elsewhere(self, group: ParamGroup, slot: Slot) -> None:
        """Unbind the parameters of a group that lie in another slot than this one and have no live aliases."""
        for record in group.tensors:
            bound = record.bound
            if bound is not None and bound.slot is not slot and not bound.aliased:
                self.unbind(record)

    def vacate(self, group: ParamGroup, slot: Slot) -> bool:
        """Unbind all parameters of a group in a slot; if one has live aliases, do nothing and return False."""
        here = []
        for record in group.tensors:
            bound = record.bound
            if bound is not None and bound.slot is slot:
                if bound.aliased:
                    return False
                here.append(record)
        for record in here:
            self.unbind(record)
        return True

    def expose(self, group: ParamGroup) -> None:
        """Check for unseen writes, at the end of the pass, to those parameters of a group that have live aliases."""
        for record in group.tensors:
            if record.bound is not None and record.bound.aliased:
                self.exposed.add(record)

    def pop_tampered(self) -> list[ParamState]:
        """Return the parameters whose changes in place were lost, and forget them."""
        found, self.tampered = self.tampered, []
        return found

    def check_tampered(self) -> None:
        """Raise if a change in place was lost since the last call."""
        for record in self.pop_tampered():
            raise changed_in_place(record)

    def undo_changes(self, record: ParamState, slot: Slot) -> None:
        """Discard what was written to ``slot``: another copy has the weight, or the master has it."""
        record.counted_version, chunk = version_of(record.parameter), record.group.weight_chunk
        if self._other_current_slots(chunk, slot):
            chunk.invalidate(slot)
        elif record.group.weight is Kind.P16 and record.group.trainable and record.contents is SlotContents.WEIGHT:
            written, master = self.sides(record, slot)  # in place: a plan may lend the home slot just now
            assert master is not None, "16-bit weights that are trained have one"
            queue = Queue.CPU if slot.tier else Queue.COMPUTE
            undo = partial(written.copy_, master)
            self.transfers.do_now(queue, f"undo changes of {record.name}", (master,), (written,), undo)

    def _other_current_slots(self, chunk: Chunk, slot: Slot) -> list[Slot]:
        return [
            each for each in (chunk.home, *chunk.copies.values()) if each is not slot and each.version == chunk.version
        ]

    def sides(self, record: ParamState, slot: Slot) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a parameter's elements in a slot, and those they were copied from; None: there is no other copy."""
        group, own = record.group, self.part_of(slot, record, record.dtype)
        if copies := self._other_current_slots(group.weight_chunk, slot):
            return own, self.part_of(max(copies, key=lambda each: each.tier), record, record.dtype)
        if group.weight is Kind.P16 and group.trainable:
            return own, self.part_of(group.chunks[Kind.P32].source(), record, torch.float32)
        return own, next((self.part_of(slot, other, record.dtype) for other in record.others), None)

    # Groups.

    def fetch(self, group: ParamGroup) -> Slot:
        """Copy a group's weight to the compute tier, where the caller has made room; return its slot there."""
        chunk = group.weight_chunk
        slot = chunk.newest(0)
        if slot is not None:
            return slot
        if 0 not in chunk.copies:  # else there is a stale copy, which a live alias keeps
            chunk.add_copy(self.store.reserve(0, chunk.bytes))
        return self.transfers.copy_to(chunk, chunk.copies[0])

    def evict(self, group: ParamGroup) -> bool:
        """Update a group's home slot, and release its copy on the compute tier; return False for a live alias."""
        chunk = group.weight_chunk
        slot = chunk.copies.get(0)
        if slot is None:
            return True
        if group.aliased:
            return False
        for record in group.tensors:
            self.unbind(record)
        if slot.version == chunk.version:
            self.transfers.write_home(chunk)
            if chunk.home_is_stale:
                return False  # the disk failed: what is here is all there is
        chunk.drop_copy(0)
        self.transfers.release_slot(slot)
        self.transfers.watcher.evicted()
        return True

    def complete(self, group: ParamGroup) -> None:
        """Do nothing: a group whose home slots are reserved has all its chunks."""

    def end_change(self) -> None:
        """Do nothing: no other rank asks for shards of groups that have just changed."""

    def release_chunks(self, group: ParamGroup) -> None:
        """Release the home slot and the copies of every chunk of a group that is not used any more."""
        for chunk in group.chunks.values():
            for slot in (chunk.home, *chunk.copies.values()):
                if not slot.released:  # as a home slot is that a plan lends
                    self.transfers.release_slot(slot)
        group.chunks.clear()

    def free_common(self, group: ParamGroup) -> None:
        """Do nothing: one process shares no weights with other ranks."""

    def rebuild(self, group: ParamGroup, records: list[ParamState]) -> None:
        """Round the masters of these parameters to 16 bits, into the group's home slot."""
        if group.weight is Kind.P32 or not records:
            return
        chunk, master = group.chunks[group.weight], group.chunks[Kind.P32]
        if chunk.home.place is not None or master.home.place is not None:
            for record in records:
                self.save(chunk, record.piece, self.load(master, record.piece))
            return
        source, target = self.transfers.at_home(master), self.transfers.at_home(chunk)
        queue = Queue.CPU if target.tier else Queue.COMPUTE
        self.store.device.declare_access(queue, f"rebuild {group.name}", (source.memory,), (target.memory,))
        whole = target.flat(group.dtype, group.shard_numel)
        values = source.flat(torch.float32, group.shard_numel)
        for record in records:
            whole[record.piece].copy_(values[record.piece])
        self._mark_written(group, chunk)

    # For the host thread. What is on the disk is read and written there, without a slot.

    def contents(self, chunk: Chunk) -> torch.Tensor:
        """Return all bytes of one kind of a group, for the host thread."""
        return self.own_bytes(chunk)

    @defer_interrupts_installing
    def own_bytes(self, chunk: Chunk) -> torch.Tensor:
        """Return a chunk's current bytes for the host thread: a view of a slot, or read from the disk."""
        if chunk.home.place is None:
            return self.transfers.at_home(chunk).memory[: chunk.bytes]
        source = self.transfers.near(chunk)
        if source.place is None:
            self.transfers.wait_for_other_queues(Queue.CPU)
            return source.memory[: chunk.bytes]
        return self.transfers.read(source, 0, chunk.bytes)

    @defer_interrupts_installing
    def changed_at_home(self, chunk: Chunk, memory: torch.Tensor) -> None:
        """Note that the host thread wrote into the memory that `contents` returned, and store it if it is on disk."""
        if chunk.home.place is not None:
            self.transfers.write(chunk.home, 0, memory)
        chunk.mark_written(chunk.home)

    def vector(self, record: ParamState, kind: Kind) -> torch.Tensor:
        """Return a parameter's current elements of a kind, for the host thread to read: a view, or read from disk."""
        return self.load(record.group.chunks[kind], record.span)

    def load(self, chunk: Chunk, span: slice) -> torch.Tensor:
        """Return some of this process's elements of a chunk, for the host thread: a view, or read from disk."""
        group = self.groups[chunk.extent.index]
        dtype = group.dtype_of(chunk.extent.kind)
        if chunk.home.place is None:
            return self.transfers.at_home(chunk).flat(dtype, group.shard_numel)[span]
        self.transfers.wait_for_other_queues(Queue.CPU)
        source = self.transfers.near(chunk)
        if source.place is None:
            return source.flat(dtype, group.shard_numel)[span]
        size = (span.stop - span.start) * dtype.itemsize
        return self.transfers.read(source, span.start * dtype.itemsize, size).view(dtype)

    def part_of(self, slot: Slot, record: ParamState, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter's elements in a slot: a view, or a copy in host memory of those on disk."""
        if slot.place is None:
            return slot.flat(dtype, record.group.chunk_numel)[record.span]
        return self.transfers.read(slot, record.offset * dtype.itemsize, record.numel * dtype.itemsize).view(dtype)

    def replace(self, record: ParamState, kind: Kind, value: torch.Tensor) -> None:
        """Write this process's elements of a parameter, all of which are given, into the home slot of a kind."""
        group, piece = record.group, record.piece
        start = group.rank * group.shard_numel + piece.start - record.offset
        self.save(group.chunks[kind], piece, value[start : start + piece.stop - piece.start])

    def save(self, chunk: Chunk, span: slice, values: torch.Tensor) -> None:
        """Write elements of a chunk to the home slot; ``values`` may be what `load` returned."""
        group = self.groups[chunk.extent.index]
        dtype, home = group.dtype_of(chunk.extent.kind), self.transfers.at_home(chunk)
        if home.place is None:
            target = home.flat(dtype, group.shard_numel)[span]
            self.store.device.declare_access(Queue.CPU, f"write {group.name}", (), (target,))
            if target.data_ptr() != values.data_ptr():
                target.copy_(values)
        elif span.stop > span.start:
            source = values.to("cpu", dtype).contiguous().view(torch.uint8)
            self.transfers.write(home, span.start * dtype.itemsize, source)
        self._mark_written(group, chunk)

    def _mark_written(self, group: ParamGroup, chunk: Chunk) -> None:
        chunk.mark_written(chunk.home)
        if group.gathered and chunk.extent.kind is group.weight:
            group.weight_chunk.invalidate_gathered()


def _view(record: ParamState, slot: Slot) -> MemoryView:
    """Make a view of a parameter's part of a slot, and the parameter's data that view; its own ``__torch_function__``
    is switched off meanwhile."""
    first = record.offset * record.dtype.itemsize
    with torch.inference_mode(False):  # or it could never be saved for backward
        # By way of a capsule, which no stream waits for.
        own = from_dlpack(to_dlpack(slot.memory[first : first + record.numel * record.dtype.itemsize]))
        view = own.view(record.dtype).as_strided(record.shape, record.stride)
    del own
    record.parameter.data = view
    storage = view.untyped_storage()
    return MemoryView(view, storage, torch._C._storage_Use_Count(storage._cdata))
