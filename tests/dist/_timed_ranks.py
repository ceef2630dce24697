"""Ranks on played CUDA devices, each with a virtual clock of its own; collectives and messages join the clocks.

Each rank is a thread of this process, with a device, streams, a worker and a thread of collectives. All of these have
times of their own, as in `_virtual_clock`. A collective is launched on a rank's stream of collectives, as NCCL's are:
no thread waits for it. It begins once it was launched, and the stream is free, on every rank. It takes what the ranks
send over the machine's rate between accelerators. A message of numbers begins when the last rank sends its own, takes
the machine's latency, and every rank waits for it.

Times do not depend on when threads really run. Whoever looks whether a collective is over waits until the other ranks
have begun it, and then compares virtual times. That cannot last for ever: a rank looks only for what it has begun
itself, and all ranks begin the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from _threads import Meeting, Session, Together
from _virtual_clock import TimedDevice, TimedRuntime
from ps_core import Machine
from ps_core._plan import Queue
from ps_core._simulate.cluster import ring_s
from ps_core._simulate.transport import Transport, transport
from ps_core._trace import Amounts
from ps_core.engine._sharding.submitted_collectives import Submitted
from ps_core.engine._tracing.op_costs import amounts_of
from ps_dist import Mesh

_PATIENCE_S = 60.0


def share_of(machine: Machine, ranks: int) -> Machine:
    """Return one rank's part of a node's rates; its links are its own."""
    parts = ("host_bandwidth", "host_dram_bandwidth", "disk_read_bandwidth", "disk_write_bandwidth")
    return replace(machine, **{name: getattr(machine, name) / ranks for name in parts})


class CountingRuntime(TimedRuntime):
    """Counts what each moment computes, as far as it is priced."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.counts: list[Amounts] = []

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        super().operator(func, args, kwargs, result)
        if self.counts and func is not torch.ops.aten._local_scalar_dense.default:
            amounts = amounts_of(func, args, kwargs, result)
            if amounts.flops:
                self.counts[-1] = self.counts[-1].plus(amounts)


