"""Submit gathers and sums of all ranks to the thread that communicates with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch

from ps_core._plan import Instr, Queue
from ps_core.engine._devices.device import Event
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._sharding.collectives_protocol import (
    AsyncCollectives,
    BufferCollectives,
    CollectiveSession,
    Pending,
)
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._sharding.streams import CollectiveOrdering
from ps_core.engine._support.work_recorder import WorkRecorder


class Submitted:
    """One gather or sum in which every rank takes part."""

    def __init__(
        self,
        ordering: CollectiveOrdering,
        group: ParamGroup,
        shard: torch.Tensor,
        whole: torch.Tensor,
        scratch: torch.Tensor | None,
        *,
        what: str,
        instr: Instr | None,
    ) -> None:
        """``shard``: of this rank, of the weight (gather), or where its part of the sum goes.

        ``whole``: where the group goes, or this rank's gradients. ``scratch``: for what others send to a sum; None: it
        is a gather. ``what``: says what it is for, the same on every rank. ``instr``: the plan's, if it is carried out.
        """
        self.group = group
        self.done = False
        """True once the other thread is done with it; that thread writes it."""
        self._ordering, self._what, self._instr = ordering, what, instr
        self._shard, self._whole, self._scratch = shard, whole, scratch
        self._ready: Sequence[Event] = ()
        self._over: Event | None = None
        self._everyone = range(0)
        self._recorder: WorkRecorder | None = None
        self._pending: Pending | None = None

    @property
    def gathers(self) -> bool:
        """True: it is a gather; False: it is a sum."""
        return self._scratch is None

    def start(self, together: AsyncCollectives, recorder: WorkRecorder | None) -> None:
        """Have the other thread do it, after everything submitted before."""
        self._recorder = recorder
        self._everyone = range(together.processes)
        self._ready = self._ordering.ready()
        self._pending = together.start(self._run)

    def _run(self, session: CollectiveSession) -> None:
        buffers = self._ordering.begin(session, self._ready)
        if self._recorder is None:
            self._communicate(buffers)
        else:
            verb = "gather" if self.gathers else "reduce-scatter of"
            what = self._instr or f"{verb} {self.group.name}"
            self._recorder.record(Queue.COLL, what, partial(self._communicate, buffers))
        self._over = self._ordering.end()
        self.done = True

    def _communicate(self, buffers: BufferCollectives) -> None:
        if self._scratch is None:
            buffers.all_gather(self._whole, self._shard, self._what, self._everyone)
        else:
            kind = self.group.dtype
            buffers.reduce_scatter(
                self._shard, self._whole, self._scratch, self._what, kind=kind, givers=self._everyone
            )

    def wait(self) -> None:
        """Wait until the result may be used, and its memory."""
        assert self._pending is not None, "it was started"
        self._pending.wait()
        self._ordering.after(self._over)


class CollectiveQueue:
    """This rank's collectives in which every rank takes part; all ranks submit the same ones in the same order."""

    def __init__(self, residency: ShardedResidency, during: str) -> None:
        """``during``: a kind of pass, by which ranks that do different ones are found and told."""
        self._during = during
        self._ordering, self._together = residency.ordering, residency.together
        self._device, self._watcher = residency.store.device, residency.transfers.watcher

    def gather(
        self, group: ParamGroup, own: torch.Tensor, whole: torch.Tensor, instr: Instr | None = None
    ) -> Submitted:
        """Submit a gather of a group, of which ``own`` is this rank's shard."""
        self._ordering.before()
        self._device.declare_access(Queue.COLL, f"gather {group.name}", (own,), (whole,))
        what = f"{group.name} in {self._during}"
        return self._submit(Submitted(self._ordering, group, own, whole, None, what=what, instr=instr))

    def sum(
        self,
        group: ParamGroup,
        into: torch.Tensor,
        whole: torch.Tensor,
        scratch: torch.Tensor,
        instr: Instr | None = None,
    ) -> Submitted:
        """Submit a sum of a group's gradients over ranks; ``whole`` has a value for every element."""
        self._ordering.before()
        self._device.declare_access(Queue.COLL, f"gradients of {group.name}", (whole,), (into, scratch))
        what = f"gradients of {group.name}"
        return self._submit(Submitted(self._ordering, group, into, whole, scratch, what=what, instr=instr))

    def fill_gaps(self, group: ParamGroup, records: Collection[ParamState], whole: torch.Tensor) -> None:
        """Write minus zero where this rank has no gradient: it changes no sum, and not the sign of a zero."""
        gaps = [record.span for record in group.tensors if record not in records]
        for gap in (*gaps, slice(group.numel, group.chunk_numel)):
            if gap.stop > gap.start:
                self._device.declare_access(Queue.COMPUTE, f"no gradient in {group.name}", (), (whole[gap],))
                whole[gap].fill_(-0.0)

    def _submit(self, each: Submitted) -> Submitted:
        each.start(self._together, self._watcher.recorder)
        return each
