"""Run a loop under management, look for the tightest budget, and compare with plain PyTorch to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from _budgets import near, record, this_test
from _reference import NAMES, SEED, Loop, Result, Settings, Spec, differences, plain
from checked_device.device import CheckedDevice
from ps_core import AdamW, Budget, DoesNotFit, PatrickStarError
from ps_core._units import align_up
from ps_core.engine import chunked, release, statistics

HOST = "256MiB"
ATTEMPTS, ROUNDS = 20, 3
T = TypeVar("T")


def managed(loop: Loop, settings: Settings, device: Callable[[], Any] | str, budget: Budget) -> Result:
    """Under management; every model is released at the end, whatever happens."""
    made: list[tuple[nn.Module, Any]] = []
    names: dict[int, str] = {}

    def make(model: nn.Module, spec: Spec | None) -> tuple[nn.Module, Any]:
        where = device if isinstance(device, str) else device()
        names.update((id(parameter), name) for name, parameter in model.named_parameters())
        own = replace(budget)  # of as many models as there are, each keeps to all of it
        made.append(chunked(model, spec, device=where, budget=own, **settings.as_arguments()))
        return made[-1]

    torch.manual_seed(SEED)
    values: dict[str, Tensor] = {}
    try:
        logs = loop(make)
        counted = [statistics(model) for model, _ in made]
        for index, (model, optimizer) in enumerate(made):
            found = dict(model.state_dict()) | kept_by(names, optimizer)
            values |= {f"{index}:{name}": value.detach().clone() for name, value in found.items()}
    finally:
        let_go(*(model for model, _ in made))
    for index, (model, _) in enumerate(made):
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        for name, value in model.state_dict().items():
            assert torch.equal(value, values[f"{index}:{name}"]), f"{name} changed as it was released"
    return Result(logs, values, counted)


def let_go(*models: nn.Module) -> None:
    """Release, which nothing may prevent."""
    for model in models:
        try:
            release(model)
        except PatrickStarError as error:
            raise AssertionError("release(model) was refused") from error


def kept_by(names: dict[int, str], optimizer: Any) -> dict[str, Tensor]:
    """Masters and moments from the optimizer's state_dict, by the parameter's name."""
    if optimizer is None:
        return {}
    state = optimizer.state_dict(masters=True)
    every = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    found = {}
    for index, entry in state["state"].items():
        if entry.get("step") == 0:  # filled up beside the master, for torch's optimizers; as if it were not there
            assert not any(bool(value.any()) for key, value in entry.items() if key != "master")
            entry = {"master": entry["master"]}
        found |= {f"{every[index]}/{NAMES.get(key, key)}": value for key, value in entry.items()}
    return found | {f"{every[index]}/master": master for index, master in state.get("masters", {}).items()}


def tightest(attempt: Callable[[int], T], rounds: int = ROUNDS, name: str = "", floor: int = 0) -> tuple[int, T]:
    """The smallest device budget (to an eighth, after three rounds) for which an attempt does not raise `DoesNotFit`.

    Where the test found one before, it begins there; otherwise low, and up in doublings, or to what a refusal says is
    needed. Then back down, halving the way to the last one refused; if none was, then just below what fitted.
    ``floor``: no less is tried.
    """
    name = name or this_test()
    known = 0 if floor else near(name)
    low, size = max(floor - 1, 0), known or floor or 1024
    for index in range(ATTEMPTS):
        try:
            found = attempt(size)
            break
        except DoesNotFit as error:
            more = size >> max(3 - index, 0) if known else size
            low, size = size, max(align_up(error.needed_bytes), size + more)
    else:
        raise AssertionError(f"{ATTEMPTS} budgets up to {low:,} bytes were refused")
    parts = 2**rounds
    for _ in range(ATTEMPTS):
        if parts * (size - low) <= low:
            break
        middle = (low + size) // 2 if low else -(-parts * size // (parts + 1))
        try:
            size, found = middle, attempt(middle)
        except DoesNotFit:
            low = middle
    record(name, size)
    return size, found


def check_same(loop: Loop, settings: Settings, got: Result) -> None:
    """Compare with plain PyTorch; which may itself differ from run to run, so a failure asks it once more."""
    wrong = differences(plain(loop, settings), got)
    if wrong:
        wrong = differences(plain(loop, settings), got)
    assert not wrong, "\n".join(wrong)


def stand_in() -> CheckedDevice:
    """An emulated accelerator that checks the order of everything and delays copies."""
    return CheckedDevice(check=True, seed=3)


def check_under_the_tightest_budget(loop: Loop, settings: Settings) -> Result:
    """Train where hardly anything fits: the same bits, and something was evicted."""

    def attempt(size: int) -> Result:
        return managed(loop, settings, stand_in, Budget(device=size, host=HOST))

    size, got = tightest(attempt)
    check_same(loop, settings, got)
    assert got.evictions > 0, f"nothing was ever evicted under {size:,} bytes"
    return got


@contextmanager
def chunked_model(model: nn.Module, **arguments: Any) -> Iterator[tuple[nn.Module, Any]]:
    """A managed model for one test, on the stand-in unless told otherwise; released at the end."""
    spec = arguments.pop("spec", AdamW(lr=1e-2))
    where = {"device": stand_in(), "budget": Budget(device="64MiB", host=HOST)} | arguments
    made, optimizer = chunked(model, spec, **where)
    try:
        yield made, optimizer
    finally:
        let_go(made)


def children() -> set[str]:
    """Processes that this one has, whoever began them (torch's compiler keeps some)."""
    return {pid for thread in Path("/proc/self/task").iterdir() for pid in (thread / "children").read_text().split()}
