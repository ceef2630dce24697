"""Ranks that are threads of one process: what `ps_dist` does, done by copying, so that many cases are cheap to try."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, reduce
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core import RanksDiverged
from ps_core.engine import _chunked
from ps_core.engine._sharding import planned_scheduler
from ps_core.engine._sharding.planned_scheduler import RanksScheduler
from ps_core.engine._sharding.ranks_plan import RanksPlan
from ps_core.engine._sharding.submitted_collectives import Submitted
from ps_dist import Mesh

_PATIENCE_S = 30.0
"""After which ranks that do not meet are taken to have parted."""


class Meeting:
    """Where all ranks come together."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = Barrier(ranks, timeout=_PATIENCE_S)
        self._table: list[Any] = [None] * ranks
        self.questioned = Event()
        """Set once any rank asked for a shard."""
        self.servers: list[list[Callable[[int, int], Tensor | None]]] = [[] for _ in range(ranks)]
        """By rank, and by model: what answers questions for shards."""
        self.log: list[str] = []
        """Every collective, with who takes or gives."""

    def exchange(self, rank: int, what: str, value: Any) -> list[Any]:
        """What everybody has; all must come for the same thing."""
        self._table[rank] = what, value
        self._barrier.wait()
        rows = list(self._table)
        if rank == 0:
            self.log.append(what)
        self._barrier.wait()
        if len({row[0] for row in rows}) > 1:
            raise RanksDiverged(f"the ranks do different things: {[row[0] for row in rows]}")
        return [row[1] for row in rows]

    def leave(self) -> None:
        """Let nobody wait in vain."""
        self._barrier.abort()


class Pending:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Any:
        return self._future.result(_PATIENCE_S)


class Session:
    def __init__(self, meeting: Meeting, mesh: Mesh) -> None:
        self._meeting, self._mesh, self._rank = meeting, mesh, mesh.rank
        self.received_bytes = 0

    def exchange(self, mine: bytes, what: str) -> list[bytes]:
        return self._meeting.exchange(self._rank, what, mine)

    def all_gather(self, into: Tensor, shard: Tensor, what: str) -> None:
        rows = self._meeting.exchange(self._rank, f"gather {what}", shard.clone())
        self.received_bytes += (self._mesh.shards - 1) * shard.nbytes
        with torch.inference_mode():  # a transport writes whatever it is given
            into.copy_(torch.cat([rows[peer] for peer in self._mesh.shard_peers]))

    def reduce_scatter(self, into: Tensor, source: Tensor, scratch: Tensor, what: str) -> None:
        rows = self._meeting.exchange(self._rank, f"sum {what}", source.clone())
        numel, mesh = into.numel(), self._mesh
        self.received_bytes += (mesh.shards - 1) * numel * source.itemsize
        mine, sums = slice(mesh.shard * numel, (mesh.shard + 1) * numel), []
        for first in range(0, mesh.size, mesh.shards):
            sums.append(reduce(torch.add, [row[mine].float() for row in rows[first : first + mesh.shards]]))
        into.copy_(reduce(torch.add, sums))
        self.received_bytes += numel * (mesh.copies - 1) // mesh.copies * (4 + into.element_size())


