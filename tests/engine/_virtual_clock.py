"""Time a training run on the CUDA that the CPU plays: every launch, copy and wait has a price, and no clock is read.

The host thread and each stream have a time of their own, in seconds since the start. What is launched on a stream
begins when the stream is free and the host has launched it. A stream that waits for an event is free no earlier than
the event. A host thread that waits for an event goes on no earlier. Work that the host does itself takes host time.

The worker's thread has a time of its own too. Its work is done when it is launched, but takes time as if it were done
after what came before. When it ends is worked out only as far as the host thread asks: copies that are launched later
begin later.

Prices are the simulator's rates (`ps_core._simulate.machine.Machine`), but no price of a segment: matrix products by
their operations, copies by their bytes, work on memory by what the engine says that it reads and writes. The processor
shares the host's memory with copies that run beside its work; copies come first. Of two copies that memory cannot give
enough for both, the one that was launched first does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from _fake_cuda import Allocator, FakeEvent, FakeRuntime, FakeStream
from ps_core._plan import Queue
from ps_core._simulate.machine import Machine
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._devices.cuda.timer import CudaTimer
from ps_core.engine._devices.device import Mark
from ps_core.engine._devices.disk.file import FileExtent
from ps_core.engine._devices.disk.queues import DISK_QUEUES, DiskEvent
from ps_core.engine._devices.tensor_bytes import _PAUSE
from ps_core.engine._tracing.op_costs import amounts_of

FREE = ("gradient of", "no gradient in", "poison", "saved", "offloaded")
"""Beginnings of what the engine says that it does where a moment's price has it already, or nobody does it."""
PRICED = ("step of", "norm of", "norms of", "sum of", "sums of", "rebuild", "shift", "a copy within a tier")
PRICED += ("keep an activation", "restore an activation")
"""Beginnings of what takes its bytes over a bandwidth."""


class Traffic(NamedTuple):
    """Bytes a second of the host's memory, for a time."""

    begin: float
    end: float
    rate: float


@dataclass(frozen=True)
class Interval:
    """Something that took time."""

    queue: str
    what: str
    begin: float
    end: float


class TimedStream(FakeStream):
    """Knows when it is free."""

    free_s = 0.0

    def take(self, seconds: float, what: str) -> None:
        """Be busy for so long, from when the stream is free and the host has launched this."""
        runtime: Any = self.runtime
        begin = max(self.free_s, runtime.now_s)
        self.free_s = begin + seconds
        runtime.note(self.name, what, begin, self.free_s)

    def wait_event(self, event: Any) -> None:
        self.free_s = max(self.free_s, event.time_s)
        super().wait_event(event)


class TimedEvent(FakeEvent):
    """Knows when what is before it is done."""

    time_s = 0.0

    def record(self, stream: Any) -> None:
        runtime: Any = self.runtime
        self.time_s = max(stream.free_s, runtime.now_s)
        super().record(stream)

    def synchronize(self) -> None:
        runtime: Any = self.runtime
        runtime.host_waits(self.time_s)
        super().synchronize()


