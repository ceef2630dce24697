"""Simulated against measured step time on the CPU, after calibration, for three budgets.

    python benchmarks/calibration_figures.py [MACHINE.toml]

The accelerator is emulated and its links are held to a rate, each direction on its own, so that copies and arithmetic
run beside each other as on a card. Without a machine file one is measured first. The plan in force is then simulated
with those rates, and the simulated step compared with the median of real ones.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from ps_core import AdamW, Budget
from ps_core._simulate.clock import simulate
from ps_core._simulate.machine import Machine, machine
from ps_core.engine import chunked
from ps_core.engine._calibrate import calibrate
from ps_core.engine._emulated.standin import StandIn
from ps_models import build

LINK_BYTES_PER_S = 400e6
LAYERS, HIDDEN, BATCH, LENGTH, VOCABULARY = 8, 512, 4, 128, 1024
BUDGETS = ("24MiB", "48MiB", "96MiB")
WARM_UPS, STEPS = 2, 5


def measured(budget: str, rates: Machine) -> tuple[float, float, float, str]:
    """A step's median seconds, the shortest, what the plan in force takes by simulation, and what it moves."""
    torch.manual_seed(0)
    model = build("gpt2", "meta", layers=LAYERS, hidden=HIDDEN, heads=8, vocabulary=VOCABULARY, positions=LENGTH,
                  checkpoint_blocks=True)  # fmt: skip
    device = StandIn(link_bytes_per_s=LINK_BYTES_PER_S)
    managed, optimizer = chunked(model, AdamW(lr=1e-4), device=device, budget=Budget(device=budget))
    assert optimizer is not None
    times = []
    for index in range(WARM_UPS + STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(index))
        start = time.perf_counter()
        managed(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    parameter: Any = next(managed.parameters())
    planned = parameter._keeper.management.pilot.planned
    told = simulate(planned.program, planned.plan, rates)
    moved = ", ".join(f"{link} {count / 2**20:.0f} MiB" for link, count in told.moved_bytes.items() if count)
    steady = times[WARM_UPS:]
    return statistics.median(steady), min(steady), told.step_time_s, moved


def main() -> None:
    """Print the table."""
    here = machine(sys.argv[1]) if len(sys.argv) > 1 else calibrate(torch.device("cpu"))[0]
    rates = replace(here, h2d_bandwidth=LINK_BYTES_PER_S, d2h_bandwidth=LINK_BYTES_PER_S)
    print(f"{rates.name}; links held to {LINK_BYTES_PER_S / 1e6:.0f} MB/s; {torch.get_num_threads()} threads")
    for budget in BUDGETS:
        median, shortest, simulated, moved = measured(budget, rates)
        print(
            f"{budget:>8}: measured {median:.3f} s (least {shortest:.3f}), simulated {simulated:.3f} s, "
            f"{100 * (simulated / median - 1):+.0f} %; a step moves {moved or 'nothing'}"
        )


if __name__ == "__main__":
    main()
