"""Passes on other streams than the one before: ``with torch.cuda.stream(s): ...`` around each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import _models as models
from _cases import finish, next_token, tokens
from _checked_cuda import CheckedCuda
from _fake_cuda import FakeRuntime, FakeStream
from _runs import HOST
from ps_core import AdamW, Budget, Options
from ps_core._plan import Queue
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice

STEPS = 6


def losses(runtime: FakeRuntime, device: Any, size: str, step: str, *, other_streams: bool) -> list[torch.Tensor]:
    """Train; with ``other_streams`` each step is on another stream than the one before, and its update on a third."""
    torch.manual_seed(0)
    streams = [FakeStream(runtime, f"compute {index}") for index in range(2)] if other_streams else []
    found = []
    model, optimizer = chunked(
        models.Language(tied=True), AdamW(lr=0.01), precision="bf16", device=device,
        budget=Budget(device=size, host=HOST), options=Options(group_bytes=2048, poison=True, step=step),
    )  # fmt: skip
    for index in range(STEPS):
        now = streams[index % 2] if streams else runtime.compute
        with runtime.using(now):
            loss = next_token(model, *tokens(index))
            loss.backward()
            if index % 3 == 1:
                finish(optimizer)
        if index % 3 != 1:
            finish(optimizer)
        found.append(loss.detach())
    assert statistics(model).planned_passes >= 3
    release(model)
    return found


@contextmanager
def deaf_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An ordering bug: a stream that comes to compute does not wait for the one before."""

    def current(device: CudaDevice, queue: Queue) -> Any:
        if queue is not Queue.COMPUTE:
            return device._streams[queue]
        device._compute = device._runtime.current()
        return device._compute

    with monkeypatch.context() as patch:
        patch.setattr(CudaDevice, "_stream", current)
        yield


@pytest.mark.parametrize("size", ["160KiB", "8MiB"])
@pytest.mark.parametrize("step", ["after_backward", "in_backward"])
def test_each_step_may_run_on_another_stream(size: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRuntime(2) as runtime:
        right = losses(runtime, CudaDevice(runtime), size, step, other_streams=False)
    with FakeRuntime(2) as runtime:
        device = CheckedCuda(runtime)
        assert all(map(torch.equal, right, losses(runtime, device, size, step, other_streams=True)))
        assert device.unordered == set()
    with FakeRuntime(2) as runtime, deaf_streams(monkeypatch):
        device = CheckedCuda(runtime)
        losses(runtime, device, size, step, other_streams=True)
        assert device.unordered, "the checker sees a wait that is left out"


@pytest.mark.parametrize("made_on_it", [False, True])
def test_freed_memory_is_not_reused_before_each_stream_that_computed_with_it(made_on_it: bool) -> None:
    """PyTorch's allocator knows of the stream on which a block was made, and of others only what it is told."""
    runtime = FakeRuntime()
    runtime._eagerness = 0.0
    with runtime:
        device = CudaDevice(runtime)
        first, second = runtime.stream(), runtime.stream()
        with runtime.using(first if made_on_it else runtime.compute):
            block = device.arena(128)
        for stream in (first, second):
            with runtime.using(stream):
                device.declare_access(Queue.COMPUTE, "a pass", (block,), ())
                stream.launch(lambda: None)  # which lags
        assert second.todo
        del block
        assert not second.todo
