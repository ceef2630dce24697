"""Optimizer steps: the pure-Python reference, numpy and torch give the same bits."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ps_kernels
from ps_core import _options
from ps_core._reference import floats, optim
from ps_kernels._arithmetic_order import AdamArguments
from ps_kernels._torch import TorchBackend, _moves, double_root, fused, numpy_root

BOUNDARY = 131_072 + 97
"""Longer than any backend's piece."""


def states(numel: int, seed: int) -> list[np.ndarray]:
    """Parameter, momentum, variance and gradient of many magnitudes, denormal and signed zero included."""
    rng = np.random.default_rng(seed)
    p, m, g = (rng.standard_normal((3, numel)) * 10.0 ** rng.integers(-9, 3, (3, numel))).astype(np.float32)
    v = (rng.standard_normal(numel) ** 2 * 10.0 ** rng.integers(-12, 2, numel)).astype(np.float32)
    g[:4] = [0.0, -0.0, 1e-41, -1e-41]
    return [p, m, v, g]


def as_bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_adam_is_the_reference_bitwise(
    make: Callable[[np.ndarray], Any],
    bits: Callable[[Any], np.ndarray],
    decoupled: bool,
    weight_decay: float,
    kind: str,
) -> None:
    numel, scale = 801, 0.37 if decoupled else -0.37
    p, m, v, g = states(numel, seed=1)
    g = {"float32": g, "bfloat16": as_bf16(g), "float16": g.astype(np.float16)}[kind]
    singles = g.astype(np.float32) if kind != "bfloat16" else (g.astype(np.uint32) << 16).view(np.float32)
    ours = [make(x) for x in (p, m, v, g)]
    out = make(np.zeros(numel, np.uint16))
    kind_of = _options.AdamW if decoupled else _options.Adam
    optimizer = kind_of(lr=3e-3, betas=(0.8, 0.99), eps=1e-7, weight_decay=weight_decay)
    theirs = [array("f", x.tolist()) for x in (p, m, v)]
    for step in (1, 2, 3):
        ps_kernels.adam_step(
            *ours,
            out,
            step=step,
            lr=3e-3,
            beta1=0.8,
            beta2=0.99,
            eps=1e-7,
            weight_decay=weight_decay,
            decoupled=decoupled,
            grad_scale=scale,
        )
        theirs = list(optim.step_run(optimizer, step, scale, *theirs, array("f", singles.tolist())))
        for mine, other in zip(ours, theirs, strict=False):
            np.testing.assert_array_equal(bits(mine), bits(np.array(other, np.float32)))
        np.testing.assert_array_equal(bits(out), np.array(floats.to_bf16(theirs[0]), np.uint16))
    assert not np.array_equal(np.asarray(theirs[0]), p)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_is_the_reference_bitwise(
    make: Callable[[np.ndarray], Any], bits: Callable[[Any], np.ndarray], momentum: float, weight_decay: float
) -> None:
    p, m, v, g = states(501, seed=2)
    ours, out = [make(x) for x in (p, m, g)], make(np.zeros(501, np.float16))
    optimizer, scale = _options.SGD(lr=0.3, momentum=momentum, weight_decay=weight_decay), -0.7 if momentum else 0.7
    theirs = [array("f", x.tolist()) for x in (p, m, v)]
    for step in (2, 3):
        ps_kernels.sgd_step(*ours, out, lr=0.3, momentum_decay=momentum, weight_decay=weight_decay, grad_scale=scale)
        theirs = list(optim.step_run(optimizer, step, scale, *theirs, array("f", g.tolist())))
        for mine, other in zip(ours[:2], theirs, strict=False):
            np.testing.assert_array_equal(bits(mine), bits(np.array(other, np.float32)))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(bits(out), bits(np.array(theirs[0], np.float32).astype(np.float16)))
    assert momentum or np.array_equal(np.asarray(ours[1]), m)


