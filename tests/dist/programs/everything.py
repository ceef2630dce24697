"""Every collective, against what it means."""

import math

import pytest
import torch
import torch.distributed as dist

import ps_dist
from ps_core._collectives import Collectives
from ps_core._errors import InvalidInput

KINDS = (torch.bfloat16, torch.float16, torch.float32)
LONG = 131_072 + 5


def drawn(rank: int, numel: int, kind: torch.dtype) -> torch.Tensor:
    """What a rank holds; every rank can draw every other's."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(kind)


def gathers(each: ps_dist.TorchCollectives) -> None:
    for kind in KINDS:
        whole = torch.empty(each.ranks * 7, dtype=kind)
        each.all_gather(whole, drawn(each.rank, 7, kind))
        assert torch.equal(whole, torch.cat([drawn(rank, 7, kind) for rank in range(each.ranks)]))


def reduces(each: ps_dist.TorchCollectives, numel: int) -> None:
    mine = slice(each.rank * numel, (each.rank + 1) * numel)
    for kind in KINDS:
        source = drawn(each.rank, numel * each.ranks, kind)
        total = torch.zeros(numel)
        for rank in range(each.ranks):
            total += drawn(rank, numel * each.ranks, kind)[mine].float()
        for into in (torch.empty(numel, dtype=kind), torch.empty(numel)):
            each.reduce_scatter(into, source)
            assert torch.equal(into, total.to(into.dtype))
        assert torch.equal(source, drawn(each.rank, numel * each.ranks, kind)), "the source stays as it was"


def scalars(each: ps_dist.TorchCollectives) -> None:
    values = [0.1 * (rank + 1) for rank in range(each.ranks)]
    assert each.all_reduce_sum(values[each.rank]) == sum(values)
    assert each.all_reduce_max(-values[each.rank]) == -0.1
    for bad in range(each.ranks):
        assert math.isnan(each.all_reduce_max(math.nan if each.rank == bad else 1.0))
        assert each.all_reduce_max(math.inf if each.rank == bad else 1.0) == math.inf


def refusals(each: ps_dist.TorchCollectives) -> None:
    """Refused alike everywhere, before anything is sent."""
    ranks = each.ranks
    with pytest.raises(InvalidInput, match=f"expected {ranks} shards of 3 elements, found 5 elements"):
        each.all_gather(torch.empty(5), torch.empty(3))
    with pytest.raises(InvalidInput, match="one-dimensional and contiguous"):
        each.all_gather(torch.empty(ranks, 3), torch.empty(3))
    with pytest.raises(InvalidInput, match="one-dimensional and contiguous"):
        each.reduce_scatter(torch.empty(6)[::2], torch.empty(3 * ranks))
    with pytest.raises(InvalidInput, match=r"into is torch.float32 but shard is torch.float16"):
        each.all_gather(torch.empty(3 * ranks), torch.empty(3, dtype=torch.float16))
    with pytest.raises(InvalidInput, match="expected one device"):
        each.reduce_scatter(torch.empty(3), torch.empty(3 * ranks, device="meta"))


def main() -> None:
    each = ps_dist.connect(timeout_s=30)
    assert isinstance(each, Collectives)
    assert (each.rank, each.ranks) == (dist.get_rank(), dist.get_world_size())
    gathers(each)
    reduces(each, 64)
    reduces(each, LONG)
    scalars(each)
    refusals(each)
    each.barrier()
    guest = ps_dist.connect(timeout_s=30)
    guest.close()
    assert dist.is_initialized(), "a group that was there already is not taken down"
    with pytest.raises(InvalidInput, match="has left the group"):
        guest.barrier()
    each.barrier()
    each.close()
    each.close()
    assert not dist.is_initialized()
    print("everything held", flush=True)


if __name__ == "__main__":
    main()
