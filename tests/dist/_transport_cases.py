"""What every rank of a crew does; each function asserts in its own process."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from threading import Event, Thread, get_ident
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ps_dist
from _crew import exit_status
from ps_core._collectives import Collectives
from ps_core._errors import InvalidInput, RanksDiverged

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def drawn(rank: int, numel: int, kind: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What a rank holds; every rank can draw every other's."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(kind)


def expected_sum(each: ps_dist.TorchCollectives, numel: int, kind: torch.dtype, seed: int) -> torch.Tensor:
    """In single precision: first over the ranks of each copy, in rank order, then over the copies."""
    mine = slice(each.rank * numel, (each.rank + 1) * numel)
    whole = numel * each.ranks
    totals = []
    for copy in range(each.mesh.copies):
        total = torch.zeros(numel)
        for rank in range(copy * each.ranks, (copy + 1) * each.ranks):
            total += drawn(rank, whole, kind, seed)[mine].float()
        totals.append(total)
    result = totals[0]
    for total in totals[1:]:
        result = result + total
    return result


def gathers(each: ps_dist.TorchCollectives, numel: int, kind: str, seed: int) -> int:
    """All-gather, with the shard elsewhere and with the shard in place; the bytes received."""
    dtype, peers = KINDS[kind], each.mesh.shard_peers
    wanted = torch.cat([drawn(rank, numel, dtype, seed) for rank in peers])
    before = each.statistics().wire_bytes.get("all_gather", 0)
    whole = torch.full((each.ranks * numel,), math.nan, dtype=dtype)
    each.all_gather(whole, drawn(each.mesh.rank, numel, dtype, seed))
    assert torch.equal(whole, wanted)
    again = torch.full((each.ranks * numel,), math.nan, dtype=dtype)
    place = again[each.rank * numel : (each.rank + 1) * numel]
    place.copy_(drawn(each.mesh.rank, numel, dtype, seed))
    each.all_gather(again, place)
    assert torch.equal(again, wanted)
    return each.statistics().wire_bytes["all_gather"] - before


def reduces(each: ps_dist.TorchCollectives, numel: int, kind: str, pieces: int, seed: int) -> dict[str, int]:
    """Reduce-scatter into both types with scratch for so many pieces; the bytes received for one of them."""
    dtype = KINDS[kind]
    source = drawn(each.mesh.rank, numel * each.ranks, dtype, seed)
    kept, wanted = source.clone(), expected_sum(each, numel, dtype, seed)
    room = max(each.scratch_bytes(numel, dtype) // pieces, each.scratch_bytes(64, dtype))
    spent: dict[str, int] = {}
    for into in (torch.full((numel,), math.nan, dtype=dtype), torch.full((numel,), math.nan)):
        scratch = torch.full((room + 128,), 0xFF, dtype=torch.uint8)
        before = each.statistics().wire_bytes
        each.start_reduce_scatter(into, source, scratch[:room]).wait()
        after = each.statistics().wire_bytes
        assert torch.equal(into, wanted.to(into.dtype))
        assert bool((scratch[room:] == 0xFF).all()), "nothing is written beyond the scratch"
        assert torch.equal(source, kept), "the source stays as it was"
        spent = {name: after[name] - before.get(name, 0) for name in ("reduce_scatter", "replicate") if name in after}
    each.reduce_scatter(into, source)
    assert torch.equal(into, wanted.to(into.dtype))
    return spent


def in_inference_mode(each: ps_dist.TorchCollectives) -> None:
    """Buffers that were made in inference mode are written like others."""
    with torch.inference_mode():
        for numel in (1, 192, 32_768 + 5):
            gathers(each, numel, "bf16", 1)
            reduces(each, numel, "bf16", 2, 2)


def under_other_defaults(each: ps_dist.TorchCollectives) -> None:
    """What the program takes tensors to be, while it connects and later, changes nothing."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with ps_dist.connect(timeout_s=30) as other:
            torch.set_default_dtype(torch.float64)
            with torch.device("meta"):
                other.barrier()
            torch.set_default_dtype(torch.float32)
            reduces(other, 192, "bf16", 1, 5)
    finally:
        torch.set_default_dtype(torch.float32)
    each.barrier()


