"""What a managed model's first pass will touch, found before it runs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ps_core._errors import InvalidInput
from ps_core._trace import Amounts, Phase, Trace
from ps_core.engine._parameters.state import ParamState
from ps_core.engine._tracing.child import ChildFailed, WorkRaised, in_child
from ps_core.engine._tracing.fake_trace import FakePassOptions, NoLoss, fake_pass
from ps_core.engine._tracing.moments import MomentRecord, PassRecording

_TIMEOUT_S = 120.0
_MOST_CHARACTERS = 240


class NotForeseen(Exception):
    """Nothing is known of the first pass before it runs; the message says why."""


class ReturnsNoLoss(NotForeseen):
    """The model returns no loss, as many do: what its caller computes from the outputs is part of the pass."""

    def __init__(self) -> None:
        super().__init__("the model returns no loss")


def estimate_first_pass(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    records: list[ParamState],
    plain: Callable[[], None],
    cast: torch.dtype | None,
) -> PassRecording:
    """Return the moments of a training pass, from a pass on fake tensors in a copy of this process.

    `NotForeseen` where there can be none. ``plain`` takes the engine's hooks off; it is called in the copy only. Once
    CUDA has begun no copy will do: whatever comes to CUDA fails there, or ends it, and PyTorch's backward pass may.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise NotForeseen("CUDA has begun in this process, so no copy of it can trace the model")
    record_of = {record.name: record for record in records}
    wanted = FakePassOptions(
        unit_of=lambda name: record_of[name].group.index if name in record_of else -1,
        dtype_of=lambda name: record_of[name].dtype if name in record_of else torch.float32,
        input_dtype=cast,
        stays_on_host=lambda name: name in record_of and record_of[name].group.on_host,
    )

    def work() -> str:
        plain()
        try:
            return fake_pass(model, args, kwargs, wanted).to_json()
        except NoLoss:
            return ""

    try:
        found = in_child(work, _TIMEOUT_S)
        if not found:
            raise ReturnsNoLoss
        recording = _as_recording(Trace.from_json(found), record_of)
    except (WorkRaised, InvalidInput) as error:
        raise NotForeseen(f"fake tensors cannot follow the model: {_shortened(error)}") from None
    except ChildFailed as error:
        raise NotForeseen(f"a copy of this process could not trace the model: {_shortened(error)}") from None
    if not recording.complete:
        raise NotForeseen("its backward pass reaches no parameter that is moved")
    return recording


def _shortened(error: Exception) -> str:
    return textwrap.shorten(str(error), _MOST_CHARACTERS, placeholder=" ...")


def _as_recording(trace: Trace, record_of: dict[str, ParamState]) -> PassRecording:
    found = [record_of.get(tensor.name) for tensor in trace.tensors]
    recording, above, besides = PassRecording(), 0, Amounts()
    for moment in trace.moments:
        reads = [record for index in moment.reads if (record := found[index]) is not None]
        grads = [record for index in moment.grads if (record := found[index]) is not None]
        groups = dict.fromkeys(record.group.index for record in reads if not record.group.pinned)
        gains = dict.fromkeys(record.group.index for record in grads if not record.group.pinned)
        if (
            not groups and not gains
        ):  # what is always there begins no moment: all this is the last one's, or the first's
            above = max(above, moment.nonmodel_bytes)
            besides = besides.plus(moment.amounts)
            if recording.beats:
                above, besides = _add(recording.beats[-1], above, besides)
            continue
        recording.beats.append(
            MomentRecord(
                moment.phase is Phase.BACKWARD,
                tuple(groups),
                tuple(gains),
                tuple(record.index for index in moment.holds if (record := found[index]) is not None),
                name=f"{moment.phase.value} of {(reads or grads)[0].name}",
                touched=dict.fromkeys(record.index for record in reads),
                grads=dict.fromkeys(record.index for record in grads),
                nonmodel_bytes=moment.nonmodel_bytes,
                work=moment.amounts,
            )
        )
        above, besides = _add(recording.beats[-1], above, besides)
    return recording


def _add(beat: MomentRecord, nonmodel_bytes: int, work: Amounts) -> tuple[int, Amounts]:
    """More of a moment; nothing is left of it."""
    assert beat.work is not None, "a fake pass counts it"
    beat.nonmodel_bytes, beat.work = max(beat.nonmodel_bytes, nonmodel_bytes), beat.work.plus(work)
    return 0, Amounts()