class Together:
    """One rank."""

    def __init__(self, meeting: Meeting, rank: int, copies: int = 1) -> None:
        self.mesh = Mesh(rank, meeting.ranks, copies)
        self.process, self.rank = rank, self.mesh.shard
        self.ranks, self.copy = self.mesh.shards, rank // self.mesh.shards
        self.processes = self.local_ranks = meeting.ranks
        self.host_memory, self.why_not_shared = None, ""
        self.common_file: Callable[[], int] | None = self._make_file if copies == 1 else None
        """None: ranks do not map each other's weights."""
        self.meeting = meeting
        self.asked = 0
        """Questions for shards."""
        self.began: list[str] = []
        """What this rank began, and whatever else is noted, in order."""
        self.gate = Event()
        """Nothing is begun by the thread of collectives while it is not set."""
        self.gate.set()
        self._thread = ThreadPoolExecutor(1)
        self._session = Session(meeting, self.mesh)

    @property
    def received_bytes(self) -> int:
        """Of gathers and sums."""
        return self._session.received_bytes

    def _make_file(self) -> int:
        """Every rank maps the file by itself, as processes do."""
        file = os.memfd_create("test") if self.rank == 0 else -1
        files = self._thread.submit(self.meeting.exchange, self.rank, "common memory", file).result(_PATIENCE_S)
        mine = os.dup(files[0])
        self._thread.submit(self.meeting.exchange, self.rank, "opened", 0).result(_PATIENCE_S)
        if self.rank == 0:
            os.close(file)
        return mine

    def start(self, job: Any) -> Pending:
        submitted = getattr(job, "__self__", None)
        if isinstance(submitted, Submitted):
            self.began.append(f"{'gather' if submitted.gathers else 'sum'} {submitted.group.name}")
        return Pending(self._thread.submit(self._pass_gate, job))

    def _pass_gate(self, job: Any) -> Any:
        assert self.gate.wait(_PATIENCE_S)
        return job(self._session)

    def serve(self, answer: Callable[[int, int], Tensor | None]) -> Callable[[int, int], list[Tensor]]:
        servers = self.meeting.servers
        servers[self.process].append(answer)
        return partial(self.ask, len(servers[self.process]) - 1)

    def ask(self, model: int, group: int, steps: int) -> list[Tensor]:
        self.asked += 1
        self.meeting.questioned.set()
        servers = self.meeting.servers
        return [self._answer(servers[rank], model, group, steps) for rank in self.mesh.shard_peers]

    def _answer(self, servers: list[Callable[[int, int], Tensor | None]], model: int, group: int, steps: int) -> Tensor:
        until = time.monotonic() + _PATIENCE_S
        while model >= len(servers) or (shard := servers[model](group, steps)) is None:
            assert time.monotonic() < until
            time.sleep(0.001)
        return shard

    def note(self, what: str) -> None:
        self.began.append(what)

    def scratch_bytes(self, shard_numel: int, kind: torch.dtype) -> int:
        across = 8 * shard_numel if self.mesh.copies > 1 else 0
        return (self.ranks - 1) * shard_numel * kind.itemsize + across

    def all_values(self, values: Sequence[float], what: str = "", *, shards_only: bool = False) -> list[list[float]]:
        rows = self._thread.submit(self.meeting.exchange, self.process, f"values: {what}", list(values))
        found = rows.result(_PATIENCE_S)
        return [found[rank] for rank in self.mesh.shard_peers] if shards_only else found

    def agree(self, name: str, value: str) -> None:
        rows = self._thread.submit(self.meeting.exchange, self.process, f"agree on {name}", value).result(_PATIENCE_S)
        if len(set(rows)) > 1:
            raise RanksDiverged(f"{name} must be the same on all ranks, found: {rows}")

    def close(self) -> None:
        self._thread.shutdown()


@contextmanager
def going_by(*, plan: bool) -> Iterator[None]:
    """Models made in this block follow a plan, or ask each other for weights as where no plan can be made."""
    with pytest.MonkeyPatch.context() as patch:
        if not plan:
            patch.setattr(_chunked, "RanksScheduler", _WithoutEstimate)
            patch.setattr(planned_scheduler, "RanksPlan", _WithoutPlan)
        yield


class _WithoutEstimate(RanksScheduler):
    """Plans no first pass."""

    def _foresee(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        pass


class _WithoutPlan(RanksPlan):
    """Is never in force."""

    def _exchange_passes(self, mine: list[Any], what: str) -> list[dict[str, Any]]:
        self.found = None
        return []

    def _plan_from(self, ranks: list[dict[str, Any]]) -> None:
        pass


def run(ranks: int, case: Callable[..., Any], *args: Any, copies: int = 1) -> tuple[list[Any], Meeting]:
    """What ``case(together, *args)`` gives on each of so many processes, which have ``copies`` copies of a model."""
    meeting = Meeting(ranks)
    everyone = [Together(meeting, rank, copies) for rank in range(ranks)]

    def one(each: Together) -> Any:
        try:
            return case(each, *args)
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(one, each) for each in everyone]
        errors = [error for future in futures if (error := future.exception()) is not None]
    for each in everyone:
        each.close()
    if errors:
        raise next((error for error in errors if not _is_follow_up(error)), errors[0])
    return [future.result() for future in futures], meeting


def _is_follow_up(error: BaseException) -> bool:
    return type(error).__name__ == "BrokenBarrierError"
