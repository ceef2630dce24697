"""The cross entropy of rows: the same bits from every backend, and as near to the exact one as is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import _row_losses
import ps_kernels
from ps_core._reference import floats
from ps_kernels import InvalidArgument, _native

LEVELS = [name for name in _native.LEVELS if ps_kernels.backends()[name] == "available"]
EVERY = [*LEVELS, "torch", "numpy"]
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPECIAL = [0.0, -0.0, 1e-45, -87.0, -87.00001, -1e4, 300.0, float("-inf")]
WORST = [float("inf"), float("nan")]


def logits_of(kind: str, rows: int, columns: int, seed: int, scale: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * scale).to(KINDS[kind])


def run(backend: str, logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradients; what is given stays as it is."""
    made, losses = logits.clone(), torch.full((len(labels),), 7.0)
    if backend == "numpy":
        of_numpy = made.view(torch.int16).numpy().view(np.uint16) if made.dtype == torch.bfloat16 else made.numpy()
        ps_kernels.cross_entropy(of_numpy, labels.numpy(), losses.numpy(), backend=backend, **options)
    else:
        ps_kernels.cross_entropy(made, labels, losses, backend=backend, **options)
    return losses, made


def same(bits: Callable[[Any], Any], one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    np.testing.assert_array_equal(bits(one), bits(other), err_msg=what)


@given(
    kind=st.sampled_from(list(KINDS)),
    rows=st.integers(1, 3),
    columns=st.one_of(st.sampled_from([1, 2, 63, 64, 65, 129, 4095, 4096, 4097]), st.integers(1, 300)),
    factor=st.sampled_from([1.0, 0.37, 1024.0]),
    worst=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_every_backend_is_the_reference(
    bits: Any, kind: str, rows: int, columns: int, factor: float, worst: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = logits_of(kind, rows, columns, seed)
    some = torch.from_numpy(rng.random((rows, columns)) < 0.05)
    odd = torch.from_numpy(rng.choice(SPECIAL + WORST * worst, (rows, columns))).to(logits.dtype)
    logits = logits.where(~some, odd)
    labels = torch.from_numpy(rng.integers(0, columns, rows))
    labels[0] = rng.choice([-100, int(labels[0])])
    factor = floats.single(factor)
    wanted_losses, wanted = torch.zeros(rows), torch.zeros(rows, columns)
    for index, label in enumerate(labels.tolist()):
        if label != -100:
            loss, gradient = _row_losses.row(logits[index].float().tolist(), label, factor)
            wanted_losses[index], wanted[index] = loss, torch.tensor(gradient)
    for backend in EVERY:
        losses, gradients = run(backend, logits, labels, factor=factor)
        same(bits, losses, wanted_losses, f"{backend}: losses")
        same(bits, gradients, wanted.to(logits.dtype), f"{backend}: gradients")
        losses, untouched = run(backend, logits, labels, gradient=False)
        same(bits, losses, wanted_losses, f"{backend}: losses alone")
        same(bits, untouched, logits, f"{backend}: logits are only read")


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(bits: Any, backend: str, kind: str) -> None:
    before = torch.get_num_threads()
    logits = logits_of(kind, 37, 5003, 1)
    labels = torch.arange(37) * 135
    found = []
    try:
        for threads in (1, 2, 5, 64):
            ps_kernels.set_threads(threads)
            found.append(run(backend, logits, labels))
    finally:
        ps_kernels.set_threads(before)
    for losses, gradients in found:
        same(bits, losses, found[0][0], backend)
        same(bits, gradients, found[0][1], backend)


def apart(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, least: float = 0.0) -> torch.Tensor:
    """Errors in units of the last place of the exact number, or of ``least``."""
    info = torch.finfo(dtype)
    magnitude = exact.abs().clamp(min=max(least, info.smallest_normal)).log2().floor()
    return (found.double() - exact).abs() / (2**magnitude * info.eps)


def test_powers_are_within_a_unit_and_a_tenth() -> None:
    x = torch.linspace(-87, 0, 1 << 20, dtype=torch.float64).float()
    found = torch.from_numpy(exponentials(x.numpy()))
    exact = x.double().exp()
    assert 0.5 < apart(found, exact, torch.float32).max() <= 1.1
    assert exponentials(np.array([0.0, -87.00001, -np.inf], np.float32)).tolist() == [1, 0, 0]
    assert np.isnan(exponentials(np.array([np.nan], np.float32)))


def exponentials(x: np.ndarray) -> np.ndarray:
    """What every backend computes: it is held to the same bits above."""
    from ps_kernels._numpy_loss import exponential

    with np.errstate(all="ignore"):
        return np.asarray(exponential(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1000, 50257])
def test_as_near_to_the_exact_one_as_is_said(kind: str, columns: int) -> None:
    """Singles: within four units and what rounding the distance from the largest makes; halves: rounded once."""
    logits = logits_of(kind, 8, columns, 3)
    labels = torch.arange(8) * (columns // 9)
    exact = logits.double().requires_grad_()
    right = functional.cross_entropy(exact, labels, reduction="none")
    right.sum().backward()
    losses, gradients = run(LEVELS[0] if LEVELS else "torch", logits, labels)
    assert apart(losses, right.detach(), torch.float32, 1.0).max() <= 2
    assert exact.grad is not None
    others = torch.ones(8, columns, dtype=torch.bool)
    others[torch.arange(8), labels] = False
    distance = (logits.double().amax(1, keepdim=True) - logits.double())[others]
    units = 4 + distance if kind == "float32" else 0.5 + 2.0**-7 * (1 + distance)
    assert bool((apart(gradients[others], exact.grad[others], KINDS[kind]) <= units).all())
    assert apart(gradients[~others], exact.grad[~others], KINDS[kind], 0.5).max() <= (2 if kind == "float32" else 0.51)


@pytest.mark.parametrize("backend", EVERY)
def test_what_is_not_finite_is_as_torch_has_it(backend: str) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[-inf, -inf], [inf, 1.0], [nan, 1.0], [-inf, 1.0], [1.0, -inf], [1.0, 2.0]])
    labels = torch.tensor([0, 0, 1, 0, 0, -100])
    exact = logits.clone().requires_grad_()
    right = functional.cross_entropy(exact, labels, reduction="none")
    right.sum().backward()
    losses, gradients = run(backend, logits, labels)
    torch.testing.assert_close(losses, right.detach(), equal_nan=True)
    torch.testing.assert_close(gradients, exact.grad, equal_nan=True)
    assert losses.isnan().tolist() == [True, True, True, False, False, False]
    assert losses[3] == inf


@pytest.mark.parametrize("backend", EVERY)
def test_rows_that_do_not_count_and_none_at_all(backend: str) -> None:
    losses, gradients = run(backend, logits_of("bfloat16", 4, 100, 0), torch.full((4,), 5), ignored=5)
    assert not losses.any()
    assert not gradients.any()
    empty, _ = run(backend, torch.empty(0, 9), torch.empty(0, dtype=torch.int64))
    assert empty.shape == (0,)


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("label", [-1, 9, 2**40])
def test_a_label_that_is_no_column(backend: str, label: int) -> None:
    logits, losses, labels = torch.ones(3, 9), torch.full((3,), 7.0), torch.tensor([2, label, -100])
    message = re.escape(f"labels[1]: expected 0 to 8, or -100 for a row that does not count; found {label}")
    arrays = [each.numpy() if backend == "numpy" else each for each in (logits, labels, losses)]
    with pytest.raises(InvalidArgument, match=message):
        ps_kernels.cross_entropy(*arrays, backend=backend)
    assert bool((logits == 1).all())
    assert bool((losses == 7).all())


def call(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "logits": torch.ones(2, 3), "labels": torch.zeros(2, dtype=torch.int64), "losses": torch.zeros(2), **changes
    }  # fmt: skip
    ps_kernels.cross_entropy(**arguments)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"logits": torch.ones(2, 3, dtype=torch.float64)}, "logits: expected float32 or float16 or bfloat16, found"),
    ({"logits": torch.ones(2)}, "logits: expected a row of at least one for each label, found shape (2,)"),
    ({"logits": torch.ones(2, 0)}, "logits: expected a row of at least one for each label, found shape (2, 0)"),
    ({"logits": torch.ones(3, 2).t()}, "logits: not contiguous"),
    ({"labels": torch.zeros(2, dtype=torch.int32)}, "labels: expected int64, found int32"),
    ({"labels": torch.zeros(3, dtype=torch.int64)}, "labels: expected shape (2,), found (3,)"),
    ({"losses": torch.zeros(2, dtype=torch.bfloat16)}, "losses: expected float32, found bfloat16"),
    ({"losses": torch.zeros(1)}, "losses: expected shape (2,), found (1,)"),
    ({"losses": np.zeros(2, np.float32)}, "losses: expected a torch array on cpu like logits"),
    ({"factor": -1.0}, "factor: expected a number in [0, inf), found -1.0"),
    ({"logits": torch.ones(2, 3, device="meta"), "labels": torch.zeros(2, dtype=torch.int64, device="meta"),
      "losses": torch.zeros(2, device="meta")}, "logits: expected on the CPU or a CUDA device, found on meta"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_it_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        call(**changes)


def test_shared_memory_is_refused() -> None:
    block = torch.ones(6)
    with pytest.raises(InvalidArgument, match="losses and logits share memory"):
        call(logits=block.view(2, 3), losses=block[4:])


def test_flushing_denormals_elsewhere_changes_nothing(bits: Any) -> None:
    """A share of a sum times a small factor is a denormal number."""
    logits, labels = torch.zeros(2, 300), torch.tensor([1, 2])
    logits[:, 7:] = -70
    plain = {backend: run(backend, logits, labels, factor=1e-10) for backend in LEVELS}
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = {backend: run(backend, logits, labels, factor=1e-10) for backend in LEVELS}
    finally:
        torch.set_flush_denormal(False)
    for backend in LEVELS:
        same(bits, plain[backend][1], flushed[backend][1], backend)
        assert 0 < plain[backend][1][0, 9] < 1e-38
