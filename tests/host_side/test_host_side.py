"""The engine on PyTorch for CUDA without a card: names, types and orders of calls are real, and copies move bytes.

Kernels do nothing, so values that were computed mean nothing, and nothing is said of them. ``nox -s host_side`` makes
the libraries that stand in for CUDA's, and starts this on them.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ps_core import SGD, AdamW, Budget, DeviceOutOfMemory, Options, TorchOptimizer
from ps_core._plan import Queue
from ps_core._simulate.machine import MACHINES
from ps_core.engine import chunked, profiled, release, statistics
from ps_core.engine._calibration.engine_overhead import Launching
from ps_core.engine._calibration.probes import collect
from ps_core.engine._devices.cuda.device import CudaDevice, cuda_device
from ps_core.engine._devices.host_pool import _pages

MIB = 1 << 20
HOST = "64MiB"
REGISTERED, UNREGISTERED, COPIED, LAUNCHED = range(4)

THERE = torch.version.cuda is not None and torch.cuda.is_available() and torch.cuda.get_device_name() == "no card"
pytestmark = [
    pytest.mark.skipif(not THERE, reason="not on libraries that stand in for CUDA's"),
    pytest.mark.filterwarnings("default"),
]


def count(which: int) -> int:
    return int(ctypes.CDLL("libcudart.so.13").standin_count(which))


class Model(nn.Module):
    """Returns its loss; it may ask for more memory than there is, and notes the thread of its backward pass."""

    def __init__(self, blocks: int = 6, width: int = 128) -> None:
        super().__init__()
        self.table = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks))
        self.appetite = 0
        self.threads: set[str] = set()
        for parameter in self.parameters():
            nn.init.zeros_(parameter)  # or what lies in memory, and no kernel overwrites, may not be finite

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        if self.appetite:
            torch.empty(self.appetite, dtype=torch.uint8, device="cuda")
        if x.requires_grad:
            x.register_hook(lambda _: self.threads.add(threading.current_thread().name))
        return x.float().square().mean()


@pytest.fixture(scope="module", autouse=True)
def warm_up() -> None:
    """Let libraries take their workspaces, on the thread of backward too, before the engine counts."""
    for kind in (torch.float32, torch.bfloat16, torch.float16) if THERE else ():
        Model().to("cuda", kind)(torch.zeros(4, 8, dtype=torch.long, device="cuda")).backward()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A machine whose processor steps in no time, so that plans have it step."""
    file = tmp_path_factory.mktemp("machine") / "host.toml"
    slow_links = replace(MACHINES["h200"], name="host", h2d_bandwidth=1e9, d2h_bandwidth=1e9, host_bandwidth=1e13)
    file.write_text(slow_links.to_toml(), "utf-8")
    return str(file)


@contextmanager
def managed(
    size: str, spec: Any = None, *, step: str = "after_backward", steps_on: str | None = None, **more: Any
) -> Iterator[tuple[Any, Any]]:
    """``steps_on``: where plans have most groups stepped, by the rates that they are made for."""
    options = Options(group_bytes=40_000, step=step, machine=steps_on)
    made = chunked(
        Model(), spec or AdamW(), device="cuda", budget=Budget(device=size, host=HOST), options=options, **more
    )
    try:
        yield made
    finally:
        release(made[0])


