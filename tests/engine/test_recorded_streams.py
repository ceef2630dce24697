"""Which copies on CUDA tell PyTorch's allocator of their stream: those of the user's tensors, and no others."""

from __future__ import annotations

import pytest
import torch

import _models as models
from _cases import next_token, tokens
from _fake_cuda import FakeRuntime
from _runs import HOST
from ps_core import AdamW, Budget, Options
from ps_core._plan import Queue
from ps_core.engine import chunked, statistics
from ps_core.engine._devices.cuda.device import CudaDevice


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_copies_by_plan_record_no_streams(precision: str, micro_batches: int) -> None:
    """The allocator knows each block's streams from the start. Order within a block is the engine's matter."""
    runtime = FakeRuntime(6)
    runtime._eagerness = 0.0  # every copy lags until something waits for it
    with runtime:
        model, optimizer = chunked(
            models.Language(tied=True, checkpointing=True, offloading=True), AdamW(), precision=precision,
            device=CudaDevice(runtime), accumulation_steps=micro_batches,
            budget=Budget(device="160KiB", host=HOST), options=Options(group_bytes=2048, poison=True),
        )  # fmt: skip
        assert optimizer is not None

        def steps(indices: range) -> int:
            before = statistics(model).moved_bytes.get("host->device", 0)
            for index in indices:
                for _ in range(micro_batches):
                    next_token(model, *tokens(index)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return statistics(model).moved_bytes["host->device"] - before

        steps(range(3))
        runtime.recorded, planned = 0, statistics(model).planned_passes
        assert steps(range(3, 6)) > 0
        assert statistics(model).planned_passes == planned + 3 * micro_batches
        assert runtime.recorded == 0


def test_copies_of_other_memory_record_their_stream() -> None:
    """A tensor of the user's is not freed before its copy is done; nor is a block of the engine's."""
    runtime = FakeRuntime()
    runtime._eagerness = 0.0
    with runtime:
        device = CudaDevice(runtime)
        block = device.arena(128)
        assert runtime.recorded == 3, "copies up, copies down, collectives"
        above, below = device.host(128).fill_(7), device.host(128).zero_()
        device.copy(Queue.H2D, block, above)
        assert runtime.recorded == 3
        users = torch.full((128,), 9, dtype=torch.uint8)
        device.copy(Queue.D2H, below, users)
        assert runtime.recorded == 4
        up, down = (runtime.streams[place] for place in (0, 1))
        assert up.todo
        assert not below.any()
        del users
        assert below.eq(9).all(), "its memory is used again only now"
        assert up.todo
        del block
        assert not up.todo
        assert not down.todo