class TimedAllocator(Allocator):
    """Prices the operators that pass by."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not _PAUSE.entered():
            runtime: Any = self.runtime
            runtime.operator(func, args, kwargs or {}, result)
        return result


class TimedRuntime(FakeRuntime):
    """A `FakeRuntime` with a clock; ``machine`` has the rates."""

    def __init__(self, machine: Machine, seed: int | None = 0) -> None:
        super().__init__(seed)
        self.machine = machine
        self.compute = TimedStream(self, "compute")
        self.allocator = TimedAllocator(self)
        self.timeline: list[Interval] = []
        self.waited_s = 0.0
        """How long the host has waited for streams."""
        self.traffic: dict[str, list[Traffic]] = {"copies 0": [], "copies 1": []}
        """What each direction's copies take of the host's memory."""

    @property
    def now_s(self) -> float:
        """This thread's time."""
        return getattr(self.thread, "now_s", 0.0)

    @now_s.setter
    def now_s(self, value: float) -> None:
        self.thread.now_s = value

    def note(self, queue: str, what: str, begin: float, end: float) -> None:
        if end > begin:
            self.timeline.append(Interval(queue, what, begin, end))

    def host_waits(self, until_s: float) -> None:
        self.waited_s += max(0.0, until_s - self.now_s)
        self.now_s = max(self.now_s, until_s)

    def streamed_by(self, begin: float, size_bytes: float) -> float:
        """When so many bytes of the host's memory were streamed, beside the copies that are known by now."""
        own = self.machine.host_bandwidth
        beside = [each for copies in self.traffic.values() for each in copies if each.end > begin]
        return self._stretches(begin, size_bytes, beside, own, least=own / 4)[-1].end

    def copied_by(self, queue: str, begin: float, size_bytes: float, rate: float) -> float:
        """When a copy is over; memory gives it what the other direction's copies leave that are known by now."""
        other = next(copies for name, copies in self.traffic.items() if name != queue)
        stretches = self._stretches(begin, size_bytes, [each for each in other if each.end > begin], rate)
        self.traffic[queue] += stretches
        return stretches[-1].end

    def _stretches(
        self, begin: float, size_bytes: float, beside: list[Traffic], own: float, least: float = 0.0
    ) -> list[Traffic]:
        """How so many bytes pass through the host's memory, at the rate ``own`` or at what is left beside others."""
        cuts = sorted({moment for each in beside for moment in each[:2] if moment > begin})
        found: list[Traffic] = []
        when, left = begin, size_bytes
        for cut in [*cuts, float("inf")]:
            taken = sum([each.rate for each in beside if each.begin <= when < each.end])
            rate = min(own, max(self.machine.host_memory_bandwidth - taken, least))
            over = when + left / rate if rate > 0 else float("inf")
            found.append(Traffic(when, min(over, cut), rate))
            if over <= cut:
                return found
            left -= (cut - when) * rate
            when = cut
        raise AssertionError("the last stretch is endless")

    def host_works(self, size_bytes: int, what: str) -> None:
        """Let the host thread stream so many bytes of its memory."""
        begin = self.now_s + self.machine.latency_s
        self.now_s = self.streamed_by(begin, size_bytes)
        self.note("host", what, begin, self.now_s)

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.host_waits(self.compute.free_s)  # the host reads a value
            return
        amounts = amounts_of(func, args, kwargs, result)
        self.now_s += amounts.launches * self.machine.launch_s
        if amounts.flops:
            fp32 = next(each for each in args if isinstance(each, Tensor)).dtype is torch.float32
            self.compute.take(self.machine.computing_s(amounts, fp32=fp32), str(func))

    # The runtime.

    def stream(self) -> TimedStream:
        self.streams.append(TimedStream(self, f"copies {len(self.streams)}"))
        return self.streams[-1]  # type: ignore[return-value]

    def event(self) -> TimedEvent:
        self.events += 1
        return TimedEvent(self)

    def timing_event(self) -> TimedEvent:  # type: ignore[override]
        return self.event()

    def elapsed_s(self, first: Any, second: Any) -> float:
        seconds: float = second.time_s - first.time_s
        return seconds

    def synchronize(self) -> None:
        super().synchronize()
        self.host_waits(max([self.compute.free_s, *(stream.free_s for stream in self.streams)]))  # type: ignore[attr-defined]


class TimedWorker:
    """A `Worker` whose work is done at once, and over when a thread would be done with it."""

    def __init__(self, runtime: TimedRuntime) -> None:
        self._runtime = runtime
        self._last: TimedWork | None = None
        self._after_s = 0.0

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.done

    def wait(self, event: Any) -> None:
        if isinstance(event, TimedDiskEvent):
            event.happens()
            self._after_s = max(self._after_s, event.time_s)
        elif event.raw is not None:
            event.raw.stream.catch_up(event.raw.position)
            self._after_s = max(self._after_s, event.raw.time_s)

    def wait_for_all(self, events: Sequence[Any]) -> None:
        for event in events:
            self.wait(event)

    def launch(
        self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], object]
    ) -> TimedWork:
        size = sum(each.nbytes for each in (*reads, *writes))
        now_s, waited_s = self._runtime.now_s, self._runtime.waited_s
        self._last = TimedWork(self._runtime, what, size, max(self._after_s, now_s), self._last)
        work()
        self._runtime.now_s, self._runtime.waited_s = now_s, waited_s  # what the work waits for, its thread waits for
        return self._last

    def mark(self) -> Mark:
        """When work that is launched now can begin."""
        ready, last = max(self._after_s, self._runtime.now_s), self._last
        return lambda: max(ready, 0.0 if last is None else last.end_s(final=True))

    def forget_failure(self) -> BaseException | None:
        """Wait until everything launched is over, and return None: work that fails raises where it is launched."""
        self.synchronize()
        return None

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.block()

    def close(self) -> None:
        self.synchronize()


class TimedWork:
    """A piece of work on the worker's thread, behind another one."""

    queue = Queue.CPU

    def __init__(
        self, runtime: TimedRuntime, what: str, size_bytes: int, ready_s: float, before: TimedWork | None
    ) -> None:
        self._runtime, self._what, self._size, self._ready_s = runtime, what, size_bytes, ready_s
        self._before = before
        self._end_s: float | None = None

    def end_s(self, *, final: bool) -> float:
        """When it is over; ``final``: no copies are launched before that any more."""
        if self._end_s is not None:
            return self._end_s
        begin = self._ready_s if self._before is None else max(self._ready_s, self._before.end_s(final=final))
        end = self._runtime.streamed_by(begin, self._size) + self._runtime.machine.latency_s
        if final or end <= self._runtime.now_s:
            self._end_s, self._before = end, None
            self._runtime.note("worker", self._what, begin, end)
        return end

    @property
    def done(self) -> bool:
        return self.end_s(final=False) <= self._runtime.now_s

    def block(self) -> None:
        self._runtime.host_waits(self.end_s(final=True))