def train(model: Any, optimizer: Any, steps: int, micro_batches: int = 1) -> None:
    for _ in range(steps):
        for _ in range(micro_batches):
            optimizer.scale(model(torch.zeros(4, 8, dtype=torch.long, device="cuda"))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("size", ["300KiB", "16MiB"])
@pytest.mark.parametrize(
    ("precision", "micro_batches", "clip"), [("bf16", 1, 1.0), ("bf16", 2, None), ("fp16", 1, 1.0), ("fp32", 2, 1.0)]
)
def test_training_follows_its_plan(
    precision: str, micro_batches: int, clip: float | None, size: str, host: str
) -> None:
    size = "600KiB" if precision == "fp32" and size == "300KiB" else size
    told = {"precision": precision, "max_grad_norm": clip, "accumulation_steps": micro_batches}
    with managed(size, steps_on=host if clip else None, **told) as (model, optimizer):
        train(model, optimizer, 3, micro_batches)
        before = count(REGISTERED), count(UNREGISTERED)
        copied, launched = count(COPIED), count(LAUNCHED)
        train(model, optimizer, 5, micro_batches)
        assert count(UNREGISTERED) == before[1], "nothing is unpinned between steps"
        assert count(REGISTERED) <= before[0] + 1, "one more where a worker let go of a block late"
        assert count(LAUNCHED) > launched
        found = statistics(model)
        assert (found.divergences, found.steps) == (0, 8)
        assert found.planned_passes >= 7 * micro_batches
        if size != "16MiB":
            assert count(COPIED) > copied
            assert found.evictions > 0
        assert all(name != threading.main_thread().name for name in model.threads), "autograd has a thread for it"


@pytest.mark.parametrize("size", ["300KiB", "16MiB"])
def test_steps_within_backward(size: str, host: str) -> None:
    with managed(size, precision="bf16", step="in_backward", steps_on=host) as (model, optimizer):
        train(model, optimizer, 5)
        assert statistics(model).planned_passes >= 4


def test_an_optimizer_of_pytorch_and_one_without_moments() -> None:
    for spec in (TorchOptimizer(torch.optim.RMSprop, lr=1e-3), SGD(lr=0.1)):
        with managed("300KiB", spec, precision="bf16") as (model, optimizer):
            train(model, optimizer, 3)
            assert statistics(model).steps == 3


def test_a_profile_has_times_of_real_events(host: str) -> None:
    with managed("700KiB", precision="bf16", steps_on=host) as (model, optimizer):
        train(model, optimizer, 3)
        with profiled(model) as seen:
            train(model, optimizer, 3)
    assert seen.steps == 3
    assert {piece.queue for piece in seen.measured} >= {Queue.COMPUTE, Queue.H2D, Queue.D2H, Queue.CPU}
    assert all(piece.end_s >= piece.begin_s >= 0 for piece in seen.measured)
    names = [sorted(piece.name for piece in pieces) for pieces in (seen.measured, seen.planned)]
    assert names[0] == names[1]


def test_memory_that_runs_out_is_the_engines_own_error_and_training_goes_on() -> None:
    with managed("2MiB", precision="bf16") as (model, optimizer):
        train(model, optimizer, 3)
        model.appetite = 4 << 30
        with pytest.raises(DeviceOutOfMemory, match=r"CUDA out of memory\. Tried to allocate") as caught:
            train(model, optimizer, 1)
        assert isinstance(caught.value, torch.OutOfMemoryError)
        del caught
        optimizer.zero_grad()
        model.appetite = 0
        train(model, optimizer, 3)
        assert statistics(model).steps == 6


def test_host_memory_is_pinned_in_one_registration_and_copies_move_bytes() -> None:
    device = cuda_device("cuda", pin=True)
    before = count(REGISTERED)
    sizes = [_pages(1), MIB, 3 * MIB]
    device.prepare_host(sizes)
    blocks = [device.host(size) for size in sizes]
    assert count(REGISTERED) == before + 1
    assert all(block.is_pinned() for block in blocks)
    up, down = blocks[1].random_(0, 256), blocks[2][:MIB]
    there = device.arena(MIB)
    device.copy(Queue.H2D, there, up)
    device.wait(Queue.D2H, device.record(Queue.H2D))
    device.copy(Queue.D2H, down, there)
    device.wait(Queue.CPU, device.record(Queue.D2H))
    assert torch.equal(up, down)
    undone = count(UNREGISTERED)
    del blocks, up, down
    device.close()
    gc.collect()
    assert count(UNREGISTERED) == undone + 1


def test_the_allocator_is_read_as_it_counts() -> None:
    device: CudaDevice = cuda_device("cuda:0", pin=True)
    tracker = device.nonmodel_bytes()
    tracker.start()
    arena = device.arena(8 * MIB)
    assert tracker.current_bytes == 0, "the engine's own"
    held = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    del held
    assert tracker.current_bytes == 0
    assert tracker.take_peak() == 3 * MIB
    free, whole = device.memory_bytes()
    assert whole == torch.cuda.mem_get_info()[1] >= free > 0
    assert arena.is_cuda
    device.close()


def test_launches_are_timed() -> None:
    """A GPU's calibration times the host's work for an operator, and the engine's for a tensor."""
    with sdpa_kernel(SDPBackend.MATH):  # others choose kernels by the GPU's kind
        launching = Launching("cuda")
        collect([launching.probes], 5)
    launch_s, tensor_s = launching.fit()
    assert 1e-6 < launch_s < 1e-2
    assert 0 <= tensor_s < 1e-2
