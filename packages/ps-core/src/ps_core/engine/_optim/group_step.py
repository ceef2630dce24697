"""Decide on an optimizer step, and make it: a group's neighbours with equal settings in one call of a kernel.

[Note: what may depend on where]
Nothing. A kernel's result does not depend on how a vector is cut. Norms are summed tensor by tensor in the order of the
parameters. The arithmetic is the same whatever tier a chunk is on.

[Note: a step is decided once]
The decision also holds for the rest of a step that broke off. What was stepped by then has no gradient any more. So the
norm of the rest would clip by another factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from ps_core._extents import STATES, Kind
from ps_core.engine._gradients.gradient_store import (
    CONCATENATED_NUMEL,
    SMALL_NUMEL,
    GradientStore,
    concatenate,
    is_finite,
)
from ps_core.engine._gradients.gradient_sums import Launch
from ps_core.engine._gradients.loss_scale import LARGEST
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._optim.settings import Progress, Scalars, StepSettings
from ps_core.engine._parameters.param_state import ParamGroup, ParamState, count_updates
from ps_core.engine._parameters.state_transitions import GradientPlace, SlotContents
from ps_core.engine._support.log import warn

SettingsOf = Callable[[ParamState], StepSettings]
_DEVICE = attrgetter("device")


class _StepRun(NamedTuple):
    """Adjacent tensors that one call steps."""

    records: list[ParamState]
    settings: StepSettings


def _runs(group: ParamGroup, settings_of: SettingsOf) -> list[_StepRun]:
    """Cut a group's tensors with gradients into runs; gradients that must be concatenated for one run are small."""
    runs: list[_StepRun] = []
    last: ParamState | None = None
    copied = 0
    for record in group.tensors:
        if record.gradient is GradientPlace.NONE:
            last = None
            continue
        own = record.numel if record.gradient is GradientPlace.OWN_TENSOR else 0
        if last is not None and copied + own <= CONCATENATED_NUMEL and _alike(last, record, settings_of):
            runs[-1].records.append(record)
        else:
            runs.append(_StepRun([record], settings_of(record)))
            copied = 0
        last = record
        copied += own
    return runs


def _alike(one: ParamState, other: ParamState, settings_of: SettingsOf) -> bool:
    return (
        one.gradient is other.gradient
        and one.offset + one.numel == other.offset
        and (one.gradient is not GradientPlace.OWN_TENSOR or max(one.numel, other.numel) < SMALL_NUMEL)
        and one.steps == other.steps
        and one.scalars == other.scalars
        and one.factor == other.factor
        and settings_of(one) == settings_of(other)
        and not settings_of(one).whole
        and not (one.tied or other.tied)
    )


class StepWork(NamedTuple):
    """The work of one group's step, and what to note of it afterwards."""

    calls: list[Callable[[], object]]
    stepped: dict[ParamState, Scalars]
    """The parameters with a gradient, each with its settings' single values after the step."""
    overtaken: set[ParamState]
    """Tied parameters that get the value of the one that is stepped."""
    rebuilt: list[ParamState]
    """The parameters whose 16-bit weights are made from their masters without a step."""


def step_group(
    group: ParamGroup,
    slots: Mapping[Kind, Slot],
    settings_of: SettingsOf,
    factor: float,
    launch: Launch,
    *,
    finite: bool = False,
) -> None:
    """Step every tensor of a group that has a gradient; rebuild the weights of the others.

    ``slots`` are all on one tier and hold the newest bytes of their kinds; 16-bit weights may be missing where
    gradients are in sums. Afterwards these slots alone hold the newest bytes, and the chunks know that. Work on memory
    is launched as one piece, before anything is noted of it. ``finite``: that work raises before it changes anything
    if a gradient is not finite.
    """
    note_done(group, slots, launch_step(group, slots, settings_of, factor, launch, finite=finite))


def launch_step(
    group: ParamGroup,
    slots: Mapping[Kind, Slot],
    settings_of: SettingsOf,
    factor: float,
    launch: Launch,
    *,
    finite: bool = False,
) -> StepWork:
    """Launch the work of a group's step, and return what is to be noted of it. Arguments are those of `step_group`."""
    work = _prepare(group, slots, settings_of, factor, finite=finite)
    overwritten = Kind.P16 if Kind.ACC in slots else None  # else the gradient lies where the weight goes
    reads, writes = [], []
    for kind, slot in slots.items():
        memory = slot.memory
        if kind is not overwritten:
            reads.append(memory)
        if kind is not Kind.ACC:
            writes.append(memory)
    launch(f"step of {group.name}", reads, writes, partial(_carry_out, work.calls))
    return work


