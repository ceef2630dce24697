"""A pass of a shared model: groups gathered moment by moment, gradients summed over processes as they become complete.

[Note: who sums what when]
A group's gradients are put side by side in a slot. Once every tensor of the group has got its own, the sum over
processes begins, beside the rest of backward. What is incomplete at the end (a tensor without a gradient) waits until
all have said which tensors got one: the union is summed, with zeros where a process has nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from ps_core._errors import UnsupportedParameter
from ps_core._plan import Queue
from ps_core._program import WIRE_BYTES
from ps_core._units import align_up
from ps_core.engine._demand import Demand
from ps_core.engine._parts import Parts
from ps_core.engine._processes.shards import ShardResidency
from ps_core.engine._processes.sums import ShardGradients, ShardUpdater
from ps_core.engine._processes.together import Pending, Together
from ps_core.engine._records import GroupRecord, TensorRecord
from ps_core.engine._refusals import compute_tier_too_small
from ps_core.engine._residency import Watcher
from ps_core.engine._store import Slot, Store

_ON_WAY = 2
"""Sums that may be on their way at once: each holds a group's memory."""
_MARGIN = 2
"""Groups stay gathered from forward to backward where there is so many times the room for all else: batches grow."""
_BITS = 32
"""Tensors that one number speaks for, when processes say which got gradients."""


def sharded(
    store: Store, groups: list[GroupRecord], watcher: Watcher, together: Together, *, overwrites: bool
) -> Parts:
    """The engine's rooms for a process that has a shard of the model."""
    residency = ShardResidency(store, groups, watcher, together)
    gradients = ShardGradients(residency, together, overwrites=overwrites)
    updater = ShardUpdater(residency, gradients, groups)
    return Parts(residency, gradients, updater, ShardDriver(residency, gradients, together))


