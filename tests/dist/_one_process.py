"""One process that computes every rank's part, and adds gradients as the ranks add them, with their rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import ps_dist
from ps_core._extents import Kind
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._parameters.state_transitions import GradientPlace

Sums: TypeAlias = dict[ParamState, Tensor]
Run: TypeAlias = Callable[[int], Any]
"""Forward and backward of one part."""


def adds_like(mesh: ps_dist.Mesh, model: nn.Module, optimizer: Any, run: Run, count: int, *, rounds: bool) -> list[Any]:
    """Leave the gradients that the ranks would have after ``count`` parts, dealt to them in turn; what each gave.

    A pass's gradients are added over the ranks of a copy of the model, then over copies, and, with ``rounds``, rounded
    once to what is computed with; passes are added in fp32.
    """
    found: list[Any] = []
    totals: Sums = {}
    for start in range(0, count, mesh.size):
        copies = []
        for first in range(start, start + mesh.size, mesh.shards):
            optimizer.zero_grad()
            found += [run(part) for part in range(first, first + mesh.shards)]
            copies.append(gradients(model))
        total = added(copies)
        if rounds:
            total = {record: value.to(record.dtype).float() for record, value in total.items()}
        totals = added([totals, total])
    give(totals)
    return found


def gradients(model: nn.Module) -> Sums:
    """In fp32, in memory order."""
    engine = hooks_of(model).engine
    engine.finish_pass()
    assert all(record.gradient is not GradientPlace.IN_WEIGHT_SLOT for record in engine.records), (
        "the reference adds in fp32"
    )
    return {
        record: engine.gradients.gradient_vector(record).float().clone()
        for record in engine.records
        if record.gradient is not GradientPlace.NONE
    }


def added(parts: Sequence[Sums]) -> Sums:
    """In this order; who has nothing adds nothing."""
    found: Sums = {}
    for part in parts:
        for record, value in part.items():
            found[record] = found[record] + value if record in found else value
    return found


def give(totals: Sums) -> None:
    """Have these be the gradients."""
    for record, flat in totals.items():
        value = torch.empty_strided(record.shape, record.stride)
        value.as_strided((record.numel,), (1,)).copy_(flat)
        record.parameter.grad = None  # or a loss scale would be put on top of the one that is there
        record.parameter.grad = value


def check_weights(model: nn.Module) -> None:
    """What is computed with is the master, rounded, wherever gradients lay."""
    engine = hooks_of(model).engine
    for record in engine.records:
        if record.trainable:
            assert torch.equal(engine.read(record), engine.read_state(record, Kind.P32).to(record.dtype)), record.name


def check_homes(model: nn.Module, ranks: int, *, accumulates: bool) -> None:
    """Over the ranks, 14 bytes a parameter in 16 bits (18 with accumulation) and 16 in fp32, with little padding.

    By AdamW; another optimizer's states are 4 bytes each.
    """
    engine = hooks_of(model).engine
    for group in engine.groups:
        assert group.chunk_numel == group.shard_numel * ranks
        assert group.shard_numel % 64 == 0
        assert group.chunk_numel - group.numel < 64 * ranks
        if not group.trainable:
            each = group.dtype.itemsize
        elif group.weight is Kind.P32:
            each = 8 + 4 * group.states
        else:
            each = (10 if accumulates else 6) + 4 * group.states
        assert sum(chunk.home.bytes for chunk in group.chunks.values()) == each * group.shard_numel, group.name
