"""The pure-Python optimizers against numpy, and against torch's fused ones, bit for bit."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from array import array

import pytest

from ps_core._options import SGD, Adam, AdamW
from ps_core._reference.floats import singles
from ps_core._reference.optim import step_run

numpy = pytest.importorskip("numpy", reason="numpy is not installed: nothing to compare with")

OPTIMIZERS = [
    Adam(lr=0.01),
    Adam(lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1),
    Adam(lr=1e-3, betas=(0.4, 0.95), weight_decay=0.1),
    AdamW(lr=0.01, weight_decay=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    SGD(lr=0.1),
]
NUMEL = 1000


def values(rng, sort):
    """Random singles: about one, denormal, huge, or anything at all that is finite."""
    normal = rng.standard_normal(NUMEL).astype(numpy.float32)
    if sort == "normal":
        return normal
    if sort == "denormal":
        return (normal * numpy.float32(1e-20)).astype(numpy.float32) * numpy.float32(1e-20)
    if sort == "huge":
        return normal * numpy.float32(1e37)
    words = rng.integers(0, 2**32, NUMEL, dtype=numpy.uint32).view(numpy.float32)
    return numpy.where(numpy.isfinite(words), words, normal)


libm = ctypes.CDLL(ctypes.util.find_library("m"))
libm.fmaf.argtypes, libm.fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float


def fma(a, b, c):
    """The C library's fused multiply-add, element by element."""
    return numpy.array([libm.fmaf(*each) for each in numpy.broadcast(a, b, c)], numpy.float32)


def numpy_step(optimizer, step, grad_scale, p, m, v, grad):
    f = numpy.float32
    g = grad * f(grad_scale)
    if isinstance(optimizer, AdamW):
        p = p * f(1 - optimizer.lr * optimizer.weight_decay)
    elif optimizer.weight_decay:
        g = fma(f(optimizer.weight_decay), p, g)
    if isinstance(optimizer, SGD):
        if optimizer.momentum:
            g = m = f(optimizer.momentum) * m + g
        return fma(-f(optimizer.lr), g, p), m, v
    beta1, beta2 = optimizer.betas
    m = fma(f(1 - beta1), g - m, m) if beta1 > 0.5 else fma(f(1 - beta1) - f(1), g - m, g)
    v = fma(f(1 - beta2) * g, g, f(beta2) * v)
    denominator = numpy.sqrt(v) / f(math.sqrt(1 - beta2**step)) + f(optimizer.eps)
    return p - f(optimizer.lr / (1 - beta1**step)) * m / denominator, m, v


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("sort", ["normal", "denormal", "huge", "any"])
def test_fifty_steps_equal_numpy_bit_for_bit(optimizer, sort):
    rng = numpy.random.default_rng(7)
    theirs = [values(rng, sort), numpy.zeros(NUMEL, numpy.float32), numpy.zeros(NUMEL, numpy.float32)]
    ours = [singles(row.tolist()) for row in theirs]
    start = theirs[0]
    with numpy.errstate(all="ignore"):
        for step in range(1, 51):
            grad = values(rng, sort)
            theirs = numpy_step(optimizer, step, 0.125, *theirs, grad)
            ours = step_run(optimizer, step, 0.125, *ours, singles(grad.tolist()))
    for run, yours in zip(ours, theirs, strict=True):
        mine = numpy.frombuffer(run, numpy.float32)
        assert numpy.array_equal(numpy.isnan(mine), numpy.isnan(yours))
        known = ~numpy.isnan(yours)
        assert numpy.array_equal(mine.view(numpy.uint32)[known], yours.view(numpy.uint32)[known])
    moved = numpy.frombuffer(ours[0], numpy.float32) != start
    assert moved.all() or sort != "normal"


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (AdamW(lr=0.01, weight_decay=0.1), "AdamW"),
        (Adam(lr=0.01, weight_decay=0.1), "Adam"),
        (Adam(lr=0.01, betas=(0.4, 0.9)), "Adam"),
        (SGD(lr=0.1, momentum=0.9, weight_decay=0.1), "SGD"),
    ],
)
def test_each_step_is_torch_fused_bit_for_bit(optimizer, make):
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch fuses other operations on this processor")
    torch.manual_seed(3)
    p = torch.nn.Parameter(torch.randn(NUMEL // 64 * 64))
    extra = {"momentum": optimizer.momentum} if make == "SGD" else {"betas": optimizer.betas, "eps": optimizer.eps}
    theirs = getattr(torch.optim, make)([p], lr=optimizer.lr, weight_decay=optimizer.weight_decay, fused=True, **extra)
    names = ("momentum_buffer", "momentum_buffer") if make == "SGD" else ("exp_avg", "exp_avg_sq")
    for step in range(1, 51):
        p.grad = torch.randn_like(p)
        state = theirs.state[p]
        before = p.detach().numpy().copy()
        rows = [before, *(state.get(name, torch.zeros_like(p)).detach().numpy() for name in names), p.grad.numpy()]
        ours = step_run(optimizer, step, 1.0, *(array("f", row.tobytes()) for row in rows))
        theirs.step()
        assert (p.detach().numpy() != before).mean() > 0.9, "the step must move what it is compared on"
        for run, tensor in zip(ours, (p, *(state[name] for name in names)), strict=True):
            assert run.tobytes() == tensor.detach().numpy().tobytes()
            if make == "SGD":
                break


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_the_kernels_numpy_backend_follows_the_same_order(optimizer):
    kernels = pytest.importorskip("ps_kernels", reason="ps-kernels is not installed: nothing to compare with")
    rng = numpy.random.default_rng(11)
    p, m, v = values(rng, "normal"), numpy.zeros(NUMEL, numpy.float32), numpy.zeros(NUMEL, numpy.float32)
    ours = [array("f", row.tobytes()) for row in (p, m, v)]
    common = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, "grad_scale": 0.3, "backend": "numpy"}
    for step in range(1, 11):
        grad = values(rng, "normal")
        if isinstance(optimizer, SGD):
            kernels.sgd_step(p, m, grad, momentum_decay=optimizer.momentum, **common)
        else:
            betas = {"beta1": optimizer.betas[0], "beta2": optimizer.betas[1], "eps": optimizer.eps}
            kernels.adam_step(p, m, v, grad, step=step, decoupled=isinstance(optimizer, AdamW), **betas, **common)
        ours = step_run(optimizer, step, 0.3, *ours, array("f", grad.tobytes()))
    compared = ours[:1] if isinstance(optimizer, SGD) and not optimizer.momentum else ours
    for run, theirs in zip(compared, (p, m, v), strict=False):
        assert run.tobytes() == theirs.tobytes()
