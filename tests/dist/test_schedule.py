"""Any passes of ranks, with a plan and without: experts on some ranks only, in any order; exceptions; other passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from _threads import Together, going_by, run
from ps_core import SGD, Budget, Options, RanksDiverged
from ps_core.engine import chunked, release, statistics

WIDTH, EXPERTS = 8, 4
FEW_ULPS = 16 * torch.finfo(torch.float32).eps
"""Of three ranks' parts, two may be added first where memory is shortest; in five steps that is not much."""


class Experts(nn.Module):
    """A stem, experts in whatever order the caller says, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, chosen: tuple[int, ...], *, recompute: bool = False) -> Tensor:
        x = self.stem(x)
        for index in chosen:
            expert = self.experts[index]
            x = x + (checkpoint(expert, x, use_reentrant=False) if recompute else expert(x)).tanh()
        return self.head(x).sum()


@dataclass(frozen=True)
class Part:
    """What one rank does in one pass."""

    chosen: tuple[int, ...]
    recompute: bool = False
    forwards: int = 1
    """Before the one backward; one where there is none, for each is a pass then."""


@dataclass(frozen=True)
class Pass:
    """What all ranks do: one part each, with or without gradients."""

    parts: tuple[Part, ...]
    training: bool = True


@dataclass
class Trainer:
    """One process, or one rank."""

    model: Any
    optimizer: Any
    losses: list[float] = field(default_factory=list)

    def do(self, part: Part, seed: int, *, training: bool) -> None:
        random = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(2, WIDTH, generator=random) for _ in range(part.forwards if training else 1)]
        with torch.set_grad_enabled(training):
            total = torch.stack([self.model(x, part.chosen, recompute=part.recompute) for x in inputs]).sum()
        if training:
            total.backward()
        self.losses.append(float(total.detach()))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def made(together: Together | None, device_kib: int | None = None, **options: Any) -> Trainer:
    generator = torch.Generator().manual_seed(3)
    model = Experts()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    budget = Budget(host="64MiB") if device_kib is None else Budget(device=f"{device_kib}KiB", host="64MiB")
    wholly = Options(group_bytes=1, **options)
    chosen: Any = together
    return Trainer(
        *chunked(
            model,
            SGD(lr=0.05, momentum=0.9),
            device="cpu" if device_kib is None else "emulated",
            precision="fp32",
            budget=budget,
            collectives=chosen,
            options=wholly,
        )
    )


def follows(each: Together, passes: list[Pass], device_kib: int | None, options: dict[str, Any]) -> Any:
    trainer = made(each, device_kib, **options)
    for number, one in enumerate(passes):
        trainer.do(one.parts[each.rank], 100 * number + each.rank, training=one.training)
        if one.training and number % 3 != 1:  # else gradients of two passes are added up
            trainer.step()
    state = trainer.state()
    if device_kib is None or device_kib >= 40:  # else a moment that grows may find groups there ahead of need
        tiers = statistics(trainer.model).tiers.values()
        assert all(tier.peak_bytes <= tier.budget_bytes for tier in tiers)
    release(trainer.model)
    return trainer.losses, state


def alone(ranks: int, passes: list[Pass]) -> tuple[list[list[float]], dict[str, Tensor]]:
    """One process that adds the parts of each pass, then the passes, as several processes do."""
    trainers = made(None)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    kept: dict[str, Tensor] = {}
    for number, one in enumerate(passes):
        for rank in range(ranks):
            trainers.do(one.parts[rank], 100 * number + rank, training=one.training)
            losses[rank].append(trainers.losses[-1])
        if not one.training:
            continue
        for name, parameter in trainers.model.named_parameters():
            if parameter.grad is not None:
                now = gradient(parameter)
                kept[name] = kept[name] + now if name in kept else now
        trainers.optimizer.zero_grad()
        if number % 3 == 1:
            continue
        for name, parameter in trainers.model.named_parameters():
            if name in kept:
                parameter.grad = kept[name]
        kept = {}
        trainers.step()
    return losses, trainers.state()


def gradient(parameter: Any) -> Tensor:
    record = parameter._record
    flat = parameter._owner.gradients.gradient_vector(record)
    return flat.as_strided(record.shape, record.stride, flat.storage_offset()).clone()


orders = st.lists(st.integers(0, EXPERTS - 1), max_size=3, unique=True).map(tuple)
parts = st.builds(Part, chosen=orders, recompute=st.booleans(), forwards=st.integers(1, 2))


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Pass]]:
    ranks = draw(st.integers(1, 3))
    count = draw(st.integers(1, 5))
    one = st.builds(Pass, parts=st.tuples(*[parts] * ranks), training=st.sampled_from((True, True, False)))
    return ranks, [draw(one) for _ in range(count)]


@pytest.mark.parametrize("plan", [False, True])
@given(program=programs(), device_kib=st.sampled_from((None, 10, 14, 40)), prefetch=st.sampled_from((None, 0, 1)))
@settings(max_examples=20, deadline=None)
def test_any_experts_in_any_order_train_like_one_process(
    program: tuple[int, list[Pass]], device_kib: int | None, prefetch: int | None, plan: bool
) -> None:
    ranks, passes = program
    with going_by(plan=plan):
        found, _ = run(ranks, follows, passes, device_kib, {"prefetch": prefetch, "poison": device_kib is not None})
    losses, state = alone(ranks, passes)
    exact = ranks < 3 or device_kib is None or device_kib >= 14  # else a sum may have to be taken in two goes
    for rank, (mine, ended) in enumerate(found):
        assert mine == losses[rank] if exact else mine == pytest.approx(losses[rank], rel=FEW_ULPS, abs=FEW_ULPS)
        for name, value in state.items():
            most = 0.0 if exact else FEW_ULPS * float(value.abs().max())
            assert float((ended[name] - value).abs().max()) <= most, name


def evaluates_alone(each: Together) -> str:
    trainer = made(each)
    for number in range(2):
        trainer.do(Part((0,)), number, training=True)
        trainer.step()
    with pytest.raises(RanksDiverged) as caught:
        trainer.do(Part((0,)), 1, training=each.rank == 1)
    return str(caught.value)


def test_one_rank_evaluates_by_the_plan_while_another_trains() -> None:
    found, _ = run(2, evaluates_alone)
    for message in found:
        assert " in an evaluation" in message
        assert " in a pass with gradients" in message


def fails_once(each: Together) -> tuple[list[float], dict[str, Tensor]]:
    """Rank 1's forward fails amid the second step; it goes on without that part."""
    trainer = made(each)
    for number in range(4):
        if number == 1 and each.rank == 1:
            handle = trainer.model.experts[1].register_forward_pre_hook(_fail)
            with pytest.raises(ZeroDivisionError):
                trainer.do(Part((0, 1)), number, training=True)
            handle.remove()
        else:
            trainer.do(Part((0, 1)), number, training=True)
        trainer.step()
    state = trainer.state()
    release(trainer.model)
    return trainer.losses, state


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("plan", [False, True])
def test_a_rank_that_breaks_a_pass_off_gives_nothing(plan: bool) -> None:
    with going_by(plan=plan):
        found, _ = run(2, fails_once)
    trainer = made(None)
    for number in range(4):
        for _ in range(1 if number == 1 else 2):
            trainer.do(Part((0, 1)), number, training=True)
        trainer.step()
    for _, state in found:
        for name, value in trainer.state().items():
            assert torch.equal(state[name], value), name
