"""Memory that runs out on one rank, on CUDA devices that the CPU plays: all ranks then leave more free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _fake_cuda import FakeRuntime
from _one_process import adds_like
from _played_cards import launch_on_stream
from _threads import Together, going_by, run
from _zero_cases import states
from ps_core import AdamW, Budget, DeviceOutOfMemory, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._execution.find_hooks import hooks_of

WIDTH, LAYERS = 40, 6
ROOM, HOST = 160, 2**24
MUCH = 1_000_000


class Hungry(nn.Module):
    """Asks for much memory where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.wants = ""
        self.allocator: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[:3](x)
        self.eat("forward")
        return self.layers[3:](Eat.apply(x, self))

    def eat(self, where: str) -> None:
        if self.wants == where:
            self.allocator.limit_bytes = MUCH
            try:
                torch.zeros(MUCH)
            finally:
                self.allocator.limit_bytes = 1 << 40  # what was not allocated takes no memory


class Eat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Hungry) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.eat("backward")
        return gradient, None


def made(
    each: Together | None, precision: str, device: Any, parts: int, kind: type[Hungry] = Hungry
) -> tuple[Any, Any]:
    model, drawn = kind(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5, generator=drawn)
    size = WIDTH * (WIDTH + 2) * (4 if precision == "fp32" else 2)
    return chunked(
        model,
        AdamW(lr=1e-2),
        device=device,
        precision=precision,
        accumulation_steps=parts,
        budget=Budget(host=HOST) if each is None else Budget(device=ROOM * 2**10, host=HOST),
        collectives=each,
        options=Options(group_bytes=size, poison=each is not None),
    )


def passed(model: nn.Module, step: int, part: int) -> None:
    inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + part))
    model(inputs).float().square().sum().backward()


def stepped_alike(each: Together, ours: tuple[Any, Any], alone: tuple[Any, Any], step: int, precision: str) -> None:
    """Make a step of the ranks, and the same step in one process; all states are equal."""
    (model, optimizer), (single, reference) = ours, alone
    passed(model, step, each.rank)
    optimizer.step()
    optimizer.zero_grad()
    adds_like(each.mesh, single, reference, partial(passed, single, step), each.ranks, rounds=precision != "fp32")
    reference.step()
    reference.zero_grad()
    rows = states(optimizer)
    assert all(torch.equal(rows[name], value) for name, value in states(reference).items()), step


@dataclass
class Found:
    """The plans, arenas and results of one rank."""

    plans: list[str]
    """The plan after each pass that ran out, and the first."""
    replans: int
    arena_ends: list[int]
    planned: list[int]
    """Planned passes after each step."""
    failures: int


def train(each: Together, precision: str, told: list[tuple[int, int, str]], steps: int) -> Found:
    """Train; ``told``: before which step, on which rank and where memory runs out. A step that fails is made again."""
    runtime, found = FakeRuntime(each.rank + 1), Found([], 0, [], [], 0)
    launch_on_stream(each)
    single, reference = made(None, precision, "cpu", each.ranks)
    with runtime:
        device = CudaDevice(runtime)
        model, optimizer = made(each, precision, device, 1)
        model.allocator = runtime.allocator
        scheduler = hooks_of(model).engine.passes.scheduler
        for step in range(steps):
            for _, rank, where in [row for row in told if row[0] == step]:
                found.plans.append(scheduler.plan.fingerprint)
                found.arena_ends.append(scheduler._in_force.plan.arena_end)
                model.wants = where if rank == each.rank else ""
                try:
                    passed(model, step, each.rank)
                except torch.OutOfMemoryError:
                    found.failures += 1
                model.wants = ""
                optimizer.zero_grad()
            stepped_alike(each, (model, optimizer), (single, reference), step, precision)
            found.planned.append(statistics(model).planned_passes)
        found.plans.append(scheduler.plan.fingerprint)
        found.arena_ends.append(scheduler._in_force.plan.arena_end)
        found.replans = statistics(model).replans
        release(model)
    release(single)
    return found


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("ranks", "precision"), [(2, "fp32"), (2, "bf16"), (3, "bf16")])
def test_all_ranks_leave_more_free_after_one_ran_out(ranks: int, precision: str, where: str) -> None:
    found, _ = run(ranks, train, precision, [(3, ranks - 1, where)], 6)
    for each in found:
        before, after = each.plans
        assert before != after
        assert each.plans == found[0].plans
        assert each.arena_ends[1] < each.arena_ends[0]
        assert each.replans == 1
        assert each.planned[-1] - each.planned[2] >= 3, "the passes after are planned"
    assert [each.failures for each in found] == [0] * (ranks - 1) + [1]


