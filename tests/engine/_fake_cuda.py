"""A CUDA runtime on the CPU: streams that lag behind, events that are used again, memory that runs out.

PyTorch's work is the compute stream's and done at once, so only copies lag: until something waits for them, or at a
random later call. They know addresses, not tensors, as a card does: memory that is given back too early is overwritten.
Several threads may launch, each on streams of its own. Backward passes run on a thread of the device's own, as
PyTorch's do for CUDA.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from threading import RLock, current_thread, local
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ps_core.engine._devices.cuda.runtime import Allocated, Failure
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker, pop_user_modes, push_modes
from ps_kernels import PinnedArena

DEVICE_THREAD = "autograd of the played device"
_run_backward = torch.autograd.graph._engine_run_backward
_ENTERED = local()
"""The runtime that this thread trains within."""
_EVERY: list[FakeRuntime] = []
"""All runtimes that some thread trains within; the last one is that of threads which entered none."""


def _backward_of_device(*args: Any, **kwargs: Any) -> Any:
    """Run a backward pass where the runtime that this thread trains within wants it."""
    runtime: FakeRuntime | None = getattr(_ENTERED, "runtime", None) or (_EVERY[-1] if _EVERY else None)
    modes = _get_current_dispatch_mode_stack()
    of_torch = any(getattr(mode, "_mode_key", None) is not None for mode in modes)  # fake tensors, which are the CPU's
    within = current_thread().name.startswith(DEVICE_THREAD)
    if runtime is None or runtime.autograd is None or of_torch or within:
        return _run_backward(*args, **kwargs)
    here = dict(vars(runtime.thread))
    try:
        return runtime.autograd.submit(_as_caller(runtime, here, modes, args, kwargs)).result()
    finally:
        vars(runtime.thread).update(here)


def _as_caller(
    runtime: FakeRuntime, here: dict[str, Any], modes: list[Any], args: Any, kwargs: Any
) -> Callable[[], Any]:
    """Return the backward pass with what it takes over from the calling thread: modes, and ``here`` the runtime's."""
    stream, grad = runtime.current(), torch.is_grad_enabled()

    def run() -> Any:
        vars(runtime.thread).clear()
        vars(runtime.thread).update(here)
        push_modes(modes)
        try:
            with runtime.using(stream), torch.set_grad_enabled(grad):
                return _run_backward(*args, **kwargs)
        finally:
            pop_user_modes()
            here.update(vars(runtime.thread))

    return run


def _use_device_threads(on: bool) -> None:
    """Have autograd run backward passes on threads of played devices, or as it does by itself."""
    function = _backward_of_device if on else _run_backward
    torch.autograd._engine_run_backward = function  # type: ignore[attr-defined]
    torch.autograd.graph._engine_run_backward = function


class FakeStream:
    """Work in order; what is at ``done`` and beyond is still to do."""

    def __init__(self, runtime: FakeRuntime, name: str) -> None:
        self.runtime, self.name = runtime, name
        self.todo: deque[Callable[[], None]] = deque()
        self.done = 0

    @property
    def end(self) -> int:
        return self.done + len(self.todo)

    def launch(self, work: Callable[[], None]) -> None:
        with self.runtime.lock:
            self.todo.append(work)
            if self.name.startswith("compute"):
                self.catch_up(self.end)  # PyTorch's operators run at once
            self.runtime.stir()

    def catch_up(self, position: int) -> None:
        with self.runtime.lock:
            while self.done < position:
                work = self.todo.popleft()
                self.done += 1
                work()

    def finish(self) -> None:
        self.catch_up(self.end)

    def wait_event(self, event: FakeEvent) -> None:
        if not self.runtime.deaf:
            with self.runtime.lock:
                stream, position = event.stream, event.position
                self.launch(lambda: stream.catch_up(position))


class FakeEvent:
    """Remembers one place in one stream: the last it was recorded at."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime = runtime

    def record(self, stream: FakeStream) -> None:
        with self.runtime.lock:
            self.stream, self.position = stream, stream.end

    def synchronize(self) -> None:
        if not self.runtime.deaf:
            self.stream.catch_up(self.position)


class TimingEvent(FakeEvent):
    """Notes when its stream comes to it."""

    time_s = math.nan

    def record(self, stream: FakeStream) -> None:
        stream.launch(self._note)
        super().record(stream)

    def _note(self) -> None:
        self.time_s = perf_counter()


class Allocator(TensorBytesTracker):
    """Counts what operators make, and refuses to go beyond a limit."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__("cpu")
        self.runtime = runtime
        self.limit_bytes = 1 << 40
        self.cap_bytes: int | None = None
        """The most to reserve; None: up to the limit."""
        self.waste = 0.0
        """What lies in gaps, as a part of what is in use."""
        self.highest_bytes = self.failures = self.kept_bytes = self.most_reserved_bytes = 0

    @property
    def current_bytes(self) -> int:
        return sum([life.bytes for life in list(self._lives.values())])  # for they end on any thread

    @current_bytes.setter
    def current_bytes(self, value: int) -> None:
        """It is counted when it is asked for."""

    def _rise(self, bytes: int) -> None:
        super()._rise(bytes)
        self.highest_bytes = max(self.highest_bytes, self.current_bytes)
        limit = min(self.limit_bytes, self.limit_bytes if self.cap_bytes is None else self.cap_bytes)
        if self.reserved_bytes > limit and bytes > 0:
            self.kept_bytes = 0  # blocks that are kept go first
        if self.reserved_bytes > limit and bytes > 0:
            self.failures += 1
            free = max(0, limit - self.current_bytes + bytes)
            for told in self.runtime.observers:
                told(self.runtime.torch_device.index, bytes, limit, free)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {bytes} bytes")
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)

    @property
    def reserved_bytes(self) -> int:
        """What is in use, and gaps between; what was freed is kept until somebody needs it."""
        self.kept_bytes = max(self.kept_bytes, int(self.current_bytes * (1 + self.waste)))
        return self.kept_bytes