def _prepare(
    group: ParamGroup, slots: Mapping[Kind, Slot], settings_of: SettingsOf, factor: float, *, finite: bool
) -> StepWork:
    """Return the work of a group's step; nothing is changed yet. Arguments are those of `step_group`."""
    numel = group.shard_numel
    master = slots[Kind.P32].flat(torch.float32, numel)
    whole, kept = slice(0, numel), [master]
    for kind in STATES[: group.states]:  # a loop: before Python 3.12 a comprehension is a call for each group
        kept.append(slots[kind].flat(torch.float32, numel))
    weight = slots[group.weight].flat(group.dtype, numel) if group.weight is Kind.P16 else None
    checks: list[Callable[[], object]] = []
    calls: list[Callable[[], object]] = []
    stepped: dict[ParamState, Scalars] = {}
    overtaken: set[ParamState] = set()
    for run in _runs(group, settings_of):
        first, last = run.records[0], run.records[-1]
        progress = Progress(first.steps, first.scalars)
        span = slice(first.offset, last.offset + last.numel)
        if group.ranks > 1:
            span = group.clip(span)
        if span.stop > span.start:
            gradient = _gradient(run, span, weight, slots)
            target = None if weight is None else weight[span]
            if finite and isinstance(gradient, torch.Tensor):
                checks.append(partial(_check_finite, group.name, gradient))
            rows = kept if span == whole else [flat[span] for flat in kept]
            if run.settings.whole:
                rows = [first.shaped(master), *rows[1:]]
            scaled = first.factor * factor
            if isinstance(gradient, list):
                calls.append(partial(_step_together, run.settings, progress, rows, gradient, target, scaled))
            else:
                calls.append(partial(run.settings.step, progress, rows, gradient, target, scaled))
        scalars = run.settings.after(progress)
        for record in run.records:
            stepped[record] = scalars
            for other in record.others if record.tied else ():  # as memory that they share would be
                calls.append(partial(master[other.piece].copy_, master[record.piece]))
                overtaken.add(other)
    rebuilt: list[ParamState] = []
    empty = weight is not None and slots[Kind.P16].version != group.chunks[Kind.P16].version
    for record in group.tensors if weight is not None else ():
        lost = record not in stepped and (empty or record.contents is not SlotContents.WEIGHT)
        if lost or record in overtaken:
            assert weight is not None, "fp32 weights are their own masters"
            calls.append(partial(weight[record.piece].copy_, master[record.piece]))
            rebuilt.append(record)
    return StepWork([*checks, *calls], stepped, overtaken, rebuilt)


def note_done(group: ParamGroup, slots: Mapping[Kind, Slot], work: StepWork) -> None:
    """Note that the work of a step is launched: in the parameters' states, and in what is the newest of each kind."""
    for record, scalars in work.stepped.items():
        record.mark_stepped(scalars)
    count_updates([*work.stepped, *work.overtaken])
    for record in work.rebuilt:
        record.mark_rebuilt()
    for kind, slot in slots.items():  # what was written is the newest of its kind; sums are used up
        if kind is not Kind.ACC:
            chunk = group.chunks[kind]
            chunk.mark_written(slot)
            if slot is not chunk.home:
                chunk.add_copy(slot)
    if group.gathered:
        group.weight_chunk.invalidate_gathered()


def _check_finite(name: str, gradient: torch.Tensor) -> None:
    """Raise `FloatingPointError` if an element is not finite."""
    if not is_finite(gradient):
        raise FloatingPointError(
            f"a gradient of {name} is not finite, so the group was not stepped; groups whose gradients were complete "
            "before, later layers as a rule, may have been stepped within backward: load a checkpoint to go on"
        )


