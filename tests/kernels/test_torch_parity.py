"""One step from the same state as torch.optim's fused optimizers: the same bits, over fifty steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ps_kernels
from ps_kernels._arithmetic_order import AdamArguments

BODY, TAIL = 64 * 400, 37
"""PyTorch leaves what is left over after whole vectors to other code, which rounds the variance differently."""
SAME_BITS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""Elsewhere PyTorch is compiled without fused operations, or with others."""
BACKENDS = [name for name, state in ps_kernels.backends().items() if state == "available" and name != "cuda"]
ADAM: list[dict[str, Any]] = [
    {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 3e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.01},
    {"lr": 1e-2, "beta1": 0.5, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0},
    {"lr": 1e-2, "beta1": 0.3, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 0.1, "beta1": 0.0, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1},
]


def spread(rng: torch.Generator, least: int, most: int) -> torch.Tensor:
    """Numbers of many magnitudes: momenta that cancel against gradients, and parameters smaller than their updates."""
    shape = (BODY + TAIL,)
    return torch.randn(shape, generator=rng) * 10.0 ** torch.randint(least, most, shape, generator=rng)


def check(
    mine: list[torch.Tensor], theirs: list[torch.Tensor], before: torch.Tensor, uncancelled: torch.Tensor
) -> None:
    """The body's bits; where PyTorch fuses other operations, the parameters to four units.

    Units are those of the old parameter, the update, or ``uncancelled``, the update as it would be if nothing in the
    momentum cancelled: that is what PyTorch's own results on two processors differ by.
    """
    if SAME_BITS:
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one[:BODY].view(torch.int32), other[:BODY].view(torch.int32))
    moved = (theirs[0] - before).abs()
    assert (moved > 8 * unit(before)).float().mean() > 0.8, "the step must move what it is compared on"
    size = torch.maximum(torch.maximum(before.abs(), moved), uncancelled)
    assert ((mine[0] - theirs[0]).abs() / unit(size)).max() <= 4


def unit(size: torch.Tensor) -> torch.Tensor:
    """The distance between neighbouring singles."""
    return torch.nextafter(size.abs(), torch.tensor(torch.inf)) - size.abs()


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("chosen", ADAM, ids=lambda chosen: f"beta1={chosen['beta1']}-wd={chosen['weight_decay']}")
@pytest.mark.parametrize("scale", [1.0, 2.0**-10, 0.37])
def test_fifty_adam_steps(decoupled: bool, chosen: dict[str, Any], scale: float) -> None:
    rng = torch.Generator().manual_seed(7)
    states = [spread(rng, -3, 1), torch.zeros(BODY + TAIL), torch.zeros(BODY + TAIL)]
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    for step in range(1, 51):
        grad = spread(rng, -2, 1).bfloat16()
        theirs, scaled = [state.clone() for state in states], grad.float() * scale
        lists = [[each] for each in (theirs[0], scaled, theirs[1], theirs[2])]
        fused(*lists, [], [torch.tensor(float(step))], amsgrad=False, maximize=False, **chosen)
        mine = [state.clone() for state in states]
        backend = BACKENDS[step % len(BACKENDS)] if step > 40 else None
        library = [each.numpy() for each in mine] if backend == "numpy" else mine
        given = grad.view(torch.uint16).numpy() if backend == "numpy" else grad
        ps_kernels.adam_step(
            *library, given, step=step, decoupled=decoupled, grad_scale=scale, backend=backend, **chosen
        )
        s = AdamArguments(step=step, decoupled=decoupled, grad_scale=scale, **chosen).scalars()
        largest = torch.maximum(states[1].abs(), scaled.abs() + s.coupled_decay * states[0].abs())
        check(mine, theirs, states[0], s.step_size * largest / (theirs[2].sqrt() / s.sqrt_bc2 + s.eps))
        states = theirs


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.1), (0.0, 0.1)])
def test_fifty_sgd_steps(how: dict[str, bool], momentum: float, weight_decay: float) -> None:
    """From the first on: a momentum of negative zeros takes over the first gradient, the signs of zeros too."""
    rng = torch.Generator().manual_seed(8)
    theirs = torch.nn.Parameter(spread(rng, -3, 1))
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, weight_decay=weight_decay, **how)
    buffer = torch.full_like(theirs.detach(), -0.0)
    for step in range(50):
        before, theirs.grad = theirs.detach().clone(), spread(rng, -2, 1)
        theirs.grad[::100] = torch.tensor(-0.0 if step == 0 else 1e-3)
        mine = [before.clone(), buffer.clone()]
        ps_kernels.sgd_step(*mine, theirs.grad, lr=0.1, momentum_decay=momentum, weight_decay=weight_decay)
        optimizer.step()
        largest = torch.maximum(theirs.grad.abs(), 0.1 * before.abs())
        if momentum:
            buffer = optimizer.state[theirs]["momentum_buffer"].clone()
            largest = torch.maximum(torch.maximum(largest, buffer.abs()), mine[1].abs())
        check(mine, [theirs.detach(), buffer], before, 0.1 * largest)


def test_a_momentum_of_positive_zeros_differs_in_signs_of_zeros_only() -> None:
    grad, param = torch.tensor([-0.0, 0.0, 1.0, -0.0]), torch.tensor([1.0, 1.0, 1.0, -0.0])
    results = []
    for zero in (0.0, -0.0):
        p, m = param.clone(), torch.full((4,), zero)
        ps_kernels.sgd_step(p, m, grad, lr=0.5, momentum_decay=0.9)
        results.append((p, m))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert [m.signbit().tolist() for _, m in results] == [[False] * 4, [True, False, False, True]]
    assert [p.signbit().tolist() for p, _ in results] == [[False] * 3 + [True], [False] * 4]
    theirs = torch.nn.Parameter(param.clone())
    theirs.grad = grad.clone()
    optimizer = torch.optim.SGD([theirs], lr=0.5, momentum=0.9)
    optimizer.step()
    assert optimizer.state[theirs]["momentum_buffer"].signbit().tolist() == results[1][1].signbit().tolist()
    assert theirs.signbit().tolist() == results[1][0].signbit().tolist()
