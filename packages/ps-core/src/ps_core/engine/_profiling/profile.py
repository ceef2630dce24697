"""Define ``profiled(model)``, which shows where a step's time goes, beside the plan's prediction."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import nn

from ps_core._errors import InvalidInput
from ps_core._plan import Segment
from ps_core._simulate.idle_time import StepTimes, step_times, step_window
from ps_core._simulate.work_pieces import Piece, PlannedPieces, group_names, planned_pieces
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._parameters.param_state import ParamGroup
from ps_core.engine._profiling.recorder import Recorder, Run
from ps_core.report.chrome_trace import chrome_trace
from ps_core.report.timeline_picture import timeline_svg


class Profile:
    """Hold what a model's queues did within ``with profiled(model)``, complete after the block, in seconds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.measured: tuple[Piece, ...] = ()
        """The measured work, in order of launch."""
        self.planned: tuple[Piece, ...] = ()
        """The simulated work of passes and steps that followed a plan."""
        self.steps = 0
        """Number of optimizer steps in the block."""
        self._segments: dict[bool, list[Segment | None]] = {}
        """Segments by `Piece.run`: recorded ones (False), simulated ones (True)."""
        self._homes = 0
        """Number of home slots of the plan."""

    def fill(self, recorder: Recorder, groups: Sequence[ParamGroup]) -> None:
        """Store what was recorded; the device is idle."""
        names = group_names([record.name for record in group.tensors] for group in groups)
        self.steps, self.measured = recorder.steps, tuple(recorder.pieces(names))
        planned, segments, over = list[Piece](), list[Segment | None](), 0.0
        for runs in _rows_of_runs(recorder.runs):
            first = len(segments)
            begin = max(over, min([each.begin_s for each in self.measured if each.run >= first], default=0.0))
            found = _simulated(runs)
            for each in found.pieces:
                planned.append(replace(_later(each, begin), step=runs[each.run].step, run=first + each.run))
                over = max(over, planned[-1].end_s)
            segments += found.segments
        self.planned = tuple(planned)
        self._segments = {False: [run.plan.plan.segment(run.name) for run in recorder.runs], True: segments}
        self._homes = len(recorder.runs[-1].plan.plan.home) if recorder.runs else 0

    def summary(self, step: int | None = None, *, planned: bool = False) -> StepTimes:
        """Return how long the device worked, and what it waited for: in all steps, or in one, from 0.

        ``planned``: by the simulator's clock, which also begins with the block.
        """
        pieces = self._pieces(planned=planned)
        begin, end = self._window(pieces, step)
        count = max(1, self.steps) if step is None else 1
        return step_times(pieces, self._segments[planned], self._homes, begin, end, steps=count)

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for Perfetto or chrome://tracing: process "measured", and "planned" if a plan was followed."""
        processes = {"measured": self._pieces(planned=False)}
        if self.planned:
            processes["planned"] = self.planned
        Path(path).write_text(json.dumps(chrome_trace(processes)), "utf-8")

    def svg(self, path: str | os.PathLike[str], step: int = 0) -> None:
        """Draw one step's queues, measured and planned; both begin at 0."""
        begin, end = self._window(self._pieces(planned=False), step)
        processes: dict[str, Sequence[Piece]] = {"measured": self.measured}
        if self.planned:
            first, last = self._window(self.planned, step)
            ahead, end = begin - first, max(end, begin + last - first)
            processes["planned"] = [_later(each, ahead) for each in self.planned]
        Path(path).write_text(timeline_svg(f"{self._model}: one step", processes, begin, end), "utf-8")

    def _pieces(self, *, planned: bool) -> tuple[Piece, ...]:
        pieces = self.planned if planned else self.measured
        if not pieces:
            why = "nothing followed a plan" if self.measured else "nothing was recorded yet"
            raise InvalidInput(f"profile: {why}; train within the block, and read the profile behind it")
        return pieces

    def _window(self, pieces: Sequence[Piece], step: int | None) -> tuple[float, float]:
        steps = max(1, self.steps)
        if step is not None and not 0 <= step < steps:
            raise InvalidInput(f"profile: expected a step from 0 to {steps - 1}, found {step}")
        return step_window(pieces, step or 0, steps if step is None else step + 1)


def _rows_of_runs(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Yield runs that followed each other directly."""
    row: list[Run] = []
    for run in runs:
        if row and not run.follows:
            yield row
            row = []
        row.append(run)
    if row:
        yield row


def _simulated(runs: Sequence[Run]) -> PlannedPieces:
    """Return the simulated pieces of work for runs of one plan."""
    plan, names = runs[0].plan, [run.name for run in runs]
    return planned_pieces(
        plan.program, plan.plan, plan.machine, names, early=plan.planned.early, speculative=plan.planned.speculative
    )


def _later(piece: Piece, seconds: float) -> Piece:
    return replace(piece, begin_s=piece.begin_s + seconds, end_s=piece.end_s + seconds)


@contextmanager
def profiled(model: nn.Module) -> Iterator[Profile]:
    """Record when each queue works while the model is trained in this block.

    The host waits for the device at the block's beginning and end, and nowhere else. Profile at least two steps: a
    step's work on the host continues during the forward pass of the next step.
    """
    hooks = hooks_of(model)
    engine, counters = hooks.engine, hooks.engine.counters
    engine.check_usable()
    if counters.recorder is not None:
        raise InvalidInput("profiled(model): the model is being profiled already; leave the inner block out")
    device = engine.store.device
    device.synchronize()
    recorder, profile = Recorder(engine.store), Profile(hooks.name)
    counters.record_with(recorder)
    try:
        yield profile
    finally:
        counters.record_with(None)
    recorder.end_moment()
    device.synchronize()
    profile.fill(recorder, engine.groups)
    if profile.measured:
        found = profile.summary()
        counters.profiled({cause.value: seconds / found.steps for cause, seconds in found.idle_s.items()})
