"""A plan for tight memory moves homes themselves; wherever it is left, nothing is lost, and training goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from _runs import let_go
from _states import masters_of
from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, statistics
from ps_core.engine._execution import plan_scheduler
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._execution.instruction_executor import Diverged, InstructionExecutor
from test_does_not_fit import Words

STEPS = 4


class Fuse:
    """Has a plan left before one of its instructions, whatever that is."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.lent: list[int] = []
        """Each time: how many homes were lent out just then."""

    def burn(self, carrier: InstructionExecutor) -> None:
        """Count down, and have the plan left when that is at its end."""
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.left, plan = None, carrier._plan
            self.lent.append(sum(not plan.chunk(held.extent).home.memory.numel() for held in plan.plan.home))
            raise Diverged("told to")


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> Fuse:
    """It is in the way of every instruction and every moment."""
    fuse = Fuse()
    for name in ("carry_out", "begin"):
        plain = getattr(InstructionExecutor, name)

        def beside(carrier: InstructionExecutor, what: Any, plain: Any = plain) -> None:
            fuse.burn(carrier)
            plain(carrier, what)

        monkeypatch.setattr(InstructionExecutor, name, beside)
    return fuse


@dataclass(frozen=True)
class Case:
    """A model and a budget with hardly a byte to spare, for which there is a plan all the same."""

    sizes: dict[str, int]
    tied: bool
    precision: str
    passes: int
    group_bytes: int
    device: int
    host: int
    disk: bool
    kept: tuple[str, ...] = ()
    kind: type[Words] = Words

    def begin(self, folder: Path, *, roomy: bool = False) -> tuple[Any, Any]:
        """Under management."""
        torch.manual_seed(0)
        model = self.kind(**self.sizes, tied=self.tied, recomputed=True)
        budget = Budget(device=self.device, host=self.host)
        if self.disk:
            budget = Budget(device=self.device, host=self.host, disk="4MiB", disk_dir=str(folder))
        if roomy:
            budget = Budget(device="16MiB", host="16MiB")
        options = Options(group_bytes=self.group_bytes, keep_fp32=self.kept, poison=True)
        told = {"device": "emulated", "accumulation_steps": self.passes, "precision": self.precision}
        return chunked(model, AdamW(lr=1e-2), budget=budget, options=options, **told)


CASES = {
    "two tiers": Case({"words": 64, "hidden": 32, "layers": 1}, True, "fp32", 2, 131072, 168960, 168448, False),
    "gradients over weights": Case(
        {"words": 256, "hidden": 32, "layers": 2}, False, "bf16", 1, 32768, 220160, 110080, True, ("*norm*",)
    ),
    "above a disk": Case({"words": 256, "hidden": 32, "layers": 2}, False, "bf16", 2, 131072, 599040, 299520, True),
}


def batch(index: int) -> Tensor:
    return torch.randint(64, (1, 8), generator=torch.Generator().manual_seed(index))


def passes(model: Any, case: Case, index: int) -> list[float]:
    losses = []
    for _ in range(case.passes):
        loss = model(batch(index))
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def masters(optimizer: Any) -> list[Tensor]:
    return [value.clone() for value in masters_of(optimizer.state_dict(masters=True)).values()]


def expected(case: Case, folder: Path) -> Iterator[tuple[list[float], list[Tensor]]]:
    """Losses and masters after each step, with room for everything."""
    model, optimizer = case.begin(folder, roomy=True)
    try:
        for index in range(STEPS):
            losses = passes(model, case, index)
            optimizer.step()
            optimizer.zero_grad()
            yield losses, masters(optimizer)
    finally:
        let_go(model)


@pytest.mark.parametrize("name", CASES)
def test_wherever_a_plan_is_left_nothing_is_lost(name: str, fuse: Fuse, tmp_path: Path) -> None:
    """What demand has no room for after that may be asked for again: then there is a plan for it."""
    case, refused = CASES[name], 0
    right = list(expected(case, tmp_path))
    for seed in range(2):
        drawn = random.Random(seed)
        model, optimizer = case.begin(tmp_path)
        try:
            for index, (losses, values) in enumerate(right):
                fuse.left = drawn.randrange(60) if index else None
                try:
                    found = passes(model, case, index)
                except DoesNotFit:
                    fuse.left, refused = None, refused + 1
                    optimizer.zero_grad()
                    found = passes(model, case, index)
                assert found == losses
                fuse.left = drawn.randrange(30) if fuse.left is None and index else fuse.left
                try:
                    optimizer.step()
                except DoesNotFit:
                    fuse.left, refused = None, refused + 1
                    optimizer.step()
                optimizer.zero_grad()
                assert all(map(torch.equal, masters(optimizer), values))
            planned = hooks_of(model).scheduler.planned
            assert planned is not None
            assert any("memory is so short" in note for note in planned.plan.notes)
        finally:
            fuse.left = None
            let_go(model)
    assert sum(count > 0 for count in fuse.lent) >= 2, fuse.lent
    assert refused < len(fuse.lent), "demand goes on where it can"


class Swelling(Words):
    """Takes more than can be seen from the batch, if told to."""

    extra = 0

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 0 * torch.ones(self.extra).sum()


@pytest.mark.parametrize("name", CASES)
def test_a_moment_that_takes_more_than_was_planned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether demand has room for the rest or not: what the plan lent out is there, and released in the end."""
    monkeypatch.setattr(plan_scheduler, "_WATCHED_EVERY", 1)
    case = replace(CASES[name], kind=Swelling)
    right = list(expected(case, tmp_path))
    model, optimizer = case.begin(tmp_path)
    try:
        for index in range(2):
            assert passes(model, case, index) == right[index][0]
            optimizer.step()
            optimizer.zero_grad()
        model.extra = case.device // 4
        with suppress(DoesNotFit):
            passes(model, case, 2)
        assert "takes more than was planned" in statistics(model).last_divergence
        assert all(map(torch.equal, masters(optimizer), right[1][1]))
    finally:
        let_go(model)
