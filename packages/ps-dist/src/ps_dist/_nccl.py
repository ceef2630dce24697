"""Collectives between CUDA devices by NCCL, without the host's memory.

[Note: planned collectives]
Every rank knows the order of collectives beforehand, by a plan or without. One is launched on its stream like a copy.
Nothing is said before it, and no thread waits after it. NCCL has no tags, so ranks that launch different collectives
may exchange anything. Each has entered its own in its history, though. The next message in the host's memory has the
fingerprint of them all (see [Note: fingerprints]). That is a step's at the latest, before what came changes a weight.
A call that another rank does not answer occupies the device. The watchdog finds it by two marks on the stream, one
before and one behind the call. It names the rank as in any other wait, and aborts NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ps_core._collectives import StagingCopier
from ps_dist._comm_thread import Mark
from ps_dist._mesh import Mesh
from ps_dist._messages import Buffers, PeerMessages
from ps_dist._reduce import OrderedReduceScatter

if TYPE_CHECKING:
    from ps_dist._session import CollectiveSession

_PIECE_NUMEL = 1 << 20
"""Elements summed at a time: 4 MiB of the device's memory outside every budget."""
_TEST_BYTES = 250
"""Byte values that tell ranks apart in `NcclMessages.warm_up`; beyond so many ranks they repeat."""
_gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name in older PyTorch


class NcclMessages(PeerMessages):
    """Messages between devices, in the order of PyTorch's current stream."""

    def __init__(self, group: Any, control: PeerMessages, mesh: Mesh, device: torch.device) -> None:
        """Allocate the memory for sums. ``control``: messages of host memory, which also counts received bytes.

        ``group``: torch's, of all ranks (any: its type has no public name); None for one process, which sends nothing.
        """
        super().__init__(group, mesh.rank)
        self._mesh = mesh
        self.received_bytes = control.received_bytes
        self.device = device
        self.name = "none" if group is None else "nccl"
        work = torch.empty(_PIECE_NUMEL, dtype=torch.float32, device=device)
        self.reduce_scatter = OrderedReduceScatter(self, mesh, work)

    def exchange(self, operation: str, tag: int, sends: Buffers, receives: Buffers) -> None:
        """Send and receive pairs of a rank and a buffer in one call; the current stream waits for them."""
        calls = []
        for peer, buffer in receives:
            if buffer.numel():
                calls.append(_call(dist.irecv, buffer, peer, self._group, tag))
                self.received_bytes[operation] += buffer.nbytes
        calls += [_call(dist.isend, buffer, peer, self._group, tag) for peer, buffer in sends if buffer.numel()]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()  # makes the current stream wait, not this thread

    def gather(self, operation: str, tag: int, peers: Sequence[int], into: Tensor, shard: Tensor) -> None:
        """Gather as `PeerMessages.gather`; by NCCL's all-gather, which knows the links, if it is of all ranks."""
        if self._group is None or len(peers) < self._mesh.size:
            super().gather(operation, tag, peers, into, shard)
            return
        _gather_all(into.view(torch.uint8), shard.view(torch.uint8), group=self._group)
        self.received_bytes[operation] += shard.nbytes * (len(peers) - 1)

    def mark(self) -> Mark:
        """Mark the place that PyTorch's current stream has come to."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def warm_up(self, tag: int) -> None:
        """Connect to every rank and allocate NCCL's memory; raise `RuntimeError` if wrong bytes arrive."""
        everyone = self._mesh.everyone
        wanted = [rank % _TEST_BYTES + 1 for rank in everyone]
        mine = torch.full((1,), wanted[self._rank], dtype=torch.uint8, device=self.device)
        gathered, sent = (torch.zeros(len(everyone), dtype=torch.uint8, device=self.device) for _ in range(2))
        self.gather("agreement", tag, everyone, gathered, mine)
        super().gather("agreement", tag, everyone, sent, mine)
        found = (gathered.tolist(), sent.tolist())  # also waits for the device
        if found != (wanted, wanted):
            raise RuntimeError(f"a gather delivered {found[0]} and messages {found[1]}, expected {wanted} twice")


class DeviceCollectives:
    """Collectives of a device's memory, which are launched when they return."""

    def __init__(self, messages: NcclMessages, session: CollectiveSession, copier: StagingCopier[Tensor]) -> None:
        """Launch on the copier's stream."""
        self._messages, self._session, self._copier = messages, session, copier

    def all_gather(self, into: Tensor, shard: Tensor, what: str) -> None:
        """Gather shards as `CollectiveSession.all_gather`."""
        tag = self._session.enter_buffer("all_gather", what, into)
        with self._on_stream(what, (shard,), (into,)):
            self._messages.gather("all_gather", tag, self._session.mesh.shard_peers, into, shard)

    def reduce_scatter(self, into: Tensor, source: Tensor, scratch: Tensor, what: str) -> None:
        """Sum shards as `CollectiveSession.reduce_scatter`."""
        tag = self._session.enter_buffer("reduce_scatter", what, source)
        with self._on_stream(what, (source,), (into, scratch)):
            self._messages.reduce_scatter(tag, into, source, scratch)

    @contextmanager
    def _on_stream(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Iterator[None]:
        with self._copier.on_stream(what, reads, writes):
            begins = self._messages.mark()
            yield
            self._session.thread.note_launch(begins, self._messages.mark())


def _call(operation: Any, buffer: Tensor, peer: int, group: Any, tag: int) -> dist.P2POp:
    return dist.P2POp(operation, buffer.view(torch.uint8), peer, group, tag)
