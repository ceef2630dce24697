"""What the engine stands on: parameters packed by a layout and stepped shard by shard are as if stepped one by one."""

from __future__ import annotations

import pytest
import torch

import ps_kernels
from ps_core._layout import Group, lay_out
from ps_core._trace import Moment, Phase, Tensor, Trace

SHAPES = [(64, 48), (48,), (48, 192), (192,), (7,), (), (300, 11)]


def trace() -> Trace:
    """Each tensor is used in a moment of its own, forward and then backward."""
    tensors = tuple(Tensor(name=f"t{index}", numel=torch.Size(each).numel()) for index, each in enumerate(SHAPES))
    forward = [Moment(name=f"f{index}", phase=Phase.FORWARD, reads=(index,)) for index in range(len(SHAPES))]
    backward = [
        Moment(name=f"b{index}", phase=Phase.BACKWARD, reads=(index,), grads=(index,))
        for index in reversed(range(len(SHAPES)))
    ]
    return Trace(model="seven", tensors=tensors, moments=(*forward, *backward))


def packed(group: Group, tensors: list[torch.Tensor], ranks: int, kind: torch.dtype) -> torch.Tensor:
    """One gathered group, all ranks' shards in a row."""
    chunk = torch.zeros(group.shard_numel * ranks, dtype=kind)
    ps_kernels.gather([tensors[index].to(kind) for index in group.tensors], chunk, group.offsets)
    return chunk


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("group_numel", [1, 4000, 10**6])
def test_steps_of_shards_are_steps_of_tensors(ranks: int, group_numel: int) -> None:
    rng = torch.Generator().manual_seed(ranks)
    params = [torch.randn(each, generator=rng) for each in SHAPES]
    grads = [torch.randn(each, generator=rng).bfloat16() for each in SHAPES]
    layout = lay_out(trace(), group_numel=group_numel, ranks=ranks)
    got = [torch.full(each, torch.nan) for each in SHAPES]
    rounded = [torch.full(each, torch.nan, dtype=torch.bfloat16) for each in SHAPES]
    for group in layout.groups:
        master = packed(group, params, ranks, torch.float32)
        grad = packed(group, grads, ranks, torch.bfloat16)
        for shard, part in zip(master.chunk(ranks), grad.chunk(ranks), strict=True):
            moments = torch.zeros(2, group.shard_numel)
            ps_kernels.adam_step(shard, moments[0], moments[1], part, part, step=1, lr=0.1, weight_decay=0.1)
        ps_kernels.scatter(master, group.offsets, [got[index] for index in group.tensors])
        ps_kernels.scatter(grad, group.offsets, [rounded[index] for index in group.tensors])
    for param, grad, mine, half in zip(params, grads, got, rounded, strict=True):
        alone = param.clone().view(-1)
        zeros = torch.zeros(2, alone.numel())
        ps_kernels.adam_step(alone, zeros[0], zeros[1], grad.view(-1), step=1, lr=0.1, weight_decay=0.1)
        assert not torch.equal(alone, param.view(-1))
        assert torch.equal(mine.view(-1), alone)
        assert torch.equal(half.view(-1), alone.bfloat16())
