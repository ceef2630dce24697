"""Time a training run on the CUDA that the CPU plays: every launch, copy and wait has a price, and no clock is read.

The host thread and each stream have a time of their own, in seconds since the start. What is launched on a stream
begins when the stream is free and the host has launched it. A stream that waits for an event is free no earlier than
the event. A host thread that waits for an event goes on no earlier. Work that the host does itself takes host time.

Prices are the simulator's rates (`ps_core._simulate.machine.Machine`), but no price of a segment: matrix products by
their operations, copies by their bytes, work on memory by what the engine says that it reads and writes. The processor
shares the host's memory with copies that run beside its work; copies come first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from _fake_cuda import Allocator, FakeEvent, FakeRuntime, FakeStream
from ps_core._plan import Queue
from ps_core._simulate.machine import Machine
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._tracing.op_costs import amounts_of

FREE = ("gradient of", "poison", "saved", "offloaded")
"""Beginnings of what the engine says that it does where a moment's price has it already, or nobody does it."""
PRICED = ("step of", "norm of", "norms of", "sum of", "sums of", "rebuild", "shift", "a copy within a tier")
"""Beginnings of what takes its bytes over a bandwidth."""


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
        if not self._pause.depth:
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
        self._threads = threading.local()

    @property
    def now_s(self) -> float:
        """This thread's time."""
        return getattr(self._threads, "now_s", 0.0)

    @now_s.setter
    def now_s(self, value: float) -> None:
        self._threads.now_s = value

    def note(self, queue: str, what: str, begin: float, end: float) -> None:
        if end > begin:
            self.timeline.append(Interval(queue, what, begin, end))

    def host_waits(self, until_s: float) -> None:
        self.waited_s += max(0.0, until_s - self.now_s)
        self.now_s = max(self.now_s, until_s)

    def host_works(self, size_bytes: int, what: str) -> None:
        """Let the host stream so many bytes of its memory, beside the copies that run meanwhile."""
        begin, left = self.now_s + self.machine.latency_s, float(size_bytes)
        when = begin
        rates = {"copies 0": self.machine.h2d_bandwidth, "copies 1": self.machine.d2h_bandwidth}
        ends = sorted((stream.free_s, rates.get(stream.name, 0.0)) for stream in self.streams)  # type: ignore[attr-defined]
        while True:
            active = [(end, rate) for end, rate in ends if end > when]
            rate = max(self.machine.host_bandwidth - sum(each for _, each in active), self.machine.host_bandwidth / 4)
            if not active or when + left / rate <= active[0][0]:
                when += left / rate
                break
            left -= (active[0][0] - when) * rate
            when = active[0][0]
        self.note("host", what, begin, when)
        self.now_s = when

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.host_waits(self.compute.free_s)  # the host reads a value
            return
        amounts = amounts_of(func, args, kwargs, result)
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

    def synchronize(self) -> None:
        super().synchronize()
        self.host_waits(max([self.compute.free_s, *(stream.free_s for stream in self.streams)]))  # type: ignore[attr-defined]


class TimedDevice(CudaDevice):
    """Prices copies, and work on memory."""

    def __init__(self, runtime: TimedRuntime) -> None:
        self._timed = runtime
        super().__init__(runtime)
        self.moments_s: list[float] = []
        """When each moment began on the device."""

    @property
    def machine(self) -> Machine:
        return self._timed.machine

    def copy(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        machine = self._timed.machine
        rate = machine.h2d_bandwidth if queue is Queue.H2D else machine.d2h_bandwidth
        stream: Any = self._streams[queue]
        stream.take(source.nbytes / rate + machine.latency_s, queue.name)
        super().copy(queue, target, source)

    def work(self, queue: Queue, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        super().work(queue, what, reads, writes)
        machine, size = self._timed.machine, sum(each.nbytes for each in (*reads, *writes))
        if what.startswith(PRICED):
            if queue is Queue.CPU:
                self._timed.host_works(size, what)
            elif queue is Queue.COMPUTE:
                self._timed.compute.take(size / machine.device_bandwidth + machine.latency_s, what)
        elif queue is Queue.COMPUTE and not what.startswith(FREE):
            self.moments_s.append(max(self._timed.compute.free_s, self._timed.now_s))
            self._timed.compute.take(machine.moment_overhead_s, what)
