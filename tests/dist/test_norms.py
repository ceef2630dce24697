"""Norms of a shared model: each process measures its shard of a group in one call, to the bit as tensor by tensor."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ps_kernels
from _threads import Together, run
from ps_core import SGD, Budget, Options, RanksDiverged, UnsupportedParameter
from ps_core.engine import chunked, release
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._sharding.sharded_gradients import ShardedGradients

SIZES = (3, 700, 41, 20_000, 128)
"""Of tensors, of which some lie in one shard wholly and some in both."""


class Rows(nn.Module):
    """As many vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.linspace(-1, 1, size)) for size in SIZES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(row.float() * x).square().sum() for row in self.rows]).sum()


def measured(each: Together, precision: str, accumulate: int) -> None:
    model, optimizer = chunked(
        Rows(), SGD(lr=0.1), device="emulated", precision=precision, accumulation_steps=accumulate, collectives=each,
        budget=Budget(device="4MiB", host="4MiB"), options=Options(group_bytes=2**20, poison=True),
    )  # fmt: skip
    assert optimizer is not None
    engine = hooks_of(model).engine
    gradients = engine.gradients
    assert isinstance(gradients, ShardedGradients)
    spans, plain = list[list[tuple[int, int]]](), gradients.measure_all

    def watched(records: list[ParamState], flat: torch.Tensor, launch: Any = None) -> None:
        new = [record for record in records if record not in gradients._measured]
        plain(records, flat, launch)
        for record in new:
            alone = torch.zeros(2)
            if record.piece.stop > record.piece.start:
                ps_kernels.sumsq_finite(flat[record.piece], alone)
            assert torch.equal(gradients._measured[record], alone)
        spans.extend([[(record.piece.start, record.piece.stop) for record in new]] if new else [])

    gradients.measure_all = watched  # type: ignore[method-assign]
    for _ in range(accumulate):
        model(torch.tensor(1.5 + each.rank)).backward()
    optimizer.step()
    assert len(spans) == len(engine.groups) == 1
    assert len(spans[0]) == len(SIZES)
    assert any(stop == start for start, stop in spans[0]), "some are not in this shard"
    release(model)


@pytest.mark.parametrize(("precision", "accumulate"), [("bf16", 1), ("bf16", 2), ("fp32", 1)])
def test_a_group_is_measured_in_one_call(precision: str, accumulate: int) -> None:
    run(2, measured, precision, accumulate)


def test_a_gradient_is_not_multiplied_while_its_sum_is_on_its_way() -> None:
    """A hook that does so is told, for the factor would be lost."""

    def train(each: Together) -> str:
        model = nn.Linear(8, 4)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.fill_(0.5)
        model, optimizer = chunked(
            model, SGD(lr=0.1), device="cpu", precision="fp32", budget=Budget(host="64MiB"), collectives=each
        )
        model.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
        try:
            with pytest.raises(UnsupportedParameter) as told:
                model(torch.ones(2, 8)).sum().backward()
        finally:
            optimizer.zero_grad()
            release(model)
        return str(told.value)

    found, _ = run(2, train)
    assert all("cannot be read or multiplied during backward" in message for message in found)


def change(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.grad.clamp_(-0.05, 0.05)
        parameter.grad.data.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=2.0**-5)
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)


def changed(each: Together | None, precision: str) -> Any:
    size = "4MiB" if each is None else "512KiB"
    model, optimizer = chunked(
        Rows(), SGD(lr=0.1), device="emulated", precision=precision, collectives=each,
        budget=Budget(device=size, host="8MiB"), options=Options(group_bytes=2**14, poison=True),
    )  # fmt: skip
    assert optimizer is not None
    for _ in range(2):
        (model(torch.tensor(1.5)) / (1 if each is None else each.ranks)).backward()
        change(model)
        optimizer.step()
        optimizer.zero_grad()
    found = [entry["master"] for entry in optimizer.state_dict(masters=True)["state"].values()]
    release(model)
    return found, optimizer.last_norm


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_gradients_are_read_and_changed_on_all_ranks(precision: str) -> None:
    """Half of the same gradient from each of two ranks is that gradient."""
    (alone, norm), (ranks, _) = changed(None, precision), run(2, changed, precision)
    for found, measured_norm in ranks:
        assert measured_norm == pytest.approx(norm, rel=1e-6)
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_ranks_that_change_gradients_otherwise_are_told() -> None:
    def train(each: Together) -> None:
        model, optimizer = chunked(Rows(), SGD(lr=0.1), precision="fp32", budget=Budget(host="64MiB"), collectives=each)
        model(torch.tensor(1.5)).backward()
        model.rows[1].grad.clamp_(max=0.1 + each.rank)
        with pytest.raises(RanksDiverged, match=r"the gradient of 'rows\.1' was written"):
            optimizer.step()
        optimizer.zero_grad()
        release(model)

    run(2, train)


class Detached(nn.Linear):
    """A layer whose parameters get no gradients where the caller says so."""

    def forward(self, x: torch.Tensor, *, learns: bool) -> torch.Tensor:
        y = super().forward(x)
        return (y if learns else y.detach() + x * torch.zeros((), requires_grad=True)).float().sum()


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_step_after_one_that_broke_off_is_decided_anew(forgotten: bool) -> None:
    """Also by a rank that had no gradient since: the sums of the others are new."""

    def train(each: Together) -> float:
        model = Detached(8, 8)
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.fill_(0.1)
        model, optimizer = chunked(
            model, SGD(lr=0.1), precision="bf16", budget=Budget(host="4MiB"), collectives=each, max_grad_norm=1.0
        )
        model(torch.ones(2, 8), learns=True).backward()
        engine = hooks_of(model).engine
        with (
            mock.patch.object(engine.passes.scheduler, "step", side_effect=MemoryError),
            mock.patch.object(engine.updater, "step", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            optimizer.step()
        if forgotten:
            optimizer.zero_grad()
        model(torch.ones(2, 8) * 100, learns=each.rank == 0).backward()
        optimizer.step()
        norm = optimizer.last_norm
        release(model)
        return norm

    first, second = run(2, train)[0]
    assert first == second > 1000
