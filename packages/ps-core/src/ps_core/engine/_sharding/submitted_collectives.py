"""Submit gathers and sums of all ranks to the thread that communicates with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from ps_core._plan import Instr, Queue
from ps_core._program import WIRE_BYTES
from ps_core.engine._devices.device import Event
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._sharding.collectives_protocol import BufferCollectives, CollectiveSession
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.sharded_residency import ShardedResidency


class Submitted:
    """One gather or sum in which every rank takes part, queued for the other thread behind those submitted before."""

    def __init__(
        self,
        queue: CollectiveQueue,
        group: ParamGroup,
        shard: torch.Tensor,
        whole: torch.Tensor,
        scratch: torch.Tensor | None = None,
        *,
        instr: Instr | None = None,
        ready: Sequence[Event] | None = None,
    ) -> None:
        """``shard``: of this rank, of the weight (gather), or where its part of the sum goes.

        ``whole``: where the group goes, or this rank's gradients, a value for every element. ``scratch``: for what
        others send to a sum; None: it is a gather. ``instr``: the plan's, if it is carried out. ``ready``: events that
        it waits for; None: for all that was launched so far.
        """
        self.group, self.gathers = group, scratch is None
        self._ordering, self._instr = queue.ordering, instr
        self._recorder = queue.residency.transfers.watcher.recorder
        self._shard, self._whole, self._scratch = shard, whole, scratch
        self._what = f"{group.name} in {queue.during}" if scratch is None else f"gradients of {group.name}"
        self._ready = self._ordering.ready() if ready is None else ready
        reads, writes = ((shard,), (whole,)) if scratch is None else ((whole,), (shard, scratch))
        queue.device.declare_access(Queue.COLL, self._what, reads, writes)
        self._over: Event | None = None
        self._pending = queue.together.start(self._run)

    @property
    def done(self) -> bool:
        """Return True if `wait` would not block this thread."""
        return self._pending.done

    def _run(self, session: CollectiveSession) -> None:
        buffers = self._ordering.begin(session, self._ready)
        if self._recorder is None:
            self._communicate(session, buffers)
        else:
            verb = "gather" if self.gathers else "reduce-scatter of"
            what = self._instr or f"{verb} {self.group.name}"
            self._recorder.record(Queue.COLL, what, partial(self._communicate, session, buffers))
        self._over = self._ordering.end()

    def _communicate(self, session: CollectiveSession, buffers: BufferCollectives) -> None:
        if self._scratch is not None:
            buffers.reduce_scatter(self._shard, self._whole, self._scratch, self._what)
        elif self.group.common is not None:
            session.exchange(b"\0", self._what)  # each rank has stepped its shard, which all ranks map
        else:
            buffers.all_gather(self._whole, self._shard, self._what)

    def wait(self) -> None:
        """Wait until the result may be used, and its memory."""
        self._ordering.after(self.end())

    def end(self) -> Event | None:
        """Wait until the other thread is done with it; return what queues have to wait for (see `after`)."""
        self._pending.wait()
        return self._over


class CollectiveQueue:
    """This rank's collectives in which every rank takes part; all ranks submit the same ones in the same order."""

    def __init__(self, residency: ShardedResidency, during: str) -> None:
        """``during``: a kind of pass, by which ranks that do different ones are found and told."""
        self.during = during
        self.ordering, self.together = residency.ordering, residency.together
        self.residency, self.device = residency, residency.store.device

    def sum_now(
        self,
        gradients: ShardedGradients,
        group: ParamGroup,
        records: list[ParamState],
        whole: torch.Tensor,
        take: Callable[[int], Slot],
    ) -> None:
        """Sum gradients of a group over ranks and store it, on slots of the compute tier that ``take`` returns."""
        kind, numel = gradients.dtype(group), group.shard_numel
        scratch = take(min(self.ordering.scratch_bytes(numel, group.dtype), WIRE_BYTES))
        try:
            for record in records:
                gradients.expect(record)
            gradients.make_room_for_sum(group)
            direct = gradients.direct_target(group)
            target = direct or take(numel * kind.itemsize)
        except BaseException:
            self.residency.return_slot(scratch)
            raise
        Submitted(self, group, target.flat(kind, numel), whole, scratch.memory).wait()
        gradients.accept_sum(group, records, target)
        for each in (scratch,) if direct else (scratch, target):
            self.residency.return_slot(each)

    def fill_gaps(self, group: ParamGroup, records: Collection[ParamState], whole: torch.Tensor) -> None:
        """Write minus zero where this rank has no gradient: it changes no sum, and not the sign of a zero."""
        self.fill_padding(group, whole)
        self.fill_missing(group, records, whole)

    def fill_padding(self, group: ParamGroup, whole: torch.Tensor) -> None:
        """Write minus zero behind the last parameter of a group."""
        self._fill(group, whole, slice(group.numel, group.chunk_numel))

    def fill_missing(self, group: ParamGroup, records: Collection[ParamState], whole: torch.Tensor) -> bool:
        """Write minus zero for each parameter of a group but ``records``; return True if there were any."""
        missing = [record for record in group.tensors if record not in records]
        for record in missing:
            self._fill(group, whole, record.span)
        return bool(missing)

    def _fill(self, group: ParamGroup, whole: torch.Tensor, gap: slice) -> None:
        if gap.stop > gap.start:
            self.device.declare_access(Queue.COMPUTE, f"no gradient in {group.name}", (), (whole[gap],))
            whole[gap].fill_(-0.0)


def queue_for_pass(residency: ShardedResidency, *, training: bool) -> CollectiveQueue:
    """Return a queue for one pass's collectives. Ranks that do other kinds of passes are told so by it."""
    return CollectiveQueue(residency, "a pass with gradients" if training else "an evaluation")
