"""Shards wherever they are, with and without a plan: second backward passes, states, larger batches; bits, budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _threads import Together, going_by, run
from ps_core import AdamW, Budget, Options
from ps_core._extents import Kind
from ps_core.engine import chunked, materialized, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._parameters.param_state import ParamGroup

LAYERS, WIDTH = 6, 64
SHARD_NUMEL = WIDTH * WIDTH // 2
SIZE = {"bf16": 2, "fp32": 4}


class Chain(nn.Sequential):
    """Layers, some of which a pass may leave out."""

    def forward(self, x: Tensor, leaves_out: tuple[int, ...] = ()) -> Tensor:
        for index, layer in enumerate(self):
            x = x if index in leaves_out else layer(x)
        return x


@dataclass
class Front:
    """One rank's model under management."""

    model: Any
    optimizer: Any
    each: Together

    @property
    def groups(self) -> list[ParamGroup]:
        return hooks_of(self.model).engine.groups

    def up(self) -> dict[str, set[Kind]]:
        """Which kinds of a group are on the accelerator."""
        return {
            group.name: {kind for kind, chunk in group.chunks.items() if kind is not Kind.FULL and not chunk.home.tier}
            for group in self.groups
        }

    def step(self, rows: int, passes: int = 1, leaves_out: tuple[int, ...] = ()) -> list[float]:
        """The losses."""
        losses = []
        for place in range(passes):
            generator = torch.Generator().manual_seed(100 * rows + 10 * place + self.each.rank)
            loss = self.model(torch.randn(rows, WIDTH, generator=generator), leaves_out).float().square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def settle(self, rows: int = 4, passes: int = 1) -> None:
        """Until there is a plan."""
        for _ in range(3):
            self.step(rows, passes)

    def states(self) -> dict[str, Tensor]:
        found = self.optimizer.state_dict(masters=True)
        return {f"{name} {index}": value for index, row in found["state"].items() for name, value in row.items()}

    def held(self) -> tuple[int, int]:
        """The most of the accelerator, and what there is."""
        tier = statistics(self.model).tiers["device"]
        return tier.peak_bytes, tier.budget_bytes


def front(
    each: Together,
    precision: str,
    room: float,
    *,
    device: Any = "emulated",
    accumulate: int = 1,
    trains: bool = True,
    budget: Budget | None = None,
) -> Front:
    """With an accelerator of so many times the weights, or where that is 0 without one."""
    generator = torch.Generator().manual_seed(0)  # the ranks are threads, and would share the usual one
    model = Chain(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    size = int(room * LAYERS * WIDTH * WIDTH * SIZE[precision])
    budget = budget or (Budget(device=size, host="8MiB") if room else Budget(host="64MiB"))
    made = chunked(
        model, AdamW(lr=1e-2) if trains else None, device=device if room else "cpu", precision=precision,
        budget=budget, collectives=each, accumulation_steps=accumulate,
        options=Options(group_bytes=1, poison=bool(room)),
    )  # fmt: skip
    return Front(*made, each)


def twice(each: Together) -> None:
    one, plain = front(each, "bf16", 12), front(each, "bf16", 0)
    for passes in (1, 1, 2, 1, 2, 2):
        assert one.step(4, passes) == plain.step(4, passes)
    assert all(torch.equal(value, plain.states()[name]) for name, value in one.states().items())
    release(one.model)
    release(plain.model)


@pytest.mark.parametrize("plan", [False, True])
def test_sums_of_a_second_backward_pass_are_found(plan: bool) -> None:
    """Sums that nobody foresaw lie where states are; the step finds them."""
    with going_by(plan=plan):
        run(2, twice)


def handled(each: Together, room: float) -> None:
    """Everything that reads or writes states between steps."""
    one, plain = front(each, "bf16", room), front(each, "bf16", 0)
    fronts = (one, plain)
    for front_ in fronts:
        front_.settle()
    rows = [front_.optimizer.state_dict(masters=True) for front_ in fronts]
    for front_ in fronts:
        with materialized(front_.model, write=True), torch.no_grad():
            for parameter in front_.model.parameters():
                parameter.mul_(0.5)
        front_.settle()
        front_.optimizer.load_state_dict(rows[0])
        front_.model.load_state_dict({name: value * 2 for name, value in front_.model.state_dict().items()})
    assert one.step(4) == plain.step(4)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(one.model.state_dict()[name], value), name
    assert all(torch.equal(value, plain.states()[name]) for name, value in one.states().items())
    for front_ in fronts:
        release(front_.model)
    for mine, other in zip(one.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(("room", "plan"), [(2.2, True), (5, True), (12, True), (5, False)])
def test_states_are_read_and_written_wherever_they_are(room: float, plan: bool) -> None:
    with going_by(plan=plan):
        run(2, handled, room)


def accumulates_graphs(each: Together) -> None:
    one, plain = front(each, "bf16", 4), front(each, "bf16", 0)
    for either in (one, plain):
        either.step(4)
        losses = [either.model(torch.ones(rows, WIDTH)).float().square().mean() for rows in (4, 4)]
        torch.stack(losses).sum().backward()
        either.optimizer.step()
        either.optimizer.zero_grad()
        with torch.no_grad():
            either.model(torch.ones(16, WIDTH))
        either.model(torch.ones(16, WIDTH)).sum().backward()
        either.optimizer.step()
    assert all(torch.equal(value, plain.states()[name]) for name, value in one.states().items())
    peak, most = one.held()
    assert peak <= most
    release(one.model)
    release(plain.model)


@pytest.mark.parametrize("plan", [False, True])
def test_more_graphs_and_larger_batches_find_room(plan: bool) -> None:
    with going_by(plan=plan):
        run(2, accumulates_graphs)
