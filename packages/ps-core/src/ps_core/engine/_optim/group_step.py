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

import ps_kernels
from ps_core._program import Kind
from ps_core.engine._gradients.gradient_store import CONCATENATED_NUMEL, SMALL_NUMEL, concatenate
from ps_core.engine._gradients.gradient_sums import Launch, measured
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._optim.settings import Settings, StepRule
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.state_transitions import GradientPlace, SlotContents

SettingsOf = Callable[[ParamState], Settings]


class _StepRun(NamedTuple):
    """Neighbouring tensors that one call steps."""

    records: list[ParamState]
    settings: Settings


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
    moments = slots[Kind.M].flat(torch.float32, numel), slots[Kind.V].flat(torch.float32, numel)
    weight = slots[group.weight].flat(group.dtype, numel) if group.weight is Kind.P16 else None
    calls: list[Callable[[], object]] = []
    checks: list[Callable[[], object]] = []
    stepped: dict[ParamState, None] = {}
    overtaken: set[ParamState] = set()
    for run in _runs(group, settings_of):
        first, last = run.records[0], run.records[-1]
        span = slice(first.offset, last.offset + last.numel)
        if group.ranks > 1:
            span = group.clip(span)
        if span.stop > span.start:
            gradient = _gradient(run, span, weight, slots)
            target = None if weight is None else weight[span]
            if finite and isinstance(gradient, torch.Tensor):
                checks.append(partial(_check_finite, group.name, gradient))
            rows = master[span], moments[0][span], moments[1][span]
            calls.append(partial(_step, run.settings, first.steps + 1, rows, gradient, target, first.factor * factor))
        for record in run.records:
            stepped[record] = None
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
    memory = {kind: slot.memory for kind, slot in slots.items()}
    reads = list(memory.values())
    memory.pop(Kind.ACC, None)
    launch(f"step of {group.name}", reads, list(memory.values()), partial(_carry_out, [*checks, *calls]))
    for record in stepped:
        record.mark_stepped()
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


def _step(
    settings: Settings,
    number: int,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gradient: torch.Tensor | list[ParamState],
    target: torch.Tensor | None,
    factor: float,
) -> None:
    """Make a parameter's step with this number."""
    master, momentum, variance = rows
    if isinstance(gradient, list):
        gradient = concatenate(gradient)
    if settings.kind is StepRule.SGD:
        ps_kernels.sgd_step(
            master,
            momentum if settings.momentum else None,
            gradient,
            target,
            lr=settings.lr,
            momentum_decay=settings.momentum,
            weight_decay=settings.weight_decay,
            grad_scale=factor,
        )
        return
    ps_kernels.adam_step(
        master,
        momentum,
        variance,
        gradient,
        target,
        step=number,
        lr=settings.lr,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        decoupled=settings.decoupled,
        grad_scale=factor,
    )
