"""Estimate what a managed model's first pass touches, before it runs; and compare the pass with the estimate."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ps_core._trace import Amounts, Phase, Trace
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._tracing.activation_log import ActivationLog
from ps_core.engine._tracing.fake_copy import CannotCopy
from ps_core.engine._tracing.fake_trace import FakePassOptions, NoLoss, describe, fake_pass
from ps_core.engine._tracing.pass_recording import MomentRecord, PassRecording

_MOST_CHARACTERS = 240


class NotForeseen(Exception):
    """Say that the first pass cannot be estimated; the message says why."""


class ReturnsNoLoss(NotForeseen):
    """Say that the model returns no loss: what its caller computes from the outputs is not known."""


def estimate_first_pass(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    records: list[ParamState],
    cast: torch.dtype | None,
    shared: Iterable[object],
) -> PassRecording:
    """Estimate the moments of a training pass, from a pass on fake tensors with a copy of the model.

    Objects in ``shared`` belong to the model and are not copied. `NotForeseen` says why there is no estimate.
    """
    record_of = {record.name: record for record in records}
    options = FakePassOptions(
        unit_of=lambda name: record_of[name].group.index if name in record_of else -1,
        dtype_of=lambda name: record_of[name].dtype if name in record_of else torch.float32,
        input_dtype=cast,
        stays_on_host=lambda name: name in record_of and record_of[name].group.on_host,
    )
    kind, why = NotForeseen, ""
    try:
        recording = _as_recording(fake_pass(model, args, kwargs, options, shared), record_of)
    except NoLoss:
        kind, why = ReturnsNoLoss, "the model returns no loss"
    except CannotCopy as error:
        why = f"the model cannot be copied: {_shortened(error)}"
    except Exception as error:  # any exception of the model's code on fake tensors
        why = f"fake tensors cannot follow the model: {_shortened(error)}"
    if why:
        raise kind(why)  # not in the clauses above: it would hold that exception, whose frames hold tensors
    if not recording.complete:
        raise NotForeseen("its backward pass reaches no parameter that is moved")
    return recording


def _shortened(error: Exception) -> str:
    return textwrap.shorten(describe(error), _MOST_CHARACTERS, placeholder=" ...")


def _as_recording(trace: Trace, record_of: dict[str, ParamState]) -> PassRecording:
    found = [record_of.get(tensor.name) for tensor in trace.tensors]
    recording, above, besides = PassRecording(foreseen=True), 0, Amounts()
    numbers: list[int] = []
    for moment in trace.moments:
        reads = [record for index in moment.reads if (record := found[index]) is not None]
        grads = [record for index in moment.grads if (record := found[index]) is not None]
        groups = dict.fromkeys(record.group.index for record in reads if not record.group.pinned)
        grad_groups = dict.fromkeys(record.group.index for record in grads if not record.group.pinned)
        if (
            not groups and not grad_groups
        ):  # what is always there begins no moment: all this is the last one's, or the first's
            above = max(above, moment.nonmodel_bytes)
            besides = besides.plus(moment.amounts)
            if recording.moments:
                above, besides = _add(recording.moments[-1], above, besides)
            numbers.append(max(0, len(recording.moments) - 1))
            continue
        numbers.append(len(recording.moments))
        recording.moments.append(
            MomentRecord(
                moment.phase is Phase.BACKWARD,
                tuple(groups),
                tuple(grad_groups),
                tuple(record.index for index in moment.holds if (record := found[index]) is not None),
                name=f"{moment.phase.value} of {(reads or grads)[0].name}",
                touched=dict.fromkeys(record.index for record in reads),
                grads=dict.fromkeys(record.index for record in grads),
                nonmodel_bytes=moment.nonmodel_bytes,
                work=moment.amounts,
            )
        )
        above, besides = _add(recording.moments[-1], above, besides)
    recording.activations = ActivationLog.of_trace(trace.activations, zip(numbers, trace.moments, strict=True))
    return recording


def _add(moment: MomentRecord, nonmodel_bytes: int, work: Amounts) -> tuple[int, Amounts]:
    """Add bytes and work to a moment; return zeros, since nothing is left to add."""
    assert moment.work is not None, "a fake pass counts it"
    moment.nonmodel_bytes, moment.work = max(moment.nonmodel_bytes, nonmodel_bytes), moment.work.plus(work)
    return 0, Amounts()


def matches_estimate(recording: PassRecording, estimate: PassRecording) -> bool:
    """Return True if a pass went as estimated and needed no more non-model bytes; its plan then stays in force.

    What its moments computed is taken from the estimate, also where only the bytes are others.
    """
    if not same_moments(recording, estimate):
        return False
    for moment, like in zip(recording.moments, estimate.moments, strict=True):
        moment.work = like.work
    return recording.peak_nonmodel_bytes <= estimate.peak_nonmodel_bytes


def same_moments(one: PassRecording, other: PassRecording) -> bool:
    """Return True if two passes do the same in each moment, and move the same activations; bytes may differ."""
    mine, yours = map(_outline, one.moments), map(_outline, other.moments)
    return list(mine) == list(yours) and one.moved_activations == other.moved_activations


def begins_like(one: PassRecording, other: PassRecording) -> bool:
    """Return True if all moments of one pass are another's first ones; bytes may differ."""
    count = len(one.moments)
    return 0 < count <= len(other.moments) and same_moments(
        PassRecording(one.moments), PassRecording(other.moments[:count])
    )


def begins_like_estimate(recording: PassRecording, estimate: PassRecording) -> bool:
    """Return True if a pass that broke off had gone as estimated until then; the plan is then used again."""
    count = len(recording.moments)
    if not 0 < count < len(estimate.moments):
        return False
    ran, foreseen = recording.moments[-1], estimate.moments[count - 1]
    last = ran.backward is foreseen.backward and ran.touched.keys() <= {*foreseen.touched, *foreseen.held}
    before = PassRecording(recording.moments[:-1]), PassRecording(estimate.moments[: count - 1])
    return last and matches_estimate(*before)


def _outline(moment: MomentRecord) -> tuple[bool, set[int], set[int], set[int]]:
    """Return what a moment does, without its non-model bytes."""
    return moment.backward, {*moment.touched, *moment.held}, set(moment.held), set(moment.grads)
