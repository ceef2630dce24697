"""Autograd notices what a kernel changed, as it notices PyTorch's own operators in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ps_kernels
from ps_kernels import InvalidArgument

NUMEL = 64
ADAM: dict[str, Any] = {"step": 1, "lr": 0.1}


def pieces(how: str) -> Callable[..., None]:
    def call(chunk: torch.Tensor, *tensors: torch.Tensor) -> None:
        getattr(ps_kernels.Pieces(tensors, chunk, [0, NUMEL]), how)()

    return call


def loss(*, gradient: bool) -> Callable[..., None]:
    def call(x: torch.Tensor, losses: torch.Tensor) -> None:
        labels = torch.zeros(2, dtype=torch.int64)
        ps_kernels.cross_entropy(x.view(2, -1), labels, losses, gradient=gradient)
        assert labels._version == 0

    return call


# Each with the lengths of its tensors, and which of these it writes.
CALLS: dict[str, tuple[Callable[..., None], list[int], set[int]]] = {
    "adam": (lambda *rows: ps_kernels.adam_step(*rows, **ADAM), [NUMEL] * 5, {0, 1, 2, 4}),
    "adam_over_grad": (lambda p, m, v, g: ps_kernels.adam_step(p, m, v, g, g, **ADAM), [NUMEL] * 4, {0, 1, 2, 3}),
    "sgd": (lambda *rows: ps_kernels.sgd_step(*rows, lr=0.1, momentum_decay=0.9), [NUMEL] * 4, {0, 1, 3}),
    "sgd_plain": (lambda *rows: ps_kernels.sgd_step(*rows, lr=0.1), [NUMEL] * 3, {0}),
    "sumsq": (ps_kernels.sumsq_finite, [NUMEL, 2], {1}),
    "sumsq_spans": (lambda x, out: ps_kernels.sumsq_finite(x, out.view(1, 2), spans=[(0, 9)]), [NUMEL, 2], {1}),
    "accumulate": (ps_kernels.accumulate, [NUMEL] * 2, {0}),
    "sum_in_order": (lambda one, other, out: ps_kernels.sum_in_order([one, other], out), [NUMEL] * 3, {2}),
    "gather": (lambda c, *ts: ps_kernels.gather(ts, c, [0, NUMEL]), [2 * NUMEL, NUMEL, NUMEL], {0}),
    "scatter": (lambda c, *ts: ps_kernels.scatter(c, [0, NUMEL], ts), [2 * NUMEL, NUMEL, NUMEL], {1, 2}),
    "pieces_gather": (pieces("gather"), [2 * NUMEL, NUMEL, NUMEL], {0}),
    "pieces_scatter": (pieces("scatter"), [2 * NUMEL, NUMEL, NUMEL], {1, 2}),
    "cross_entropy": (loss(gradient=True), [NUMEL, 2], {0, 1}),
    "cross_entropy_read": (loss(gradient=False), [NUMEL, 2], {1}),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_written_and_only_that_counts_as_changed(name: str) -> None:
    call, lengths, written = CALLS[name]
    tensors = [torch.zeros(length) for length in lengths]
    call(*tensors)
    assert {index for index, tensor in enumerate(tensors) if tensor._version} == written


def test_a_tensor_that_backward_needs_is_missed() -> None:
    x, scale = torch.ones(NUMEL, requires_grad=True), torch.ones(NUMEL)
    product = (x * scale).sum()
    ps_kernels.accumulate(scale, torch.ones(NUMEL))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_parameters_of_a_model_count_too() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    before = layer.weight._version
    ps_kernels.scatter(torch.ones(64), [0], [layer.weight])
    assert layer.weight._version > before


@pytest.mark.parametrize("ignored", [True, 1.0, "0", None, 2**63, -(2**63) - 1])
def test_the_ignored_label_is_a_whole_number(ignored: Any) -> None:
    with pytest.raises(InvalidArgument, match="ignored: expected a whole number of 64 bits"):
        ps_kernels.cross_entropy(torch.ones(1, 4), torch.zeros(1, dtype=torch.int64), torch.ones(1), ignored=ignored)