class FakeRuntime:
    """Give it to a `CudaDevice`, and train within ``with runtime:``. ``deaf``: nothing waits for anything.

    ``device_thread``: backward passes run on a thread of the device's own, reentrant ones where they are called;
    False: all of them where they are called.
    """

    name = "a device that the CPU plays"

    def __init__(
        self, seed: int | None = 0, *, deaf: bool = False, watched: bool = True, device_thread: bool = True
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.deaf, self.watched = deaf, watched
        self.lock = RLock()
        self.adopted: set[str] = set()
        """Threads that said that they launch."""
        self._random = Random(seed)
        self._eagerness = 1.0 if seed is None else self._random.choice((0.0, 0.1, 0.7))
        self.streams: list[FakeStream] = []
        self.compute = FakeStream(self, "compute")
        self.thread = local()
        """What each thread has for itself; a backward pass begins with its caller's and hands it back."""
        self.events = self.hosts = self.released = self.unpinned = self.recorded = 0
        self.pinned: dict[int, int] = {}
        """Bytes of each registration of host memory, by address."""
        self.observers: list[Failure] = []
        self.allocator = Allocator(self)
        self.device_thread = device_thread
        self.autograd: ThreadPoolExecutor | None = None
        """The thread that backward passes run on; None: the calling one."""

    def __enter__(self) -> FakeRuntime:
        self.allocator.start()
        if self.device_thread:
            self.autograd = ThreadPoolExecutor(1, DEVICE_THREAD)
            _use_device_threads(True)
        self._outer, _ENTERED.runtime = getattr(_ENTERED, "runtime", None), self
        _EVERY.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _ENTERED.runtime = self._outer
        _EVERY.remove(self)
        if self.autograd is not None:
            self.autograd.shutdown()
            _use_device_threads(any(each.autograd is not None for each in _EVERY))
        self.allocator.stop()
        self.synchronize()

    def stir(self) -> None:
        """Perhaps a copy gets done now."""
        for stream in self.streams:
            if stream.todo and self._random.random() < self._eagerness:
                stream.catch_up(stream.done + 1)

    # Streams.

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream(self, f"copies {len(self.streams)}"))
        return self.streams[-1]

    def current(self) -> FakeStream:
        found: FakeStream = getattr(self.thread, "stream", self.compute)
        return found

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        before, self.thread.stream = self.current(), stream
        stream.catch_up(stream.end)  # for PyTorch's operators run at once
        try:
            yield
        finally:
            self.thread.stream = before

    def bind_thread(self) -> None:
        self.adopted.add(current_thread().name)

    def event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self)

    @property
    def now_s(self) -> float:
        return perf_counter()

    def timing_event(self) -> TimingEvent:
        return TimingEvent(self)

    def elapsed_s(self, first: TimingEvent, second: TimingEvent) -> float:
        return second.time_s - first.time_s

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.catch_up(stream.end)

    # Memory.

    def empty(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def host(self, size_bytes: int, *, pin: bool) -> PinnedArena:
        self.hosts += 1
        return PinnedArena(size_bytes, pin=pin, pinner=FakePinner(self))

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.is_contiguous()
        assert source.is_contiguous()
        to, of, size = target.data_ptr(), source.data_ptr(), source.nbytes
        stream.launch(lambda: ctypes.memmove(to, of, size) and None)

    def used_by(self, tensor: torch.Tensor, stream: Any) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.allocator._lives:  # memory of others it leaves alone
            self.recorded += 1
            weakref.finalize(storage, stream.finish).atexit = False

    def allocated(self) -> Allocated:
        allocator = self.allocator
        return Allocated(allocator.current_bytes, allocator.highest_bytes, allocator.failures, allocator.reserved_bytes)

    def reset_peak(self) -> None:
        self.allocator.highest_bytes = self.allocator.current_bytes

    def free_bytes(self) -> tuple[int, int]:
        return self.allocator.limit_bytes - self.allocator.current_bytes, self.allocator.limit_bytes

    @property
    def cap_bytes(self) -> int | None:
        return self.allocator.cap_bytes

    def set_cap(self, size_bytes: int | None) -> None:
        self.allocator.cap_bytes = size_bytes

    def release_cached(self) -> None:
        self.released += 1
        self.allocator.kept_bytes = 0

    def watch_failures(self, told: Failure) -> None:
        if self.watched:
            self.observers.append(told)


class FakePinner:
    """As CUDA's: unpinning waits for every copy."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime = runtime

    def node(self) -> int | None:
        return None

    def pin(self, address: int, numbytes: int) -> str | None:
        self.runtime.pinned[address] = numbytes
        return None

    def unpin(self, address: int) -> None:
        self.runtime.synchronize()
        del self.runtime.pinned[address]
        self.runtime.unpinned += 1