@pytest.mark.parametrize("out_kind", [np.uint16, np.float16, None])
def test_libraries_agree_across_pieces(bits: Callable[[Any], np.ndarray], out_kind: type | None) -> None:
    numpy_arrays = states(BOUNDARY, seed=3)
    for extreme in (np.inf, -np.inf, np.nan, 3e38):
        numpy_arrays[3][int(np.random.default_rng(5).integers(BOUNDARY))] = extreme
    tensors = [torch.from_numpy(x.copy()) for x in numpy_arrays]
    out = None if out_kind is None else np.zeros(BOUNDARY, out_kind)
    tensor_out = None if out is None else torch.from_numpy(out.copy())
    if out_kind is np.uint16:
        assert tensor_out is not None
        tensor_out = tensor_out.view(torch.bfloat16)
    for step in (1, 2):
        for arrays, into, library in ((numpy_arrays, out, "numpy"), (tensors, tensor_out, "torch")):
            ps_kernels.adam_step(*arrays, into, step=step, lr=1e-2, weight_decay=0.01, backend=library)
            ps_kernels.sgd_step(arrays[0], arrays[1], arrays[3], into, lr=1e-2, momentum_decay=0.5, backend=library)
    for one, other in zip(numpy_arrays, tensors, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))
    if out is not None:
        np.testing.assert_array_equal(bits(out), bits(tensor_out))


def test_any_cut_gives_the_same_bits(make: Callable[[np.ndarray], Any], bits: Callable[[Any], np.ndarray]) -> None:
    start = states(1000, seed=4)
    whole, parts = [make(x) for x in start], [make(x) for x in start]
    ps_kernels.adam_step(*whole, step=5, lr=1e-3)
    for cut in (slice(0, 1), slice(1, 130), slice(130, 1000)):
        ps_kernels.adam_step(*(x[cut] for x in parts), step=5, lr=1e-3)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


def test_out_may_be_the_gradient(make: Callable[[np.ndarray], Any], bits: Callable[[Any], np.ndarray]) -> None:
    p, m, v, g = states(700, seed=6)
    apart, over = [make(x) for x in (p, m, v, as_bf16(g))], [make(x) for x in (p, m, v, as_bf16(g))]
    out = make(np.zeros(700, np.uint16))
    ps_kernels.adam_step(*apart, out, step=1, lr=1e-3)
    ps_kernels.adam_step(*over, over[3], step=1, lr=1e-3)
    np.testing.assert_array_equal(bits(over[3]), bits(out))
    np.testing.assert_array_equal(bits(over[0]), bits(apart[0]))


def test_a_step_leaves_no_graph() -> None:
    param = torch.nn.Parameter(torch.ones(8))
    ps_kernels.sgd_step(param, None, torch.ones(8), lr=0.5)
    assert param.tolist() == [0.5] * 8
    assert param.requires_grad
    assert param.grad_fn is None


@pytest.mark.parametrize("root", [double_root, numpy_root])
def test_roots_are_rounded_correctly(root: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    x = torch.from_numpy(np.random.default_rng(9).integers(0, 0x7F80_0001, 200_000, np.uint32).view(np.float32))
    x[:4] = torch.tensor([0.0, -0.0, -1.0, torch.nan])
    with np.errstate(invalid="ignore"):
        right = np.sqrt(x.numpy().astype(np.float64)).astype(np.float32)
    out = torch.empty_like(x)
    np.testing.assert_array_equal(root(x, out).numpy(), right)
    np.testing.assert_array_equal(np.signbit(out.numpy()[:2]), [False, True])


@pytest.mark.parametrize("root", [double_root, numpy_root])
def test_another_device_takes_the_same_operations(root: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Away from the CPU the roots are the device's own; on the meta device only types and shapes are checked."""
    p, m, v, g = (torch.zeros(100, device="meta") for _ in range(4))
    scalars = AdamArguments(
        step=1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True, grad_scale=1.0
    ).scalars()
    TorchBackend(root).adam((p, m, v), g, None, scalars)


def test_another_device_finds_the_same_moves() -> None:
    """Away from the CPU every sum is looked into, on it those that may lie halfway between singles."""
    rng = np.random.default_rng(10)
    p = torch.from_numpy((1 + rng.integers(0, 1 << 23, 1000) * 2.0**-23).astype(np.float32))
    lr, g = 1 + 3 * 2.0**-23, torch.from_numpy(rng.choice([-1, 1], 1000).astype(np.float32) * np.float32(2.0**-24))
    g *= 1 - 3 * 2.0**-23
    product = g.double() * lr
    total = product + p
    bits = total.view(torch.int64)
    everywhere = (bits + _moves(product, total, p)).view(torch.float64).float()
    assert torch.equal(everywhere, fused(g, lr, p))
    assert not torch.equal(everywhere, total.float())
