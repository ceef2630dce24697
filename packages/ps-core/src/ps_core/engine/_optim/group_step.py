"""One group's optimizer step: runs of neighbours with equal settings, each in one call of a kernel.

[Note: what may depend on where]
Nothing. A kernel's result does not depend on how a vector is cut, norms are summed tensor by tensor in the order of
the parameters, and whatever tier a chunk is on, the same arithmetic is done to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from ps_core._program import STATES, Kind
from ps_core.engine._gradients.gradient_store import CONCATENATED_NUMEL, SMALL_NUMEL, concatenate
from ps_core.engine._gradients.gradient_sums import Launch, measured
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._optim.settings import Progress, Scalars, StepSettings
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.state_transitions import GradientPlace, SlotContents

SettingsOf = Callable[[ParamState], StepSettings]


class _StepRun(NamedTuple):
    """Neighbouring tensors that one call steps."""

    records: list[ParamState]
    settings: StepSettings


def _runs(group: ParamGroup, settings_of: SettingsOf) -> list[_StepRun]:
    """Cut a group's tensors with gradients into runs; what is put together for one run is not large."""
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
        and (one.gradient is not GradientPlace.OWN_TENSOR or max(one.numel, other.numel) < SMALL_NUMEL)
        and one.steps == other.steps
        and one.scalars == other.scalars
        and one.factor == other.factor
        and settings_of(one) == settings_of(other)
        and not (one.tied or other.tied)
    )


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

    ``slots`` are all on one tier and hold the newest of their kind. Afterwards they alone do, and the chunks know it.
    What touches memory is launched as one piece of work, before anything is noted of it. ``finite``: that work raises
    before it changes anything if a gradient is not finite.
    """
    numel = group.shard_numel
    master = slots[Kind.P32].flat(torch.float32, numel)
    whole, kept = slice(0, numel), [master]
    for kind in STATES[: group.states]:
        kept.append(slots[kind].flat(torch.float32, numel))
    weight = slots[group.weight].flat(group.dtype, numel) if group.weight is Kind.P16 else None
    calls: list[Callable[[], object]] = []
    checks: list[Callable[[], object]] = []
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
    rebuilt = [
        record
        for record in group.tensors
        if weight is not None
        and ((record not in stepped and record.contents is not SlotContents.WEIGHT) or record in overtaken)
    ]
    calls += [partial(weight[each.piece].copy_, master[each.piece]) for each in rebuilt if weight is not None]
    overwritten = Kind.P16 if Kind.ACC in slots else None  # else the gradient lies where the weight goes
    reads, writes = [], []
    for kind, slot in slots.items():
        memory = slot.memory
        if kind is not overwritten:
            reads.append(memory)
        if kind is not Kind.ACC:
            writes.append(memory)
    launch(f"step of {group.name}", reads, writes, partial(_carry_out, [*checks, *calls]))
    for record, scalars in stepped.items():
        record.mark_stepped(scalars)
    for record in overtaken:
        record.update_count += 1
    for record in rebuilt:
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
    if measured(gradient)[1]:
        raise FloatingPointError(
            f"a gradient of {name} is not finite, so the group was not stepped; groups whose gradients were complete "
            "before, later layers as a rule, were stepped within backward"
        )


def _carry_out(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _gradient(
    run: _StepRun, span: slice, weight: torch.Tensor | None, slots: Mapping[Kind, Slot]
) -> torch.Tensor | list[ParamState]:
    """Return the gradient of a run, or the parameters whose own tensors are put together when the run is stepped."""
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
