"""Submit gathers and sums of all ranks to the thread that communicates with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ps_core._plan import Queue
from ps_core.engine._devices.device import Event
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._sharding.collectives_protocol import CollectiveSession, Pending
from ps_core.engine._sharding.sharded_residency import ShardedResidency


@dataclass(slots=True, eq=False)
class Submitted:
    """One gather or sum that was submitted, and is not known to be over."""

    group: ParamGroup
    shard: torch.Tensor
    """This rank's shard of the weight (gather), or where its shard of the sum goes."""
    whole: torch.Tensor
    """Where the group goes (gather), or this rank's gradients."""
    scratch: torch.Tensor | None
    """Memory for what the other ranks send to a sum; None: it is a gather."""
    ready: Sequence[Event] = ()
    over: Event | None = None
    pending: Pending | None = None
    done: bool = False
    """True once the other thread is done with it; that thread writes it."""


class CollectiveQueue:
    """This rank's collectives in which every rank takes part; all ranks submit the same ones in the same order."""

    def __init__(self, residency: ShardedResidency) -> None:
        self._ordering, self._together = residency.ordering, residency.together
        self._device = residency.store.device
        self._everyone = range(residency.together.mesh.size)

    def gather(self, group: ParamGroup, own: torch.Tensor, whole: torch.Tensor) -> Submitted:
        """Submit a gather of a group, of which ``own`` is this rank's shard."""
        self._device.work(Queue.COLL, f"gather {group.name}", (own,), (whole,))
        return self._submit(Submitted(group, own, whole, None))

    def sum(self, group: ParamGroup, into: torch.Tensor, whole: torch.Tensor, scratch: torch.Tensor) -> Submitted:
        """Submit a sum of a group's gradients over ranks; ``whole`` has a value for every element."""
        self._device.work(Queue.COLL, f"gradients of {group.name}", (whole,), (into, scratch))
        return self._submit(Submitted(group, into, whole, scratch))

    def end(self, each: Submitted) -> None:
        """Wait until the result of a collective may be used, and its memory."""
        assert each.pending is not None, "it was submitted"
        each.pending.wait()
        self._ordering.after(each.over)

    def give_nothing(self, group: ParamGroup, records: Collection[ParamState], whole: torch.Tensor) -> None:
        """Write minus zero where this rank has no gradient: it changes no sum, and not the sign of a zero."""
        gaps = [record.span for record in group.tensors if record not in records]
        for gap in (*gaps, slice(group.numel, group.chunk_numel)):
            if gap.stop > gap.start:
                self._device.work(Queue.COMPUTE, f"no gradient in {group.name}", (), (whole[gap],))
                whole[gap].fill_(-0.0)

    def _submit(self, each: Submitted) -> Submitted:
        self._ordering.before()
        each.ready = self._ordering.ready()
        each.pending = self._together.start(partial(self._run, each))
        return each

    def _run(self, each: Submitted, session: CollectiveSession) -> None:
        """Do a collective, on the thread that communicates."""
        buffers, name = self._ordering.begin(session, each.ready), each.group.name
        if each.scratch is None:
            buffers.all_gather(each.whole, each.shard, name, self._everyone)
        else:
            kind, what = each.group.dtype, f"gradients of {name}"
            buffers.reduce_scatter(each.shard, each.whole, each.scratch, what, kind=kind, givers=self._everyone)
        each.over = self._ordering.end()
        each.done = True