@dataclass(slots=True, eq=False)
class _Staged:
    """A group's gradients, side by side."""

    slot: Slot
    records: dict[TensorRecord, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sum:
    """One on its way."""

    group: GroupRecord
    records: list[TensorRecord]
    shard: Slot
    """What it fills."""
    borrowed: tuple[Slot, ...]
    """To be given back."""
    pending: Pending


class ShardDriver(Demand):
    """Drives every pass of a shared model."""

    def __init__(self, residency: ShardResidency, gradients: ShardGradients, together: Together) -> None:
        super().__init__(residency, gradients)
        self._shards, self._sums, self._together = residency, gradients, together
        self._staged: dict[GroupRecord, _Staged] = {}
        self._on_way: deque[_Sum] = deque()
        self._arrived: dict[TensorRecord, None] = {}
        """In this pass, on this process."""
        self._sent: set[TensorRecord] = set()
        """Of those, the ones whose sum was begun."""
        self._backward = False
        self._keeps: bool | None = None
        """Whether groups stay until their gradients leave; None: not agreed on yet, for the first pass is to show."""

    # Moments.

    def begin(self, reads: list[TensorRecord], gains: list[GroupRecord], name: str) -> None:
        """Gather what the moment reads, and keep nothing else (or everything, where there is plenty of room)."""
        self._backward |= torch._C._current_graph_task_id() != -1
        groups = list(dict.fromkeys(record.group for record in reads))
        if groups and not self._keeps:
            for group in [group for group in self._in if group not in groups]:
                self._let_go(group)
        self._shards.sweep()
        for group in groups:
            if 0 not in group.home.copies:
                self._make_hole(group.home.bytes, name)
            slot = self._shards.bring(group)
            self._in[group] = None
            self._store.device.work(Queue.COMPUTE, name, (slot.memory,), ())

    def _has_plenty(self) -> bool:
        """Whether all groups fit together, with twice what a pass took besides that kept none."""
        store, groups = self._store, self._shards.groups
        states = sum(home.slot.bytes for group in groups for home in group.homes.values() if home.slot.tier == 0)
        besides = _MARGIN * (store.peak_bytes[0] - states)
        return states + besides + sum(group.home.bytes for group in groups) <= store.tiers[0].capacity_bytes

    def _let_go(self, group: GroupRecord) -> None:
        self._shards.drop(group)
        self._in.pop(group, None)
        group.reading = -1

    def _make_hole(self, size: int, name: str) -> None:
        """Room on the compute tier, if need be by waiting for sums."""
        if self._shards.has_spare(size) or self._roomy(size):
            return
        self._settle(0)
        self._shards.sweep()
        self._shards.free_spare()
        while not self._roomy(size):
            if self._shards.gives_way(size):
                continue
            store, groups = self._store, self._shards.groups
            total = store.used_bytes[0] + size + store.tide_bytes
            raise compute_tier_too_small(store, groups, name, total, store.tide_bytes, proven=True)

    def _roomy(self, size: int) -> bool:
        line = self._store.tiers[0].capacity_bytes - self._store.tide_bytes
        return self._store.used_bytes[0] + size <= line and self._store.fits(size, line)

    def _reserve(self, size: int, name: str) -> Slot:
        size = max(align_up(size), 128)
        self._make_hole(size, name)
        return self._shards.borrow(size)

    # Gradients.

    def take(self, record: TensorRecord, gradient: torch.Tensor) -> bool:
        """Put a gradient beside its group's others; the last one starts the sum."""
        if gradient.layout is not torch.strided:
            raise UnsupportedParameter(
                f"the gradient of {record.name!r} is {gradient.layout}: expected a dense one; use sparse=False"
            )
        group = record.group
        staged = self._staged.get(group) or self._stage(group)
        target = record.shaped(staged.slot.flat(group.dtype, group.chunk_numel))
        self._store.device.work(Queue.COMPUTE, f"gradient of {record.name}", (), (target,))
        if record in staged.records:
            target.add_(gradient)
        else:
            target.copy_(gradient)
        staged.records[record] = self._arrived[record] = None
        self._sums.announce(record)
        if len(staged.records) == len(group.tensors) and not self._sent.intersection(group.tensors):
            self._send(group, list(staged.records))
        return True

    def _stage(self, group: GroupRecord) -> _Staged:
        staged = self._staged[group] = _Staged(self._reserve(group.home.bytes, f"gradients of {group.name}"))
        return staged

    def _send(self, group: GroupRecord, records: list[TensorRecord]) -> None:
        """Begin to sum a group's gradients over processes; ``records``: those that some process has."""
        name, numel, kind = f"gradients of {group.name}", group.shard_numel, self._sums.dtype(group)
        staged = self._staged.pop(group)
        whole = staged.slot.flat(group.dtype, group.chunk_numel)
        self._clear(group, staged, whole)
        direct = self._sums.direct(group)
        shard = direct or self._reserve(numel * kind.itemsize, name)
        scratch = self._reserve(min(self._together.scratch_bytes(numel, group.dtype), WIRE_BYTES), name)
        self._shards.before_collective()
        self._store.device.work(Queue.COLL, name, (whole,), (shard.memory, scratch.memory))
        pending = self._together.start_reduce_scatter(shard.flat(kind, numel), whole, scratch.memory, name)
        slots = (staged.slot, scratch) if direct else (staged.slot, scratch, shard)
        self._on_way.append(_Sum(group, records, shard, slots, pending))
        self._sent.update(records)
        if self._keeps:
            self._let_go(group)
        self._settle(_ON_WAY)

    def _clear(self, group: GroupRecord, staged: _Staged, whole: torch.Tensor) -> None:
        """Zeros where there is no gradient."""
        gaps = [record.span for record in group.tensors if record not in staged.records]
        for gap in (*gaps, slice(group.numel, group.chunk_numel)):
            self._store.device.work(Queue.COMPUTE, f"no gradient in {group.name}", (), (whole[gap],))
            whole[gap].zero_()

    def _settle(self, most: int) -> None:
        """Wait for the oldest sums until no more than so many are on their way."""
        while len(self._on_way) > most:
            done = self._on_way.popleft()
            done.pending.wait()
            self._shards.after_collective()
            self._sums.add_shard(done.group, done.records, done.shard)
            for slot in done.borrowed:
                self._shards.lend(slot)

    # The end.

    def finish(self) -> None:
        """Sum what is left, and let everything go."""
        if self._backward or self._arrived:
            self._send_rest(self._agree())
        self._settle(0)
        for group in list(self._in):
            self._let_go(group)
        self._shards.sweep()
        self._shards.free_spare()
        self._sums.settled()
        self._arrived.clear()
        self._sent.clear()
        if self._backward and len(self._store.tiers) == 1:
            self.tracked = False  # one pass has shown that it fits
        self._backward = False

    def _agree(self) -> set[int]:
        """Which tensors got a gradient on some process."""
        count = 1 + max(record.index for group in self._shards.groups for record in group.tensors)
        words = [0] * -(-count // _BITS)
        for record in self._arrived:
            words[record.index // _BITS] |= 1 << record.index % _BITS
        union = [0] * len(words)
        words.append(self._has_plenty())
        rows = self._together.all_values([float(word) for word in words], "which gradients there are")
        if self._keeps is None:
            self._keeps = all(row[-1] for row in rows)
        for row in rows:
            union = [one | int(other) for one, other in zip(union, row[:-1], strict=True)]
        return {index for index in range(count) if union[index // _BITS] >> index % _BITS & 1}

    def _send_rest(self, union: set[int]) -> None:
        self._settle(0)
        for group in self._shards.groups:
            records = [record for record in group.tensors if record.index in union and record not in self._sent]
            if group in self._staged:  # a tensor may have got a second gradient in this pass
                records = list(dict.fromkeys((*records, *self._staged[group].records)))
            elif records:
                self._stage(group)
            for record in records:
                self._sums.announce(record)
            if records:
                self._send(group, records)
