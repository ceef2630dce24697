"""Models of which a part is differentiated within another backward pass: equilibrium models and adjoint methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 32


class Cell(nn.Module):
    """One function whose fixed point is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, state: Tensor, x: Tensor) -> Tensor:
        return self.norm(x + 0.3 * self.narrow(torch.tanh(self.wide(state))))


class Equilibrium(nn.Module):
    """A deep equilibrium model: a hook solves for the gradient by many backward passes over one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(WIDTH, WIDTH), Cell(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        state = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                state = self.cell(state, x)
        state = self.cell(state, x)
        if state.requires_grad:
            start = state.detach().requires_grad_()
            again = self.cell(start, x)

            def solve(gradient: Tensor) -> Tensor:
                found = gradient
                for _ in range(4):
                    found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
                return found

            state.register_hook(solve)
        return self.last(state)


class Adjoint(torch.autograd.Function):
    """Four steps of a differential equation, whose graph is made step by step in backward."""

    @staticmethod
    def forward(ctx: Any, part: nn.Module, state: Tensor, *parameters: Tensor) -> Tensor:
        ctx.part, ctx.parameters = part, parameters
        states = [state]
        with torch.no_grad():
            for _ in range(4):
                states.append(states[-1] + 0.25 * part(states[-1]))
        ctx.save_for_backward(*states[:-1])
        return states[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sums: list[Tensor] = []
        for before in reversed(ctx.saved_tensors):
            with torch.enable_grad():
                start = before.detach().requires_grad_()
                found = torch.autograd.grad(0.25 * ctx.part(start), (start, *ctx.parameters), gradient)
            gradient = gradient + found[0]
            sums = [one + other for one, other in zip(sums, found[1:], strict=True)] if sums else list(found[1:])
        return None, gradient, *sums


class Reversed(torch.autograd.Function):
    """The part runs again in backward, and a backward pass of its own gives it its gradients."""

    @staticmethod
    def forward(ctx: Any, part: nn.Module, state: Tensor) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(state)
        with torch.no_grad():
            return part(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            (saved,) = ctx.saved_tensors
            start = saved.detach().requires_grad_()
            found = ctx.part(start)
        torch.autograd.backward(found, gradient)
        return None, start.grad


class Continuous(nn.Module):
    """Layers around a part that an adjoint method differentiates."""

    def __init__(self, how: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how
        self.part = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        given = self.part.parameters() if self.how is Adjoint else ()
        return self.last(self.how.apply(self.part, self.first(x), *given))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "equilibrium": Equilibrium,
    "adjoint": lambda: Continuous(Adjoint),
    "reversed": lambda: Continuous(Reversed),
}
