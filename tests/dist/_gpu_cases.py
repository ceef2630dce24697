"""Ranks on CUDA devices (or on one that the CPU plays) against a plain loop that holds everything on one."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch

import _on_cuda as on
import ps_dist
import ps_kernels
from _fake_cuda import FakeRuntime
from _states import masters_of
from ps_core import Budget, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._sharding.collective_streams import StreamCollectives


def card(rank: int) -> int:
    """A card of its own for each process, as far as there are as many."""
    return 0 if on.FAKE else rank % torch.cuda.device_count()


def new_device(rank: int, *, late: bool) -> CudaDevice:
    """On this process's card; ``late``: copies take their time now and then."""
    if on.FAKE:
        return CudaDevice(FakeRuntime(rank + 3))
    index = card(rank)
    torch.cuda.set_device(index)
    torch.use_deterministic_algorithms(True, warn_only=True)
    return CudaDevice(on.Slow(rank, index) if late else on.TorchRuntime(index))


def warm(each: ps_dist.TorchCollectives) -> None:
    """What is compiled on the spot, and takes a while, before anybody waits for another."""
    if not on.FAKE:
        new_device(each.mesh.rank, late=False)
        ps_kernels.warm()
        on.warm_up()


def transport(each: ps_dist.TorchCollectives) -> str:
    """What memory travels by."""
    return each.statistics().transport


def as_a_plain_loop(each: ps_dist.TorchCollectives, precision: str, size: str, late: bool) -> dict[str, int]:
    """Bit for bit; what the ranks' parts come to in one process that adds them in rank order. What was moved."""
    rank, ranks = each.mesh.rank, each.mesh.size
    device = new_device(rank, late=late)
    runtime: Any = device._runtime
    torch.manual_seed(3)
    model = on.Model(checkpointing=True)
    with runtime if on.FAKE else nullcontext():
        made, optimizer = chunked(
            model, on.ADAMW, device=device, budget=Budget(device=size, host="1GiB"), precision=precision,
            collectives=each, options=Options(group_bytes=32 * 1024, poison=True),
        )  # fmt: skip
        assert optimizer is not None
        if ranks > 1:  # one process has no collectives to order
            assert isinstance(made.table.weight._owner.residency.ordering, StreamCollectives)
        losses, norms = [], []
        for step in range(on.STEPS):
            loss = made(on.batch(10 * step + rank).to(device.torch_device))
            optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            norms.append(optimizer.last_norm)
        masters = [value.flatten() for value in masters_of(optimizer.state_dict(masters=True)).values()]
        moved = dict(statistics(made).moved_bytes)
        for tier in statistics(made).tiers.values():
            assert tier.peak_bytes <= tier.budget_bytes
        release(made)
    plain = on.train_plain(on.ADAMW, precision, max_grad_norm=None, micro_batches=ranks, rounds=precision != "fp32")
    assert rank < ranks - 1 or losses == plain.losses
    for mine, theirs in zip(norms, plain.norms, strict=True):
        assert math.isclose(mine or 0.0, theirs or 0.0, rel_tol=1e-5)
    assert len(masters) == len(plain.values)
    for index, (mine, theirs) in enumerate(zip(masters, plain.values.values(), strict=True)):
        assert torch.equal(mine, theirs.flatten()), f"master {index}"
    return moved