def _carry_out(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _gradient(
    run: _StepRun, span: slice, weight: torch.Tensor | None, slots: Mapping[Kind, Slot]
) -> torch.Tensor | list[ParamState]:
    """Return a run's gradient, or the parameters whose own tensors are concatenated when the run is stepped."""
    first = run.records[0]
    if first.gradient is GradientPlace.OWN_TENSOR:
        return run.records
    if first.gradient is GradientPlace.IN_ACCUMULATOR:
        return slots[Kind.ACC].flat(torch.float32, first.group.shard_numel)[span]
    assert weight is not None, "only 16-bit weights have gradients over them"
    return weight[span]


def _step_together(
    settings: StepSettings,
    progress: Progress,
    rows: list[torch.Tensor],
    records: list[ParamState],
    target: torch.Tensor | None,
    factor: float,
) -> None:
    """Step a run whose gradients are in several tensors."""
    settings.step(progress, rows, concatenate(records), target, factor)


@dataclass(frozen=True, slots=True)
class StepDecision:
    """Say what the step does with all gradients: multiply by a factor, or skip."""

    norm: float
    skip: bool
    factor: float
    """The factor that undoes the loss scale and clips."""
    broken: tuple[str, ...] = ()
    """Names of the parameters whose gradients are not finite."""


def warn_skipped(decision: StepDecision, step: int, skipped: int) -> None:
    """Warn of a step that changes nothing; of many such steps of the first, the second, the fourth and so on."""
    if skipped & (skipped - 1):
        return
    first, *others = decision.broken or ("",)
    what = f"the gradient of {first!r} is not finite" if first else "the norm of all gradients is not finite"
    also = f" ({len(others)} more are not, either)" if others else ""
    warn(
        f"step {step} changes no parameter: {what}{also}; {skipped} of {step} steps were such. "
        "To find where it begins: torch.autograd.set_detect_anomaly(True)"
    )


def decide(records: list[ParamState], parts: list[torch.Tensor], max_norm: float | None, scale: float) -> StepDecision:
    """Compute the global norm, and return whether to skip the step and the factor for gradients."""
    total, broken = 0.0, list[str]()
    for record, (squares, flag) in zip(records, numbers(parts), strict=True):
        total += squares * record.factor * record.factor
        if flag:
            broken.append(record.name)
    norm = math.sqrt(total) / scale if total >= 0 else math.nan
    if broken:
        return StepDecision(math.inf, True, 0.0, tuple(broken))
    if norm <= LARGEST:
        return StepDecision(norm, False, clip_factor(norm, max_norm) / scale)
    # Every element is finite, only the sum of squares overflows. A factor of at most 1 keeps each element finite.
    finite = all(abs(record.factor) <= scale for record in records)
    return StepDecision(norm, max_norm is not None or not finite, 1.0 / scale)


def numbers(parts: list[torch.Tensor]) -> list[list[float]]:
    """Return the values of every part, copied from each device in one transfer."""
    found: dict[int, list[float]] = {}
    devices = set(map(_DEVICE, parts))
    if len(devices) == 1:
        rows: list[list[float]] = torch.stack(parts).tolist()
        return rows
    for device in devices:
        chosen = [index for index, part in enumerate(parts) if part.device == device]
        found.update(zip(chosen, torch.stack([parts[index] for index in chosen]).tolist(), strict=True))
    return [found[index] for index in range(len(parts))]


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients of this norm; as in ``torch.nn.utils.clip_grad_norm_``."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


@dataclass(frozen=True, slots=True)
class BrokenStep:
    """A step that broke off."""

    decision: StepDecision
    left: frozenset[int]
    """The records that were not stepped."""
    asked: tuple[float | None, float]
    expected_sums: int
    """As `GradientStore` counts them: sums over ranks that came later are another step's."""


class StepDecisions:
    """The decisions of one model's steps; see [Note: a step is decided once]."""

    def __init__(self, gradients: GradientStore) -> None:
        self._gradients = gradients
        self.begun: BrokenStep | None = None
        """The step that broke off, if the next one may complete it."""

    def forget(self) -> None:
        """Forget the decision: new gradients come, or gradients were changed."""
        self.begun = None

    @contextmanager
    def deciding(self, pending: list[ParamState], max_norm: float | None, loss_scale: float) -> Iterator[StepDecision]:
        """Yield the step's decision, which holds until the step has ended."""
        begun, asked, sums = self.begun, (max_norm, loss_scale), self._gradients.expected_sums
        self.begun = None
        if begun is not None and (begun.left, begun.asked, begun.expected_sums) == (_indices(pending), asked, sums):
            decision = begun.decision
        else:
            parts = [record.norm_part for record in pending if record.norm_part is not None]
            if len(parts) < len(pending):
                parts = self._gradients.norm_parts(pending)
            decision = decide(pending, parts, *asked)
        try:
            yield decision
        except BaseException:
            left = _indices(record for record in pending if record.gradient is not GradientPlace.NONE)
            self.begun = BrokenStep(decision, left, asked, sums)
            raise


def _indices(records: Iterable[ParamState]) -> frozenset[int]:
    return frozenset(record.index for record in records)
