"""Several processes share a model's groups: each keeps a shard, and gathers a group while it is used.

[Note: shards]
Home slots hold this rank's shard of each kind. Parameters are bound to the group's FULL copy on the compute tier, which
has no home slot. The plan says when it is gathered and released. Without a plan it is asked for when a moment needs it
(see `following_driver`), and released when the next moment begins. A copy with live aliases stays in the budget until
they are gone, but counts as evicted. For when they go may be up to the garbage collector.

[Note: common weights]
Ranks of one computer that compute in fp32 on the CPU map each other's shards (`CommonWeights`). A group's gathered copy
is then a mapping: nothing is copied, and it takes no bytes of the budget. A gather only says that every rank's shard is
stepped. No rank begins a step while another one computes, since all ranks compare something before a step. Before any
other change of weights they meet too (`RankComparison.before_write`, and what loads compare). A mapping that the
program wrote to, or still has an alias of, is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Lock
from weakref import WeakMethod

import torch

from ps_core._errors import RanksDiverged
from ps_core._extents import Kind
from ps_core._plan import Queue
from ps_core._units import ALIGNMENT_BYTES, align_up
from ps_core.engine._devices.device import Event
from ps_core.engine._devices.disk.file import FileExtent
from ps_core.engine._devices.disk.queues import DISK_QUEUES
from ps_core.engine._memory.chunk import Chunk, Slot, SlotView
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._memory.transfer_observer import TransferObserver
from ps_core.engine._parameters.managed_parameter import version_of
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state_transitions import SlotContents
from ps_core.engine._sharding.collective_streams import (
    ORDERED_QUEUES,
    BlockingCollectives,
    CollectiveOrdering,
    StreamCollectives,
)
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives

_PATIENCE_S = 0.5
"""After which the thread that answers looks whether anyone still wants an answer."""
_NO_SHARD = torch.empty(0, dtype=torch.uint8, device="cpu")
"""The answer of a rank whose model is gone."""


class ShardedResidency(Residency):
    """Gathers groups; see [Note: shards]."""

    def __init__(
        self, store: TierStore, groups: list[ParamGroup], watcher: TransferObserver, together: AsyncCollectives
    ) -> None:
        super().__init__(store, groups, watcher)
        self.together = together
        self._held: list[tuple[Slot, list[SlotView]]] = []
        """Evicted copies whose memory is kept because tensors still use it."""
        self._ask: Callable[[int, int], list[torch.Tensor]] | None = None
        self.moving = lock = Lock()  # held while a plan moves shards, and while another thread reads one
        self._changes = 0
        """Optimizer steps, and changes of groups, that are over; a rank answers for its shard after as many."""
        self._changed_shards = Condition(lock)
        self._change_over: list[Event] = []
        """Events behind the last change on every queue."""
        self._disk_moves: dict[Queue, Event] = {}
        """Events behind the home slots that a plan moved to and from the disk since."""
        self._whole: tuple[Chunk, int, torch.Tensor] | None = None
        """The group last gathered for reading, with its version: the next tensor is mostly of the same group."""
        self._common: dict[ParamGroup, Slot] = {}
        """Mappings of groups that all ranks compute from where they are; see [Note: common weights]."""
        self.ordering: CollectiveOrdering = (
            StreamCollectives(store, groups, together)
            if store.device.has_collective_stream
            else BlockingCollectives(store.device, self.transfers, together)
        )
        for group in groups:
            self.complete(group)

    def complete(self, group: ParamGroup) -> None:
        """Add the chunk that the group is gathered into."""
        size = group.chunk_numel * group.dtype.itemsize
        nowhere = Slot(-1, -1, 0, torch.empty(0, dtype=torch.uint8, device="cpu"))
        group.add_chunk(Kind.FULL, Chunk(group.extent(Kind.FULL), size, nowhere, gathered=True))

    def release_chunks(self, group: ParamGroup) -> None:
        """Release what this rank has of a group, which is not used any more."""
        if Kind.FULL in group.chunks:
            self.evict(group)
            del group.chunks[Kind.FULL]
        self._common.pop(group, None)
        super().release_chunks(group)

    def free_common(self, group: ParamGroup) -> None:
        """Free the common weights of a group that no rank uses any more, unless a tensor of a rank is an alias."""
        if group.common is not None:
            mapped = float(group.common.is_mapped())
            if not any(row[0] for row in self.together.all_values([mapped], f"who uses old memory of {group.name}")):
                group.common.free()

    def map_common(self, group: ParamGroup) -> Slot:
        """Return the mapping of a group's common weights."""
        assert group.common is not None, "the group has common weights"
        slot = self._common.get(group)
        if slot is None or not slot.memory.numel():
            with torch.inference_mode(False):  # as in `take_slot`
                slot = self._common[group] = Slot(0, -1, 0, group.common.map_whole())
        return slot

    def begin_gather(self, group: ParamGroup) -> tuple[Slot, torch.Tensor]:
        """Return a slot for the whole group, and its elements, which the caller fills unless they are common."""
        chunk = group.weight_chunk
        slot = chunk.copies.get(0)
        if slot is None:
            slot = self.take_slot(chunk.bytes, group.tensors[0]) if group.common is None else self.map_common(group)
            chunk.add_copy(slot)
        chunk.invalidate(slot)
        return slot, slot.flat(group.dtype, group.chunk_numel)

    def shard_for_peers(self, group: ParamGroup) -> tuple[torch.Tensor, Slot | None]:
        """Return this rank's shard for a gather: where it lies, or copied into a slot that the caller returns."""
        chunk, valid = group.chunks[group.weight], all(r.contents is SlotContents.WEIGHT for r in group.tensors)
        source = chunk.source()
        if valid and self.ordering.reaches(source):
            return source.flat(group.dtype, group.shard_numel), None
        slot = self.take_slot(chunk.bytes)
        own = slot.flat(group.dtype, group.shard_numel)
        self.transfers.check_disk()
        if valid:
            self.transfers.copy_to(chunk, Slot(0, -1, own.nbytes, own.view(torch.uint8)))
        else:  # gradients lie over the weight, so the shard is as a rank that asks for it is answered
            shard = self.answer(group.index, self._changes)
            assert shard is not None, "this rank's last change is over"
            self.store.device.declare_access(Queue.COMPUTE, f"shard of {group.name}", (), (own,))
            own.copy_(shard.view(group.dtype))
        return own, slot

    def evict(self, group: ParamGroup) -> bool:
        """Release the gathered copy; nothing has to be written back."""
        slot = group.weight_chunk.drop_copy(0)
        if slot is not None:
            bounds = [record.bound for record in group.tensors if record.bound is not None]
            if slot.offset < 0:  # `SlotCache` gives a group the slot where it was last, which has its views alone
                here = set(group.tensors)
                slot.views = {place: view for place, view in slot.views.items() if place[1] in here}
            for record in group.tensors:
                self.unbind(record)
            self.exposed.forget(group)
            if any(bound.outlived for bound in bounds):
                self._common.pop(group, None)  # the program may write to its alias
            self._held.append((slot, bounds))
            self.transfers.watcher.evicted()
            self.release_unaliased()
        return True

    def serve(self) -> None:
        """Answer other ranks' questions for shards, on whatever thread, as long as this object lives."""
        answer = WeakMethod(self.answer)

        def answer_if_alive(index: int, changes: int) -> torch.Tensor | None:
            found = answer()
            return _NO_SHARD if found is None else found(index, changes)

        self._ask = self.together.serve(answer_if_alive)

    def answer(self, index: int, changes: int) -> torch.Tensor | None:
        """Return this rank's shard of a group's weight after so many changes; None: the last one goes on still.

        Called by another thread, for a rank that is in a pass. So no rank begins the next step meanwhile, but this one
        may not have ended the step before. The weight's own shard may be overwritten by a sum; the master rounds to
        the same.
        """
        with self._changed_shards:
            if not self._changed_shards.wait_for(lambda: self._changes >= changes, _PATIENCE_S):
                return None
            for event in (*self._change_over, *self._disk_moves.values()):
                event.block()
            group = self.groups[index]
            kind = Kind.P32 if Kind.P32 in group.chunks else group.weight
            if group.common is not None:
                return torch.zeros(1, dtype=torch.uint8, device="cpu")  # all ranks map the shard
            if kind not in group.chunks:
                return _NO_SHARD  # the model was freed here
            chunk = group.chunks[kind]
            slots = [slot for slot in (chunk.home, *chunk.copies.values()) if slot.version == chunk.version]
            source = max(slots, key=lambda slot: slot.tier)  # the lowest: an accelerator may be waiting
            memory = source.memory if source.place is None else self._read_now(source, source.place)
            values = memory[: chunk.bytes].view(group.dtype_of(kind)).to("cpu", group.dtype, copy=True)
        return values.view(torch.uint8)

    def _read_now(self, slot: Slot, place: FileExtent) -> torch.Tensor:
        """Return the bytes of a slot on the disk, read by the calling thread."""
        assert self.store.file is not None, "the slot is in a file"
        memory = torch.empty(slot.bytes, dtype=torch.uint8, device="cpu")
        self.store.file.read(place, 0, memory)
        return memory

    def note_disk_move(self, kind: Kind, queue: Queue) -> None:
        """Note that a plan moves a home slot to or from the disk; answers of masters wait until that is over.

        Only a plan for tight memory does so within a pass. Other plans leave masters where they are.
        """
        if kind in (Kind.P32, Kind.P16):
            self._disk_moves[queue] = self.store.device.record(queue)

    def end_change(self) -> None:
        """Note that this rank's shards are those after one more step, or change of groups; answer for them."""
        store = self.store
        queues = (*ORDERED_QUEUES, *DISK_QUEUES) if store.file is not None else ORDERED_QUEUES
        over: list[Event] = [] if store.synchronous else [store.device.record(queue) for queue in queues]
        if store.device.worker is not None:
            over.append(store.device.worker.launch("the end of a step", (), (), lambda: None))
        with self._changed_shards:
            self._changes += 1
            self._change_over, self._disk_moves = over, {}
            self._changed_shards.notify_all()

    def ask_for(self, group: ParamGroup, whole: torch.Tensor) -> None:
        """Fill ``whole`` with a group's weight, of which other ranks answer with their shards."""
        assert self._ask is not None, "`serve` was called"
        shards = self._ask(group.index, self._changes)
        if group.common is not None:
            return  # the answers say that all shards are stepped
        self.store.device.declare_access(Queue.COMPUTE, f"shards of {group.name}", (), (whole,))
        for rank, shard in enumerate(shards):
            if not shard.numel():
                raise RanksDiverged(
                    f"rank {rank} has freed the model, while this rank still computes with {group.name}: keep it on "
                    "all ranks until the last one is done, or call release(model) on all of them"
                )
            whole[rank * group.shard_numel : (rank + 1) * group.shard_numel].copy_(shard.view(group.dtype))

    def release_unaliased(self) -> None:
        """Release gathered copies that have no live aliases any more."""
        held, self._held = self._held, []
        for slot, bounds in held:
            if any(bound.outlived for bound in bounds):
                self._held.append((slot, bounds))
            else:
                self.return_slot(slot)

    # Memory for a while; see `_memory.slot_cache`.

    def take_slot(self, size: int, record: ParamState | None = None) -> Slot:
        """Return a slot on the compute tier, if possible the one where this parameter was."""
        with torch.inference_mode(False):  # or a pass that trains could not use it after one that does not
            size = max(align_up(size), ALIGNMENT_BYTES)
            return self.store.spare.pop(size, record) or self.store.reserve(0, size)

    def return_slot(self, slot: Slot) -> None:
        """Keep a slot from `take_slot` for its next use, or release it."""
        if not slot.bytes:
            slot.clear()  # a mapping
        elif slot.offset >= 0 or self.store.poison:
            self.transfers.release_slot(slot)
        else:
            self.store.spare.put(slot)

    def undo_changes(self, record: ParamState, slot: Slot) -> None:
        """Gather anew what was written to; the shard is as it was."""
        record.counted_version = version_of(record.parameter)
        record.group.weight_chunk.invalidate(slot)
        self._common.pop(record.group, None)

    def rebuild(self, group: ParamGroup, records: list[ParamState]) -> None:
        """Round masters to 16 bits into the home slot as one process does; the gathered copy is stale then."""
        slot = group.weight_chunk.copies.get(0)
        if slot is not None:
            group.weight_chunk.invalidate(slot)
        super().rebuild(group, records)

    # Whole tensors: every rank calls for the same one at the same time.

    def vector(self, record: ParamState, kind: Kind) -> torch.Tensor:
        """Return all elements of one kind of a parameter, gathered from all ranks."""
        chunk = record.group.chunks[kind]
        if self._whole is None or self._whole[0] is not chunk or self._whole[1] != chunk.version:
            self._whole = (chunk, chunk.version, self.contents(chunk).view(record.group.dtype_of(kind)))
        return self._whole[2][record.span]

    def contents(self, chunk: Chunk) -> torch.Tensor:
        """Return all bytes of one kind of a group, gathered from all ranks."""
        group, shard = self.groups[chunk.extent.index], self.own_bytes(chunk)
        self.store.device.declare_access(Queue.CPU, f"read {group.name}", (shard,), ())
        own, whole = shard.cpu(), torch.empty(chunk.bytes * group.ranks, dtype=torch.uint8, device="cpu")
        what = f"{chunk.extent.kind.value} of {group.name}"
        self.together.start(lambda session: session.all_gather(whole, own, what)).wait()
        return whole

    def forget(self) -> None:
        """Drop the gathered bytes that `vector` keeps."""
        self._whole = None