def in_a_copy(each: ps_dist.TorchCollectives) -> None:
    """A fork is in no group; it says so, and leaves this one alone."""
    child = os.fork()
    if not child:
        try:
            each.barrier()
        except InvalidInput as error:
            each.close()
            os._exit(42 if "a copy (fork) of rank" in str(error) else 1)
        finally:  # whatever happened, the child goes no further
            os._exit(1)
    assert exit_status(child) == 42
    each.barrier()


def joined_anew(each: ps_dist.TorchCollectives) -> None:
    """Who closes first, though it initialised the default group, leaves it to the others; the last takes it down."""
    second = ps_dist.connect(timeout_s=30)
    each.close()
    second.barrier()
    third = ps_dist.connect(timeout_s=30)
    second.close()
    third.barrier()
    reduces(third, 192, "bf16", 1, 5)
    assert dist.is_initialized()
    third.close()
    assert not dist.is_initialized()


def scalars(each: ps_dist.TorchCollectives) -> None:
    """Numbers, not-a-numbers and infinities."""
    rank, size = each.mesh.rank, each.mesh.size
    values = [0.1 * (other + 1) for other in range(size)]
    assert each.all_reduce_sum(values[rank]) == sum(values)
    assert each.all_reduce_max(-values[rank]) == -0.1
    assert each.all_values([rank, 7.0]) == [[float(other), 7.0] for other in range(size)]
    assert each.all_values([rank], shards_only=True) == [[float(other)] for other in each.mesh.shard_peers]
    for bad in range(size):
        assert math.isnan(each.all_reduce_max(math.nan if rank == bad else 1.0))
        assert each.all_reduce_max(math.inf if rank == bad else 1.0) == math.inf


def refusals(each: ps_dist.TorchCollectives) -> None:
    """Refused alike everywhere, before anything is sent or entered."""
    ranks, before = each.ranks, each.statistics()
    with pytest.raises(InvalidInput, match=f"expected {ranks} shards of 3 elements, found 5 elements"):
        each.all_gather(torch.empty(5), torch.empty(3))
    with pytest.raises(InvalidInput, match="one-dimensional and contiguous"):
        each.all_gather(torch.empty(ranks, 3), torch.empty(3))
    with pytest.raises(InvalidInput, match="one-dimensional and contiguous"):
        each.reduce_scatter(torch.empty(6)[::2], torch.empty(3 * ranks))
    with pytest.raises(InvalidInput, match=r"into is torch.float32 but shard is torch.float16"):
        each.all_gather(torch.empty(3 * ranks), torch.empty(3, dtype=torch.float16))
    with pytest.raises(InvalidInput, match="a buffer is on meta; expected cpu"):
        each.reduce_scatter(torch.empty(3), torch.empty(3 * ranks, device="meta"))
    if each.scratch_bytes(128, torch.float32):  # what is read in shared memory needs none
        small = torch.empty(64 * 4 * (ranks - 1) - 1, dtype=torch.uint8)
        few = f"scratch of {small.numel()} bytes, expected at least {small.numel() + 1}"
        with pytest.raises(InvalidInput, match=few):
            each.start_reduce_scatter(torch.empty(128), torch.empty(128 * ranks), small)
    with pytest.raises(InvalidInput, match=r"scratch is torch.float32, expected contiguous torch.uint8"):
        each.start_reduce_scatter(torch.empty(3), torch.empty(3 * ranks), torch.empty(900))
    assert each.statistics() == before


def overlaps(each: ps_dist.TorchCollectives) -> list[str]:
    """Many begun before any is over: done in order, by another thread, while this one computes."""
    assert isinstance(each, Collectives)
    numel, size, rank = 1 << 16, each.mesh.size, each.mesh.rank
    shards = [torch.full((numel,), float(rank + 10 * index)) for index in range(6)]
    wholes = [torch.zeros(numel * size) for _ in shards]
    on_way = [
        each.start_all_gather(whole, shard, f"group {index}")
        for index, (whole, shard) in enumerate(zip(wholes, shards, strict=True))
    ]
    into, source = torch.zeros(numel), torch.full((numel * size,), 2.0, dtype=torch.bfloat16)
    reduced = each.start_reduce_scatter(into, source, what="group 0")
    computed = torch.ones(64, 64) @ torch.ones(64, 64)
    reduced.wait()
    assert all(pending.done for pending in on_way), "what was begun earlier ended earlier"
    for index, whole in enumerate(wholes):
        assert torch.equal(whole.view(size, -1)[:, 0], torch.arange(size) + 10.0 * index)
    assert float(computed[0, 0]) == 64
    assert torch.equal(into, torch.full((numel,), 2.0 * size))
    assert get_ident() == main_thread()
    return each.recent()[-7:]


