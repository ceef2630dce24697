"""Simulated against measured step time on the CPU, after calibration, for three budgets.

    python benchmarks/calibration_figures.py [--processor] [--SHAPE-PRECISION] [MACHINE.toml]

The accelerator is emulated and its links are held to a rate, each direction on its own, so that copies and arithmetic
run beside each other as on a card. Without a machine file one is measured meanwhile: steps and probes take turns. The
plan in force is then simulated with those rates, and the simulated step compared with the median of real ones.
``--processor``: on one thread, whose processor time counts, and with it what it would have slept for the links; for
computers on which other work runs too. Shape and precision are one of ``--large-bf16`` (the default), ``--large-fp32``,
``--small-bf16`` and ``--small-fp32``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import ps_kernels
from ps_core import AdamW, Budget
from ps_core._simulate.clock import simulate
from ps_core._simulate.machine import Machine, machine
from ps_core.engine import chunked
from ps_core.engine._calibrate import calibrate
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._execution.plan_scheduler import PlanScheduler
from ps_models import build
from regime import check_regime
from slow_links import SlowDevice, ThrottledLinks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LINK_BYTES_PER_S = 400e6
VOCABULARY = 1024
WARM_UPS, STEPS = 3, 7


class Case(NamedTuple):
    """A model, what it is trained on, and in how much memory."""

    layers: int
    hidden: int
    batch: int
    length: int
    precision: str
    budgets: tuple[str, ...]


CASES = {
    "--large-bf16": Case(8, 512, 4, 128, "bf16", ("24MiB", "48MiB", "96MiB")),
    "--large-fp32": Case(8, 512, 4, 128, "fp32", ("48MiB", "96MiB", "192MiB")),
    "--small-bf16": Case(4, 384, 8, 64, "bf16", ("16MiB", "24MiB", "48MiB")),
    "--small-fp32": Case(4, 384, 8, 64, "fp32", ("32MiB", "48MiB", "80MiB")),
}
"""26 and 7.5 million parameters."""


class OneThread:
    """Its processor time, and what it would have slept."""

    def __init__(self) -> None:
        self._slept_s = 0.0

    def now(self) -> float:
        """Seconds."""
        return time.thread_time() + self._slept_s

    def sleep(self, seconds: float) -> None:
        """Only say so."""
        self._slept_s += seconds


def made(case: Case, where: str) -> Any:
    """A case's model."""
    return build("gpt2", where, layers=case.layers, hidden=case.hidden, heads=8, vocabulary=VOCABULARY,
                 positions=case.length, checkpoint_blocks=True)  # fmt: skip


def drawn(case: Case, index: int) -> torch.Tensor:
    """The tokens of a step."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(VOCABULARY, (case.batch, case.length), generator=generator)


class Training:
    """A case in one of its budgets."""

    def __init__(self, case: Case, budget: str, clock: OneThread | None) -> None:
        torch.manual_seed(0)
        model = made(case, "meta")
        self._now: Callable[[], float] = time.perf_counter
        links = ThrottledLinks(LINK_BYTES_PER_S)
        if clock is not None:
            links, self._now = ThrottledLinks(LINK_BYTES_PER_S, clock.now, clock.sleep), clock.now
        self._model, optimizer = chunked(
            model, AdamW(lr=1e-4), device=SlowDevice(links), budget=Budget(device=budget), precision=case.precision
        )
        assert optimizer is not None
        self._optimizer, self._case, self._budget = optimizer, case, budget
        self._times: list[float] = []

    def step(self) -> None:
        """One more."""
        tokens = drawn(self._case, len(self._times))
        start = self._now()
        self._model(tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._times.append(self._now() - start)

    def compared(self, rates: Machine) -> str:
        """A step's median seconds and quartiles, what the plan in force takes by simulation, and what it moves."""
        scheduler = hooks_of(self._model).scheduler
        assert isinstance(scheduler, PlanScheduler)
        planned = scheduler.planned
        assert planned is not None
        told = simulate(planned.program, planned.plan, rates)
        moved = ", ".join(f"{link} {count / 2**20:.0f} MiB" for link, count in told.moved_bytes.items() if count)
        low, median, high = statistics.quantiles(self._times[WARM_UPS:], n=4)
        return (
            f"{self._budget:>8}: measured {median:.3f} s ({low:.3f} to {high:.3f}), simulated {told.step_time_s:.3f} "
            f"s, {100 * (told.step_time_s / median - 1):+.0f} %; a step moves {moved or 'nothing'}"
        )


def main(words: list[str]) -> None:
    """Print the table."""
    clock = OneThread() if "--processor" in words else None
    if clock is not None:
        torch.set_num_threads(1)
        ps_kernels.set_threads(1)
    files = [word for word in words if not word.startswith("--")]
    case = next((case for word, case in CASES.items() if word in words), CASES["--large-bf16"])
    plain, tokens = made(case, "cpu").to(DTYPES[case.precision]), drawn(case, 0)
    check_regime(plain, lambda: plain(tokens, labels=tokens).loss, VOCABULARY)
    trainings = [Training(case, budget, clock) for budget in case.budgets]

    def steps() -> None:
        for each in trainings:
            each.step()

    for _ in range(WARM_UPS):
        steps()
    notes: list[str] = []
    if files:
        here = machine(files[0])
        for _ in range(STEPS):
            steps()
    else:
        here, notes = calibrate(torch.device("cpu"), between=steps)
    rates = replace(here, h2d_bandwidth=LINK_BYTES_PER_S, d2h_bandwidth=LINK_BYTES_PER_S)
    print(*notes, sep="\n")
    print(f"{case}; links held to {LINK_BYTES_PER_S / 1e6:.0f} MB/s; {torch.get_num_threads()} threads")
    for each in trainings:
        print(each.compared(rates))


if __name__ == "__main__":
    main(sys.argv[1:])
