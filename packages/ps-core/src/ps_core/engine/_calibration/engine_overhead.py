"""Measure the engine's own work with models that hardly compute."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ps_core._options import AdamW, Budget, Options
from ps_core._simulate.instruction_times import COUNTED, MOVES
from ps_core.engine._calibration.probes import Probe
from ps_core.engine._calibration.transformer_blocks import Blocks, counted
from ps_core.engine._chunked import chunked
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._execution.plan_scheduler import PlanScheduler
from ps_core.engine._materialized import release

EMULATED = "emulated"
_HIDDEN, _BLOCKS = 32, 8
_AMPLE, _TIGHT = 2**23, 2**17
"""Budgets in which nothing moves, and in which everything moves."""
_FEW, _MANY = 2**15, 2**11
"""Sizes of groups: one block, and one tensor."""


class Told(NamedTuple):
    """Seconds of a model's passes and step, and how many pieces of the engine's own work these contain."""

    passes_s: float
    step_s: float
    moments: int
    tensors: int
    """Tensors that forward and backward read, with gradients."""
    norms: int
    steps: int
    moves: int


class OwnWork(NamedTuple):
    """Seconds of the host thread for each piece of the engine's own work."""

    moment: float
    tensor: float
    instruction: float
    """Seconds for a step or a norm."""
    move: float


class Tiny:
    """A small managed model whose passes and steps are timed."""

    def __init__(self, group_bytes: int, budget_bytes: int, device: str = EMULATED) -> None:
        with torch.random.fork_rng(devices=[]):
            managed, optimizer = chunked(
                Blocks(_BLOCKS, _HIDDEN),
                AdamW(lr=0.0),
                device=device,
                budget=Budget(device=budget_bytes, host=2**26),
                options=Options(group_bytes=group_bytes, cap_allocator=False),  # other probes take memory too
            )
        assert optimizer is not None, "one was asked for"
        where = _where(device)
        x = torch.zeros(1, 16, _HIDDEN, dtype=torch.float32, device=where)
        name = f"bookkeeping of groups of {group_bytes} bytes in {budget_bytes >> 10} KiB"
        self.probes = [
            Probe(f"{name}, passes", lambda: managed(x).backward(), where),
            Probe(f"{name}, step", optimizer.step, where),
        ]
        self._managed = managed

    def told(self) -> Told:
        """Return the seconds and piece counts of the timed runs, and release the model."""
        scheduler = hooks_of(self._managed).scheduler
        assert isinstance(scheduler, PlanScheduler), "there is one process"
        planned = scheduler.planned
        assert planned is not None, "it fits, and was traced"
        instrs = [planned.plan.segment(name).instrs for name in planned.program.iteration()]
        release(self._managed)
        norms, steps = (sum(isinstance(instr.op, COUNTED) for instr in row) for row in instrs)
        passes, step = (probe.seconds for probe in self.probes)
        trace = planned.program.trace
        return Told(
            passes_s=passes,
            step_s=step,
            moments=len(trace.moments),
            tensors=3 * len(trace.tensors),
            norms=norms,
            steps=steps,
            moves=sum(isinstance(instr.op, MOVES) for row in instrs for instr in row),
        )


class Bookkeeping:
    """Time three small models: few moments, many moments, and many moments where every group moves."""

    def __init__(self) -> None:
        self._models = Tiny(_FEW, _AMPLE), Tiny(_MANY, _AMPLE), Tiny(_MANY, _TIGHT)
        self.rows = [model.probes for model in self._models]

    def fit(self) -> OwnWork:
        """Return the host thread's seconds for each piece of the engine's own work."""
        few, many, moving = (model.told() for model in self._models)
        return divide(few, many, moving)


class Launching:
    """Time a model that hardly computes on an accelerator, plain and managed: only launching takes time then."""

    def __init__(self, device: str) -> None:
        where = _where(device)
        with torch.random.fork_rng(devices=[]):
            model = Blocks(_BLOCKS, _HIDDEN).to(where)
        x = torch.zeros(1, 16, _HIDDEN, dtype=torch.float32, device=where)

        def run() -> None:
            model(x).backward()
            model.zero_grad()

        self._launches = counted(model, x)[0].launches
        self._managed = Tiny(_FEW, _AMPLE, device)
        self.probes = [Probe("launches of a plain model", run, where), *self._managed.probes]

    def fit(self) -> tuple[float, float]:
        """Return the seconds of the host thread for an operator, and for the engine's work for a tensor."""
        told, plain_s = self._managed.told(), self.probes[0].seconds
        launch_s, gradients = plain_s / self._launches, told.tensors / 3
        return launch_s, max(0.0, (told.passes_s - plain_s - gradients * launch_s) / told.tensors)


def _where(device: str) -> torch.device:
    return torch.device("cpu" if device == EMULATED else device)


def divide(few: Told, many: Told, moving: Told) -> OwnWork:
    """Divide the seconds among moments, tensors, steps and moves: the models differ in nothing but their numbers."""
    instruction = max(0.0, (many.step_s - few.step_s) / (many.steps - few.steps))
    first, second = (each.passes_s - each.norms * instruction for each in (few, many))
    moment = max(0.0, (second - first) / (many.moments - few.moments))
    tensor = max(0.0, (first - few.moments * moment) / few.tensors)
    move = (moving.passes_s + moving.step_s - many.passes_s - many.step_s) / max(1, moving.moves - many.moves)
    return OwnWork(moment, tensor, instruction, max(0.0, move))
