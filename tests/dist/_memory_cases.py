"""Shared memory on each rank of a crew; each function asserts in its own process."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import ps_dist
from _crew import exit_status
from ps_core import AdamW, Budget
from ps_core._errors import InvalidInput, RanksDiverged
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_dist._shared_messages import STAGING_BYTES, SharedMessages

PAGE = os.sysconf("SC_PAGE_SIZE")


def transport(each: ps_dist.TorchCollectives) -> tuple[str, str]:
    """What data travels by, and why not through shared memory."""
    return each.statistics().transport, each.why_not_shared


def lacks(each: ps_dist.TorchCollectives, what: str, at_rank: int) -> None:
    """A system call fails on one rank: all use sockets and know why, or all raise it."""

    def refuse(*args: Any) -> None:
        raise OSError(1, "Operation not permitted")

    with pytest.MonkeyPatch.context() as patch:
        if each.process == at_rank:
            patch.setattr(what, refuse)
        why = f"shared memory failed on rank {at_rank}: [Errno 1] Operation not permitted"
        with ps_dist.connect(timeout_s=30) as other:
            assert transport(other) == ("gloo", why)
            assert other.host_memory is None
            assert other.all_reduce_sum(1.0) == other.ranks
        with pytest.raises(InvalidInput) as caught:
            ps_dist.connect(timeout_s=30, shared_memory=True)
        assert str(caught.value) == f"shared_memory=True: {why}; leave it out: then processes use sockets"
    with ps_dist.connect(timeout_s=30, shared_memory=True) as other:
        assert transport(other) == ("shared", "")


def differ(each: ps_dist.TorchCollectives) -> None:
    with pytest.raises(RanksDiverged, match=r"shared_memory must be the same on all ranks: rank . has"):
        ps_dist.connect(timeout_s=30, shared_memory=False if each.process else None)


def used_in_a_fork(each: ps_dist.TorchCollectives, what: str) -> None:
    """A fork, whose memory is this process's, cannot change it; gradients lie over weights meanwhile."""
    torch.manual_seed(0)
    model, optimizer = chunked(nn.Linear(64, 64), AdamW(), precision="bf16", collectives=each)
    assert optimizer is not None
    uses = {"forget": optimizer.zero_grad, "release": lambda: release(model), "step": optimizer.step}
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        before = [group.chunks[group.weight].home.memory.clone() for group in hooks_of(model).engine.groups]
        child = os.fork()
        if not child:
            try:
                uses[what]()
            except InvalidInput as error:
                os._exit(42 if "whose host memory other ranks read" in str(error) else 1)
            finally:  # whatever happened, the child goes no further
                os._exit(2)
        assert exit_status(child) == 42
        after = [group.chunks[group.weight].home.memory for group in hooks_of(model).engine.groups]
        assert all(map(torch.equal, before, after))
        optimizer.step()
        optimizer.zero_grad()
    release(model)


def heap_bytes(each: ps_dist.TorchCollectives) -> int:
    """Bytes of this rank's heap that have an owner."""
    assert isinstance(each._messages, SharedMessages)
    heap = each._messages.heap
    return heap.size_bytes - sum(end - start for start, end in heap._free)


def counted(each: ps_dist.TorchCollectives, device: str, folder: str) -> None:
    """All memory that the budget counts is in the heap, once, and goes back with the model."""
    before = heap_bytes(each)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"device": "4MiB"} if device == "emulated" else {}
    if folder:
        sizes |= {"disk": "64MiB", "disk_dir": folder}
    model, optimizer = chunked(
        nn.Sequential(*(nn.Linear(90, 90) for _ in range(6))),
        AdamW(lr=1e-2),
        device=device,
        precision="bf16",
        budget=Budget(host=each.local_ranks * 2**23, **sizes),
        collectives=each,
    )
    for _ in range(3):
        model(torch.randn(4, 90)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    tiers = {name: tier for name, tier in statistics(model).tiers.items() if name != "disk"}
    engine = hooks_of(model).engine
    slots = len(engine.groups) * 8 + 8
    arena = engine.store.arena.taken_bytes if engine.store.arena.exists else 0
    wanted = arena + sum(tier.current_bytes for name, tier in tiers.items() if not (arena and name == first(tiers)))
    found = heap_bytes(each) - before
    assert wanted <= found <= wanted + slots * PAGE + STAGING_BYTES
    release(model)
    del model, optimizer, engine
    assert heap_bytes(each) - before <= STAGING_BYTES + PAGE


def first(tiers: dict[str, Any]) -> str:
    return next(iter(tiers))


KEPT: list[torch.Tensor] = []
"""Shared memory that a process has until it ends."""


def fills(each: ps_dist.TorchCollectives, size: int) -> int:
    """Write to so much of the heap, which a neighbour reads; the process's number."""
    assert each.host_memory is not None
    mine = each.host_memory(size).fill_(each.rank + 1)
    whole = each.host_memory(size * each.ranks)
    each.all_gather(whole, mine)
    KEPT.extend((mine, whole))
    return os.getpid()


def maps_no_weights(each: ps_dist.TorchCollectives, at_rank: int) -> tuple[bool, bool]:
    """Train where one rank cannot map the file; return whether weights are mapped, and whether they changed."""

    def refuse(*args: Any) -> None:
        raise OSError(1, "Operation not permitted")

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        if each.process == at_rank:
            patch.setattr("ps_core.engine._sharding.join_ranks.CommonMemory", refuse)
        model, optimizer = chunked(nn.Linear(64, 64), AdamW(), precision="fp32", collectives=each)
    assert optimizer is not None
    before = [value.clone() for value in model.state_dict().values()]
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    maps = all(group.common is not None for group in hooks_of(model).engine.groups)
    release(model)
    return maps, not any(map(torch.equal, before, model.state_dict().values()))


def open_files(each: ps_dist.TorchCollectives) -> int:
    """Make and release a model; return how many of the kernel's anonymous files are open then."""
    maps_no_weights(each, -1)
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # a connection of another thread, which is closed by now
            found += "memfd:" in os.readlink(f"/proc/self/fd/{name}")
    return found