class CountingDevice(TimedDevice):
    """A rank's device; the simulator is given what it counted in place of a recorded pass's guesses."""

    def __init__(self, runtime: CountingRuntime) -> None:
        super().__init__(runtime)
        self.counts = runtime.counts
        """By moment."""

    def declare_access(self, queue: Queue, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        super().declare_access(queue, what, reads, writes)
        if len(self.moments_s) > len(self.counts):
            self.counts.append(Amounts())


class TimedPending:
    """Something that the thread of collectives does."""

    def __init__(self, future: Future[tuple[float, Any]], runtime: TimedRuntime) -> None:
        self._future, self._runtime = future, runtime

    @property
    def done(self) -> bool:
        return self.end() <= self._runtime.now_s

    def wait(self) -> Any:
        self._runtime.host_waits(self.end())
        return self._future.result()[1]

    def end(self) -> float:
        """Wait until it is over, which takes no virtual time; return when it was."""
        return self._future.result(_PATIENCE_S)[0]


class TimedSession(Session):
    """Messages of a job; how long each takes is noted in the thread's time."""

    def __init__(self, meeting: Meeting, mesh: Mesh, runtime: TimedRuntime, way: Transport) -> None:
        super().__init__(meeting, mesh)
        self.way = way
        self._runtime = runtime

    def meet(self, what: str, value: Any) -> list[Any]:
        """Exchange values between the threads of collectives."""
        rows = self._meeting.exchange(self._rank, what, (self._runtime.now_s, value))
        self._runtime.now_s = max(when for when, _ in rows) + self._runtime.machine.latency_s
        return [each for _, each in rows]

    def exchange(self, mine: bytes, what: str) -> list[bytes]:
        return self.meet(what, mine)

    def on_device(self, carrier: Any) -> StreamCollectives:
        return StreamCollectives(self, carrier)


class StreamCollectives:
    """Collectives on a rank's stream of collectives."""

    def __init__(self, session: TimedSession, carrier: Any) -> None:
        self._session, self._carrier, self._runtime = session, carrier, session._runtime

    def all_gather(self, into: Tensor, shard: Tensor, what: str) -> None:
        with self._carrier.on_stream(what, (shard,), (into,)):
            rows = self._together(f"gather {what}", shard.clone(), shard.nbytes)
            with torch.inference_mode():
                into.copy_(torch.cat(rows))

    def reduce_scatter(self, into: Tensor, source: Tensor, scratch: Tensor, what: str) -> None:
        with self._carrier.on_stream(what, (source,), (into, scratch)):
            numel, rank = into.numel(), self._session._rank
            rows = self._together(f"sum {what}", source.clone(), numel * source.itemsize)
            parts = [row[rank * numel : (rank + 1) * numel].float() for row in rows]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            into.copy_(total)

    def _together(self, what: str, value: Any, shard_bytes: int) -> list[Any]:
        """Begin with the last rank, and keep the stream busy for as long as the bytes take."""
        runtime, session = self._runtime, self._session
        stream: Any = runtime.current()
        mine = max(stream.free_s, runtime.now_s)
        rows = session._meeting.exchange(session._rank, what, (mine, value))
        stream.free_s = max(when for when, _ in rows)
        sent, way = shard_bytes * (len(rows) - 1), session.way
        session.received_bytes += sent
        hops_s = 0.0 if way.by_host else ring_s(len(rows), len(rows))
        stream.take(sent / way.bandwidth + runtime.machine.latency_s + hops_s, what)
        return [each for _, each in rows]


class TimedTogether(Together):
    """One rank."""

    def __init__(self, meeting: Meeting, rank: int, machine: Machine) -> None:
        super().__init__(meeting, rank)
        self.runtime = CountingRuntime(share_of(machine, meeting.ranks))
        way = transport(machine, ranks=meeting.ranks, ranks_per_node=meeting.ranks)
        self._session: TimedSession = TimedSession(meeting, self.mesh, self.runtime, way)

    def _submit(self, work: Callable[[], object]) -> TimedPending:
        begun, runtime = self.runtime.now_s, self.runtime

        def run() -> tuple[float, Any]:
            runtime.now_s = max(runtime.now_s, begun)
            result = work()
            return runtime.now_s, result

        return TimedPending(self._thread.submit(run), runtime)

    def start(self, job: Any) -> TimedPending:
        pending = self._submit(lambda: job(self._session))
        if not isinstance(getattr(job, "__self__", None), Submitted):
            pending.end()  # of a pass without a plan, which looks at what happens to be over
        return pending

    def staging_bytes(self, shard_numel: int, kind: torch.dtype) -> int:
        return 0

    def all_values(self, values: Sequence[float], what: str = "", *, shards_only: bool = False) -> list[list[float]]:
        rows: list[list[float]] = []
        self._submit(lambda: rows.extend(self._session.meet(f"values: {what}", list(values)))).wait()
        return rows

    def agree(self, name: str, value: str) -> None:
        rows: list[str] = []
        self._submit(lambda: rows.extend(self._session.meet(f"agree on {name}", value))).wait()
        assert len(set(rows)) == 1, rows


def run(ranks: int, machine: Machine, case: Callable[[TimedTogether], Any]) -> list[Any]:
    """Return what ``case`` gives on each rank."""
    meeting = Meeting(ranks)
    everyone = [TimedTogether(meeting, rank, machine) for rank in range(ranks)]

    def one(each: TimedTogether) -> Any:
        try:
            with each.runtime:
                return case(each)
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(one, each) for each in everyone]
        errors = [error for future in futures if (error := future.exception()) is not None]
    for each in everyone:
        each.close()
    if errors:
        raise next((error for error in errors if type(error).__name__ != "BrokenBarrierError"), errors[0])
    return [future.result() for future in futures]