def main_thread() -> int:
    import threading

    found = threading.main_thread().ident
    assert found is not None
    return found


def agrees(each: ps_dist.TorchCollectives) -> None:
    """The same everywhere is fine; a difference is told to all, with who has what."""
    each.agree("the layout", "abc")
    value = "12 groups" if each.mesh.rank else "13 groups"
    with pytest.raises(RanksDiverged) as caught:
        each.agree("the layout", value)
    others = ", ".join(str(rank) for rank in range(1, each.mesh.size))
    assert str(caught.value) == (
        f"the layout must be the same on all ranks, found: 13 groups (rank 0); 12 groups (rank {others})"
    )
    each.agree("the layout", "abc")


def parts(each: ps_dist.TorchCollectives, at_rank: int) -> str:
    """One rank does something else; what all are told."""
    shard, whole = torch.zeros(4), torch.zeros(4 * each.ranks)
    each.all_gather(whole, shard, "layer 1")
    other = each.mesh.rank == at_rank
    each._history.add("forward of layer 3" if other else "forward of layer 2")
    with pytest.raises(RanksDiverged) as caught:
        each.all_gather(whole, shard, "the head")
    with pytest.raises(RanksDiverged, match="do different things"):
        each.barrier()  # nothing goes any more
    return str(caught.value)


def lags(each: ps_dist.TorchCollectives) -> str:
    """Rank 1 comes once rank 0 has given up; rank 0 is told who is missed, rank 1 that it came too late."""
    store: Any = each._watchdog._store
    into, shard = torch.zeros(each.ranks), torch.zeros(1)
    if each.mesh.rank == 0:
        with pytest.raises(RanksDiverged) as caught:
            each.all_gather(into, shard, "layer 1")
        store.set("rank 0 gave up", "")
        return str(caught.value)
    deadline = time.monotonic() + 120
    while not store.check(["rank 0 gave up"]):  # waiting within the store would keep it from the watchdog
        assert time.monotonic() < deadline, "rank 0 did not give up"
        time.sleep(0.05)
    with suppress(RanksDiverged):  # what rank 0 had sent may still complete it
        each.all_gather(into, shard, "layer 1")
    with pytest.raises(RanksDiverged) as caught:
        each.all_gather(into, shard, "layer 2")
    return str(caught.value)


def stuck(each: ps_dist.TorchCollectives) -> str:
    """Rank 1's job waits for something of its own, and comes to no collective; both are told who is missed."""
    never = Event()
    wait = each.barrier if each.mesh.rank == 0 else each.start(lambda session: never.wait(60)).wait
    with pytest.raises(RanksDiverged) as caught:
        wait()
    never.set()
    return str(caught.value)


def leave_amid_different_work(each: ps_dist.TorchCollectives) -> float:
    """Begin a collective that differs on each rank, and leave without waiting for it; return the seconds of leaving."""
    other = ps_dist.connect(timeout_s=60)
    whole, shard = torch.zeros(each.ranks), torch.zeros(1)
    other.start_all_gather(whole, shard, f"layer {each.mesh.rank}")
    begun_s = time.monotonic()
    other.close()
    return time.monotonic() - begun_s


def given_up(each: ps_dist.TorchCollectives) -> bool:
    """Whether another rank has written why."""
    store: Any = each._watchdog._store
    return bool(store.check(["exit message"]))


def answers_until_all_leave(each: ps_dist.TorchCollectives) -> None:
    """Rank 0 closes its connection first; rank 1 still gets an answer for a shard."""
    other = ps_dist.connect(timeout_s=30)
    ask = other.serve(lambda group, steps: torch.full((4,), 10 * each.process + group, dtype=torch.uint8))
    if each.process == 0:
        leaving = Thread(target=other.close)
        leaving.start()
        leaving.join(0.3)  # by then it would have left, if it did not wait
        each.barrier()
        leaving.join()
    else:
        each.barrier()
        assert [shard.tolist() for shard in ask(3, 0)] == [[3] * 4, [13] * 4]
        other.close()
