"""The `Collectives` protocol of ps_core, over torch.distributed."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ps_core._errors import InvalidInput, RanksDiverged
from ps_dist._collective_history import CollectiveHistory
from ps_dist._comm_thread import CommThread, Pending
from ps_dist._error_text import describe_exception
from ps_dist._host_staging import staging_bytes
from ps_dist._mesh import Mesh
from ps_dist._messages import PeerMessages
from ps_dist._nccl import NcclMessages
from ps_dist._process_groups import ProcessGroups
from ps_dist._reduce import OrderedReduceScatter
from ps_dist._session import CollectiveSession
from ps_dist._shard_answers import Answer, ShardAnswers, refuses
from ps_dist._share_memory import Sharing, make_common_file
from ps_dist._shared_messages import SharedMessages
from ps_dist._watchdog import Watchdog

Choose: TypeAlias = "Callable[[TorchCollectives, torch.device, str], str | None]"
"""See `TorchCollectives.reach`."""
_SHOWN_BYTES = 120
"""Bytes of a value that differs between ranks, in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Counts what one process has exchanged with the others."""

    collectives: int
    """Begun so far."""
    fingerprint: str
    """A hash of all of these, in order; the same on every process."""
    wire_bytes: dict[str, int]
    """Bytes received, by operation, also those read in shared memory; as many are sent."""
    network_bytes: dict[str, int]
    """Those of them that came over sockets: from other computers, where the ranks of each share its memory."""
    transport: str
    """The transport of the data.

    ``shared``: host memory that all processes read. ``gloo``: sockets. ``shared+gloo``: the first within a computer,
    the second between computers. ``nccl``: between CUDA devices directly, once such a device is used. ``none``: a
    single process uses a CUDA device, and nothing is sent.
    """


class TorchCollectives:
    """One process's place in the group; made by `ps_dist.connect`.

    One thread runs all collectives, in the order of the calls, and every process must make the same calls. ``what``
    says what a call is for. Error messages name it. It is also part of the fingerprint by which processes that do
    different things are found. A failure of any process raises `RanksDiverged` in every other. As a context manager it
    leaves the group at the end of the block.
    """

    def __init__(
        self,
        *,
        groups: ProcessGroups,
        thread: CommThread,
        history: CollectiveHistory,
        watchdog: Watchdog,
        mesh: Mesh,
        choose: Choose,
        sharing: Sharing,
    ) -> None:
        """Own what `ps_dist.connect` made."""
        self._groups, self._choose = groups, choose
        self._open, self._process = True, os.getpid()
        self._thread, self._history, self._watchdog = thread, history, watchdog
        self._messages = sharing.messages or PeerMessages(groups.host, mesh.rank)
        self.why_not_shared = sharing.why_not
        """Why the processes do not share host memory, where they were to; empty: they do, or were not to."""
        host_sum = OrderedReduceScatter(self._messages, mesh)
        self._answers: ShardAnswers | None = None
        self._session = CollectiveSession(thread, history, self._messages, host_sum, mesh)
        atexit.register(self._close_at_exit)
        self.mesh = mesh
        """Which ranks share a copy of the model with this process, and which have the same shard."""
        self.rank = mesh.shard
        """This process's shard, from 0; without ``replicate`` its rank."""
        self.ranks = mesh.shards
        """The number of shards; without ``replicate`` the number of processes."""
        self.copy = mesh.rank // mesh.shards
        """The copy of the model that this process has a shard of, from 0; without ``replicate`` 0."""
        self.processes = mesh.size
        """All processes, those of other copies included."""
        self.process = mesh.rank
        """This process's rank among all."""
        here = sharing.ranks_on_computer_of(mesh.rank)
        self._several_computers = here < mesh.size
        self.local_ranks = min(int(os.environ.get("LOCAL_WORLD_SIZE", here)), mesh.size)
        """Processes on this computer, as torchrun says, or as they found; all processes where they know of none."""

    # Jobs.

    def start(self, job: Callable[[CollectiveSession], object]) -> Pending:
        """Queue a job for the thread of collectives.

        A job calls collectives of its session one after another, and may choose each by the results before. Every
        process must call the same ones in the same order, in whatever jobs.
        """
        self._check_open("a job")
        return self._thread.submit(partial(job, self._session))

    # Questions, outside of all collectives.

    def serve(self, answer: Answer) -> Callable[[int, int], list[Tensor]]:
        """Answer other processes' questions for shards of one more model; return what asks, by group and steps.

        All processes call this for the same models in the same order. ``answer`` is called on another thread.
        """
        if self._answers is None:
            several, reached_by = self._several_computers, os.environ.get("MASTER_ADDR", "localhost")
            self._answers = ShardAnswers(reached_by, self._groups.timeout_s, several_computers=several)
            address = self._answers.address
            found = self.start(lambda session: session.exchange(address, "where questions are answered")).wait()
            self._answers.set_addresses([found[rank] for rank in self.mesh.shard_peers])
            self._watchdog.has_ended = lambda rank: refuses(found[rank], several_computers=several)
        model = self._answers.add(answer)
        return partial(self._answers.ask, model, me=self.mesh.shard)

    # Buffers.

    def start_all_gather(self, into: Tensor, shard: Tensor, what: str = "") -> Pending:
        """Begin to put every process's equal ``shard`` into ``into``; use neither until it is complete.

        ``shard`` may lie in its place of ``into`` already.
        """
        self._check("all_gather", whole=into, shard=shard)
        if into.dtype != shard.dtype:
            raise InvalidInput(f"all_gather: into is {into.dtype} but shard is {shard.dtype}; expected one type")
        return self.start(lambda session: session.all_gather(into, shard, what))

    def start_reduce_scatter(
        self, into: Tensor, source: Tensor, scratch: Tensor | None = None, what: str = ""
    ) -> Pending:
        """Begin to sum this process's shard of every ``source`` into ``into``; see `reduce_scatter`.

        ``scratch`` is uint8 memory for what the others send. If it is smaller than `scratch_bytes`, the shard is
        exchanged piece by piece. None: memory is allocated.
        """
        self._check("reduce_scatter", whole=source, shard=into)
        if scratch is None:
            size = self.scratch_bytes(into.numel(), source.dtype)
            scratch = torch.empty(size, dtype=torch.uint8, device=source.device)
        if scratch.dtype is not torch.uint8 or not scratch.is_contiguous():
            raise InvalidInput(f"reduce_scatter: scratch is {scratch.dtype}, expected contiguous torch.uint8")
        self._session.host_sum.piece_numel(into.numel(), source.dtype, scratch)
        room = scratch.view(-1)
        return self.start(lambda session: session.reduce_scatter(into, source, room, what))

    def scratch_bytes(self, shard_numel: int, kind: torch.dtype) -> int:
        """Return the scratch with which shards of so many elements are summed in one piece, wherever they lie."""
        nccl = self._session.nccl
        sums = [self._session.host_sum, *([] if nccl is None else [nccl.reduce_scatter])]
        return max(each.scratch_bytes(shard_numel, kind) for each in sums)

    def staging_bytes(self, shard_numel: int, kind: torch.dtype) -> int:
        """Return the host memory with which a device's shards go in one piece; 0: they go without any."""
        staged = self._session.nccl is None
        return staging_bytes(shard_numel, kind, self.mesh, self._session.host_sum) if staged else 0

    @property
    def host_memory(self) -> Callable[[int], Tensor] | None:
        """Allocates host memory, as bytes, that the other ranks read without a copy; None: there is none."""
        heap = self._messages.heap
        return None if heap is None else heap.allocate

    @property
    def common_file(self) -> Callable[[], int | None] | None:
        """Makes a file in memory, and returns each rank's descriptor, if all ranks ask; None: ranks share no memory."""
        messages = self._messages
        if not isinstance(messages, SharedMessages) or self.ranks < self.processes:
            return None

        def make(session: CollectiveSession) -> int | None:
            return make_common_file(partial(session.exchange, what="making common memory"), messages, self.rank)

        return lambda: self.start(make).wait()

    @property
    def card(self) -> int | None:
        """Return the only CUDA device whose memory this process can use in collectives; None: any."""
        return None if self._session.nccl is None else self._session.nccl.device.index

    def reach(self, where: torch.device, why_by_host: str = "") -> str | None:
        """Decide what memory of this CUDA device travels by, all processes at once; the first decision stays.

        ``why_by_host``: why shared host memory is faster than NCCL, by this process's figures; empty: it is not.
        Returns why it goes through the host's memory, once, where the user did not ask for that. Raises `InvalidInput`
        on all ranks if what the user asked for does not work.
        """
        self._check_open("CUDA")
        return self._choose(self, where, why_by_host)

    def nccl_messages(self, group: Any, device: torch.device) -> NcclMessages:
        """Make messages of this device's memory; ``group``: NCCL's, or None where one process sends nothing."""
        return NcclMessages(group, self._messages, self.mesh, device)

    def use_nccl(self, nccl: NcclMessages) -> None:
        """Use these messages for the memory of their device from now on."""
        self._session.nccl, self._watchdog.abort = nccl, self._groups.abort_nccl

    def all_gather(self, into: Tensor, shard: Tensor, what: str = "") -> None:
        """Put every process's equal ``shard`` into ``into``, in rank order."""
        self.start_all_gather(into, shard, what).wait()

    def reduce_scatter(self, into: Tensor, source: Tensor, what: str = "") -> None:
        """Sum this process's shard of every process's ``source`` into ``into``.

        Each process sends the others their shards as they are. It adds what it receives in fp32 and in rank order, and
        rounds once to the type of ``into``. So the bits depend neither on who came first nor on the transport. With
        ``replicate`` the sums of the copies are added likewise, in fp32 and in the order of the copies.
        """
        self.start_reduce_scatter(into, source, what=what).wait()

    # Numbers.

    def all_values(self, values: Sequence[float], what: str = "", *, shards_only: bool = False) -> list[list[float]]:
        """Return every process's values in double precision, a row each, in rank order; each gives as many.

        ``shards_only``: of the processes that share this one's copy of the model.
        """
        peers = self.mesh.shard_peers if shards_only else self.mesh.everyone
        mine = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        rows = self.start(lambda session: session.gather_rows("agreement", what, mine, peers)).wait()
        found: list[list[float]] = rows.tolist()
        return found

    def all_reduce_sum(self, value: float) -> float:
        """Return the sum over processes in double precision and rank order, the same bits on each."""
        return sum(row[0] for row in self.all_values([value], "sum"))

    def all_reduce_max(self, value: float) -> float:
        """Return the largest over processes; nan if any is nan."""
        values = [row[0] for row in self.all_values([value], "maximum")]
        return next((each for each in values if each != each), max(values))  # noqa: PLR0124 - only nan differs

    def barrier(self) -> None:
        """Wait until every process has called this."""
        self.all_values([0.0], "barrier")

    # Agreement.

    def agree(self, name: str, value: str) -> None:
        """Raise `RanksDiverged` unless every process gives the same ``value``; it says which rank has which."""
        digest = blake2b(value.encode(), digest_size=6).digest()
        mine = float(int.from_bytes(digest, "little"))
        found = [row[0] for row in self.all_values([mine], f"agree on {name}")]
        if len(set(found)) == 1:
            return
        shown = value.encode()[:_SHOWN_BYTES].ljust(_SHOWN_BYTES)
        rows = self.all_values([float(byte) for byte in shown], f"disagree on {name}")
        texts = [bytes(map(int, row)).decode(errors="replace").strip() for row in rows]
        theirs = "; ".join(
            f"{texts[found.index(each)]} (rank {', '.join(str(r) for r, f in enumerate(found) if f == each)})"
            for each in dict.fromkeys(found)
        )
        raise RanksDiverged(f"{name} must be the same on all ranks, found: {theirs}")

    def statistics(self) -> Statistics:
        """Return what was exchanged so far."""
        last = self._history.last
        return Statistics(
            collectives=last.number,
            fingerprint=last.fingerprint,
            wire_bytes=dict(sorted(self._messages.received_bytes.items())),
            network_bytes=dict(sorted(self._messages.network_bytes.items())),
            transport=(self._session.nccl or self._messages).name,
        )

    def recent(self) -> list[str]:
        """Return the latest collectives and notes, oldest first."""
        return [entry.what for entry in self._history.tail()[1:]]

    def close(self) -> None:
        """Leave the group once all that was begun is complete; safe to call twice.

        Where models follow a plan, wait for the other ranks: until they leave they may ask for this rank's shards.
        While an exception is handled it leaves at once, and ranks that wait are told which exception it was.
        """
        self._close(describe_exception(sys.exc_info()[1]))

    def __enter__(self) -> TorchCollectives:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._close(describe_exception(error))

    def _close_at_exit(self) -> None:
        """Leave the group, and tell the others the exception by which the interpreter ends.

        No `sys.excepthook` is set: an exception that is caught, or raised in a notebook's cell, does not end the
        process. As the interpreter ends, `sys.last_value` is the exception that ends it.
        """
        self._close(describe_exception(getattr(sys, "last_value", None)), waits=False)

    def _close(self, error: str, *, waits: bool = True) -> None:
        if not self._open or os.getpid() != self._process:  # a fork has none of the threads
            return
        together = False
        if self._answers is not None and waits and not error:
            with suppress(RanksDiverged):  # whoever has ended asks nothing
                self.all_values([0.0], "leave")
                together = True
        self._open = False
        atexit.unregister(self._close_at_exit)
        ended = self._thread.close(waits=waits and not error)
        error_to_tell = "" if self._thread.error is not None else error  # after a failure the others know more
        self._watchdog.close(error_to_tell, together=together)
        if self._answers is not None:  # only now: a process that refuses connections is taken to have ended
            self._answers.close()
        failed = error or self._thread.error is not None or self._thread.failure is not None
        if failed or not ended:
            self._groups.abort_nccl()  # NCCL would wait for what the others never answer
        if ended:
            self._groups.destroy()
            self._messages.close()
        else:  # taking the transport down would wait for what the thread waits for
            self._messages.cut(self.mesh.everyone)
            self._thread.wait_cut()

    # Checks.

    def _check_open(self, operation: str) -> None:
        if not self._open:
            raise InvalidInput(f"{operation}: rank {self.mesh.rank} has left the group")
        if os.getpid() != self._process:
            raise InvalidInput(f"{operation}: this is a copy (fork) of rank {self.mesh.rank}, and in no group")

    def _check(self, operation: str, *, whole: Tensor, shard: Tensor) -> None:
        self._check_open(operation)
        for buffer in (whole, shard):
            if buffer.dim() != 1 or not buffer.is_contiguous():
                raise InvalidInput(f"{operation}: buffers must be one-dimensional and contiguous")
            if buffer.device.type != "cpu":
                raise InvalidInput(f"{operation}: a buffer is on {buffer.device}; expected cpu")
        if whole.numel() != shard.numel() * self.ranks:
            raise InvalidInput(
                f"{operation}: expected {self.ranks} shards of {shard.numel()} elements, found {whole.numel()} elements"
            )
