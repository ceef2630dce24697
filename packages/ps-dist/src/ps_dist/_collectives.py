"""The `Collectives` protocol of ps_core, over torch.distributed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ps_core._errors import InvalidInput, RanksDiverged
from ps_dist._bench import Bench, named
from ps_dist._direct import CardWire
from ps_dist._farewell import AtExit, words_of
from ps_dist._groups import Groups
from ps_dist._journal import Journal
from ps_dist._lane import Lane, Pending
from ps_dist._mesh import Mesh
from ps_dist._staging import staging_bytes
from ps_dist._watchdog import Watchdog
from ps_dist._wire import Sum, Wire

Choose: TypeAlias = "Callable[[TorchCollectives, torch.device], str | None]"
"""See `TorchCollectives.reach`."""
_SHOWN_BYTES = 120
"""Of a value that differs between ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What one process has said to the others."""

    collectives: int
    """Entered so far, with whatever else was noted."""
    fingerprint: str
    """Of all that, in order; the same on every process."""
    wire_bytes: dict[str, int]
    """Received, by operation; what is sent is as much."""
    transport: str
    """What memory travels by: ``gloo``, that of CUDA devices by way of the host's; ``nccl``, theirs from card to card.

    As long as no CUDA device was used it is ``gloo``. ``none``: one process uses one, and nothing travels.
    """


class TorchCollectives:
    """One process's place in the group; made by `ps_dist.connect`.

    Everything is done in the order of the calls, by one thread beside the training, and every process must call the
    same. ``what`` says what a call is for: in messages, and in the fingerprint by which processes that do different
    things are found out. A failure of any process shows in every other as `RanksDiverged`. As a context manager it
    leaves the group at the end of the block.
    """

    def __init__(
        self, *, groups: Groups, lane: Lane, journal: Journal, watchdog: Watchdog, mesh: Mesh, choose: Choose
    ) -> None:
        """Take over what `ps_dist.connect` made."""
        self._groups, self._mesh, self._choose = groups, mesh, choose
        self._open, self._process = True, os.getpid()
        self._lane, self._journal, self._watchdog = lane, journal, watchdog
        self._wire = Wire(groups.control, mesh.rank)
        self._sum = Sum(self._wire, mesh.shard_peers, mesh.replica_peers, mesh.rank)
        self._cards: CardWire | None = None
        self._bench = Bench(self._lane, self._journal, self._wire, self._sum, mesh)
        self._at_exit = AtExit(lambda words: self._close(words, waits=False))
        self.rank = mesh.shard
        """This process's shard, from 0; without ``replicate`` its rank."""
        self.ranks = mesh.shards
        """How many shards there are; without ``replicate`` how many processes."""
        self.copy = mesh.rank // mesh.shards
        """Which copy of the model this process has a part of; without ``replicate`` 0."""
        self.process = mesh.rank
        """This process's rank among all."""
        self.local_ranks = min(int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size)), mesh.size)
        """Processes on this computer, as torchrun says; all of them where it did not start them."""

    @property
    def mesh(self) -> Mesh:
        """Who shares the model with this process, and who has the same part of it."""
        return self._mesh

    # Jobs.

    def start(self, job: Callable[[Bench], None]) -> Pending:
        """Have a job done when its turn comes, by the thread that does all collectives.

        A job does collectives one after another, and what it does next may depend on what came before; every process
        must do the same ones in the same order, in whatever jobs.
        """
        self._check_open("a job")
        return self._lane.submit(None, partial(job, self._bench))

    # Buffers.

    def start_all_gather(self, into: Tensor, shard: Tensor, what: str = "") -> Pending:
        """Begin to put every process's equal ``shard`` into ``into``; neither may be touched until it is over.

        ``shard`` may lie in its place of ``into`` already.
        """
        self._check("all_gather", whole=into, shard=shard)
        if into.dtype != shard.dtype:
            raise InvalidInput(f"all_gather: into is {into.dtype} but shard is {shard.dtype}; expected one type")
        entry = self._journal.add(_name("all_gather", what, into))
        peers = self._mesh.shard_peers
        return self._lane.submit(entry, lambda: self._wire.gather("all_gather", entry.tag, peers, into, shard))

    def start_reduce_scatter(
        self, into: Tensor, source: Tensor, scratch: Tensor | None = None, what: str = ""
    ) -> Pending:
        """Begin to sum this process's shard of every ``source`` into ``into``; see `reduce_scatter`.

        ``scratch`` are bytes (uint8) for what the others send; where they are fewer than `scratch_bytes`, the shard is
        exchanged piece by piece. None: memory is taken for it.
        """
        self._check("reduce_scatter", whole=source, shard=into)
        if scratch is None:
            size = self.scratch_bytes(into.numel(), source.dtype)
            scratch = torch.empty(size, dtype=torch.uint8, device=source.device)
        if scratch.dtype is not torch.uint8 or not scratch.is_contiguous():
            raise InvalidInput(f"reduce_scatter: scratch is {scratch.dtype}, expected contiguous torch.uint8")
        self._sum.piece_numel(into.numel(), source.dtype, scratch)
        entry = self._journal.add(_name("reduce_scatter", what, source))
        room, kind, givers = scratch.view(-1), source.dtype, self._mesh.everyone
        return self._lane.submit(
            entry, lambda: self._sum("reduce_scatter", entry.tag, into, source, room, kind=kind, givers=givers)
        )

    def scratch_bytes(self, shard_numel: int, kind: torch.dtype) -> int:
        """The scratch with which a reduce-scatter of shards of so many elements is done in one piece."""
        return self._sum.scratch_bytes(shard_numel, kind)

    def staging_bytes(self, shard_numel: int, kind: torch.dtype) -> int:
        """The host memory with which collectives of a device's memory go in one piece; 0: they go without."""
        return 0 if self._cards is not None else staging_bytes(shard_numel, kind, self._mesh, self._sum)

    @property
    def card(self) -> int | None:
        """The only CUDA device whose memory this process can have collectives of; None: any."""
        return None if self._cards is None else self._cards.where.index

    def reach(self, where: torch.device) -> str | None:
        """Decide what memory of this CUDA device travels by, all processes at once; what was decided stays.

        Why it goes by way of the host's memory, where nobody asked for that; told once. `InvalidInput` on all ranks if
        what was asked for cannot be.
        """
        self._check_open("CUDA")
        return self._choose(self, where)

    def card_wire(self, group: Any, where: torch.device) -> CardWire:
        """Messages of this device's memory by a group of its own; None: there is nobody to send to."""
        return CardWire(group, self._wire, self._mesh, where)

    def go_by(self, cards: CardWire) -> None:
        """Let memory of its device travel so from now on."""
        self._cards = cards
        self._bench = Bench(self._lane, self._journal, self._wire, self._sum, self._mesh, cards)

    def all_gather(self, into: Tensor, shard: Tensor, what: str = "") -> None:
        """Put every process's equal ``shard`` into ``into``, in rank order."""
        self.start_all_gather(into, shard, what).wait()

    def reduce_scatter(self, into: Tensor, source: Tensor, what: str = "") -> None:
        """Sum this process's shard of every process's ``source`` into ``into``.

        Each process sends the others their shards as they are and adds what it receives in single precision, in rank
        order, rounding once to the type of ``into``: the bits depend neither on who came first nor on the transport.
        With ``replicate`` the sums of the copies are added likewise, in single precision and the order of the copies.
        """
        self.start_reduce_scatter(into, source, what=what).wait()

    # Numbers.

    def all_values(self, values: Sequence[float], what: str = "", *, shards_only: bool = False) -> list[list[float]]:
        """Every process's values in double precision, a row each, in rank order; every process gives as many.

        ``shards_only``: of the processes that share this one's copy of the model.
        """
        peers = self._mesh.shard_peers if shards_only else self._mesh.everyone
        mine = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        everyone = torch.empty(mine.numel() * len(peers), dtype=torch.float64, device="cpu")
        entry = self._journal.add(_name("agreement", what, mine))
        self._check_open("agreement")
        self._lane.submit(entry, lambda: self._wire.gather("agreement", entry.tag, peers, everyone, mine)).wait()
        rows: list[list[float]] = everyone.view(len(peers), -1).tolist()
        return rows

    def sums(self, values: Sequence[float], what: str = "", *, shards_only: bool = False) -> list[float]:
        """The sums over processes in double precision and rank order, the same bits on each."""
        return [sum(column) for column in zip(*self.all_values(values, what, shards_only=shards_only), strict=True)]

    def maxima(self, values: Sequence[float], what: str = "") -> list[float]:
        """The largest over processes, value by value; nan if any is nan."""
        return [_largest(column) for column in zip(*self.all_values(values, what), strict=True)]

    def all_reduce_sum(self, value: float) -> float:
        """The sum of every process's value in double precision and rank order, the same bits on each."""
        return self.sums([value], "sum")[0]

    def all_reduce_max(self, value: float) -> float:
        """The largest of every process's values; nan if any is nan."""
        return self.maxima([value], "maximum")[0]

    def barrier(self) -> None:
        """Return when every process has come here."""
        self.all_values([0.0], "barrier")

    # Agreement.

    def agree(self, name: str, value: str) -> None:
        """`RanksDiverged` unless every process gives the same ``value`` for ``name``; says who has what."""
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

    def note(self, what: str) -> None:
        """Enter something that every process does alike (a moment) in the fingerprint; nothing is sent."""
        self._journal.add(what)

    def statistics(self) -> Statistics:
        """What was said so far."""
        last = self._journal.last
        return Statistics(
            collectives=last.number,
            fingerprint=last.print,
            wire_bytes=dict(sorted(self._wire.received_bytes.items())),
            transport="gloo" if self._cards is None else self._cards.name,
        )

    def recent(self) -> list[str]:
        """The latest collectives and notes, oldest first."""
        return [entry.what for entry in self._journal.tail()[1:]]

    def close(self) -> None:
        """Leave the group once everything that was begun is over; safe to call twice.

        On the way out of an exception it leaves at once, and the others, should they wait, hear which it was.
        """
        self._close(words_of(sys.exc_info()[1]))

    def __enter__(self) -> TorchCollectives:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._close(words_of(error))

    def _close(self, words: str, *, waits: bool = True) -> None:
        if not self._open or os.getpid() != self._process:  # a copy of the process has none of its threads
            return
        self._open = False
        self._at_exit.cancel()
        ended = self._lane.close(waits=waits and not words)
        self._watchdog.close("" if self._lane.error is not None else words)  # after a failure the others know more
        failed = words or self._lane.error is not None or self._lane.failure is not None
        if failed or not ended:
            self._groups.drop_cards()  # NCCL would wait for what the others never answer
        if ended:
            self._groups.leave()
        else:  # taking the transport down would wait for whatever the thread waits for
            self._wire.cut(self._mesh.everyone)
            self._lane.wait_cut()

    # Checks.

    def _check_open(self, operation: str) -> None:
        if not self._open:
            raise InvalidInput(f"{operation}: rank {self._mesh.rank} has left the group")
        if os.getpid() != self._process:
            raise InvalidInput(f"{operation}: this is a copy (fork) of rank {self._mesh.rank}, and in no group")

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


def _name(operation: str, what: str, buffer: Tensor) -> str:
    return named(operation, what, buffer.numel(), buffer.dtype)


def _largest(values: Sequence[float]) -> float:
    return next((each for each in values if each != each), max(values))  # noqa: PLR0124 - only nan differs from itself