@dataclass(frozen=True, slots=True)
class TimedDiskEvent(DiskEvent):
    """Knows when what is before it is done."""

    runtime: TimedRuntime
    time_s: float

    @property
    def done(self) -> bool:
        return self.time_s <= self.runtime.now_s

    def block(self) -> None:
        self.runtime.host_waits(self.time_s)
        self.happens()

    def happens(self) -> None:
        """Wait for the file, which has no part in the clock's time."""
        if self.job is not None:
            self.job.done.wait()


class VirtualTimer(CudaTimer):
    """Notes virtual times of the host and of the worker too."""

    def mark(self, queue: Queue) -> Mark:
        if queue is not Queue.CPU:
            return super().mark(queue)
        runtime: Any = self._runtime
        now: float = runtime.now_s
        return lambda: now

    def mark_worker(self) -> Mark:
        worker: Any = self._worker
        return worker.mark()  # type: ignore[no-any-return]


class TimedDevice(CudaDevice):
    """Prices copies, transfers of the disk, and work on memory."""

    def __init__(self, runtime: TimedRuntime) -> None:
        self._timed = runtime
        super().__init__(runtime)
        self._worker = TimedWorker(runtime)  # type: ignore[assignment]
        self.moments_s: list[float] = []
        """When each moment began on the device."""
        self._disk_free_s = dict.fromkeys(DISK_QUEUES, 0.0)
        """When each of the disk's two queues is free, with all that it waits for."""

    @property
    def machine(self) -> Machine:
        return self._timed.machine

    def timer(self) -> VirtualTimer:
        return VirtualTimer(self._timed, self._stream, self._timing_events, self._disk, self._worker)

    def wait(self, queue: Queue, event: Any) -> None:
        if queue in DISK_QUEUES:
            self._disk_free_s[queue] = max(self._disk_free_s[queue], _end_s(event))
        if not isinstance(event, TimedWork):
            super().wait(queue, event)
        elif queue not in DISK_QUEUES:
            event.block()

    def record(self, queue: Queue) -> Any:
        event = super().record(queue)
        if not isinstance(event, DiskEvent):
            return event
        return TimedDiskEvent(event.queue, event.job, event.check, self._timed, self._disk_free_s[queue])

    def read(self, target: Tensor, place: FileExtent, start: int, lost: Callable[[], None]) -> None:
        super().read(target, place, start, lost)
        self._transfer(Queue.DISK_R, target.nbytes / self._timed.machine.disk_read_bandwidth)

    def write(self, place: FileExtent, start: int, source: Tensor) -> None:
        super().write(place, start, source)
        self._transfer(Queue.DISK_W, source.nbytes / self._timed.machine.disk_write_bandwidth)

    def _transfer(self, queue: Queue, seconds: float) -> None:
        begin = max(self._disk_free_s[queue], self._timed.now_s)
        self._disk_free_s[queue] = begin + seconds + self._timed.machine.latency_s
        self._timed.note(queue.name, "transfer", begin, self._disk_free_s[queue])

    def copy(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        machine = self._timed.machine
        rate = machine.h2d_bandwidth if queue is Queue.H2D else machine.d2h_bandwidth
        stream: Any = self._streams[queue]
        begin = max(stream.free_s, self._timed.now_s)
        over = self._timed.copied_by(stream.name, begin, source.nbytes, rate)
        stream.take(over - begin + machine.latency_s, queue.name)
        super().copy(queue, target, source)

    def declare_access(self, queue: Queue, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        super().declare_access(queue, what, reads, writes)
        machine, size = self._timed.machine, sum(each.nbytes for each in (*reads, *writes))
        if what.startswith(PRICED):
            if queue is Queue.CPU:
                self._timed.host_works(size, what)
            elif queue is Queue.COMPUTE:
                self._timed.compute.take(size / machine.device_bandwidth + machine.latency_s, what)
        elif queue is Queue.COMPUTE and not what.startswith(FREE):
            self.moments_s.append(max(self._timed.compute.free_s, self._timed.now_s))
            self._timed.compute.take(machine.moment_overhead_s, what)


def _end_s(event: Any) -> float:
    """When everything is over that a queue of the disk waits for."""
    if isinstance(event, TimedWork):
        return event.end_s(final=True)
    if isinstance(event, TimedDiskEvent):
        return event.time_s
    return 0.0 if event.raw is None else event.raw.time_s