def test_ranks_plan_again_no_more_often_than_memory_ran_out() -> None:
    """Soon no plan leaves more free; then the last one stays, and is followed."""
    often = [(step, step % 2, "backward") for step in range(2, 12)]
    found, _ = run(2, train, "bf16", often, 13)
    for each in found:
        assert each.plans == found[0].plans
        assert 2 <= each.replans < len(often)
        assert each.plans[-1] == each.plans[-2]
        assert each.planned[-1] == each.planned[-2] + 1
    assert [each.failures for each in found] == [5, 5]


class Short(FakeRuntime):
    """Memory of a card, which can run out as the engine takes some."""

    failures = 0
    """The next allocations that fail."""

    def empty(self, size_bytes: int) -> Tensor:
        if self.failures:
            self.failures -= 1
            self.run_out()
        return super().empty(size_bytes)

    def run_out(self) -> None:
        self.allocator.limit_bytes = MUCH
        try:
            torch.zeros(MUCH)
        finally:
            self.allocator.limit_bytes = 1 << 40


class Starved(Hungry):
    """A model that runs out of memory; then the engine's next allocations fail, too."""

    failures = 0
    runtime: Any = None

    def eat(self, where: str) -> None:
        if self.wants == where:
            self.runtime.failures = self.failures
            self.runtime.run_out()


def starve(each: Together, precision: str, where: str, failures: int) -> list[str]:
    """Run out on the last rank in the third of five steps; return what was said after the first failure."""
    runtime, said = Short(each.rank + 1), list[str]()
    launch_on_stream(each)
    single, reference = made(None, precision, "cpu", each.ranks)
    with runtime:
        model, optimizer = made(each, precision, CudaDevice(runtime), 1, kind=Starved)
        model.runtime, model.failures = runtime, failures
        for step in range(5):
            if step == 2:
                model.wants = where if each.rank == each.ranks - 1 else ""
                try:
                    passed(model, step, each.rank)
                except torch.OutOfMemoryError:
                    said.append("")
                model.wants = ""
                for _ in range(2):
                    try:
                        optimizer.zero_grad()
                        break
                    except DeviceOutOfMemory as error:
                        said.append(str(error))
            stepped_alike(each, (model, optimizer), (single, reference), step, precision)
        release(model)
    release(single)
    return said


@pytest.mark.parametrize("failures", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_whose_memory_runs_out_again_takes_part_once_there_is_some(
    precision: str, where: str, failures: int
) -> None:
    with going_by(plan=False):
        first, last = run(2, starve, precision, where, failures)[0]
    assert first == []
    assert len(last) == 1 + failures
    for text in last[1:]:
        assert "This rank's pass has ended, but the other ranks wait for that." in text
        assert "rank 1: memory is short for the sum of layers." in text
        assert "CUDA out of memory. Tried to allocate 3.8 MiB" in text


def test_a_rank_whose_memory_stays_short_says_what_for() -> None:
    words = r"^rank 1: memory is short for .* call optimizer\.zero_grad\(\), which runs the remaining collectives"
    with going_by(plan=False), pytest.raises(DeviceOutOfMemory, match=words):
        run(2, starve, "bf16", "forward", 99)


@pytest.mark.parametrize("plan", [True, False])
def test_the_others_end_their_pass_once_the_rank_has_cleared_its_gradients(plan: bool) -> None:
    """The program tells the others by a barrier of its own. Before `zero_grad` they may still wait in backward."""
    told = Barrier(2, timeout=30)

    def case(each: Together) -> int:
        runtime = FakeRuntime(each.rank + 1)
        launch_on_stream(each)
        single, reference = made(None, "bf16", "cpu", each.ranks)
        with runtime:
            model, optimizer = made(each, "bf16", CudaDevice(runtime), 1)
            model.allocator, failures = runtime.allocator, 0
            for step in range(5):
                model.wants = "backward" if step in (0, 3) and each.rank else ""
                try:
                    passed(model, step, each.rank)
                except torch.OutOfMemoryError:
                    failures += 1
                    optimizer.zero_grad()
                model.wants = ""
                told.wait()
                optimizer.zero_grad()
                stepped_alike(each, (model, optimizer), (single, reference), step, "bf16")
            release(model)
        release(single)
        return failures

    with going_by(plan=plan):
        assert run(2, case)[0] == [0, 2]
