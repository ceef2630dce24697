"""What a managed model's first pass will touch, found before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ps_core._errors import InvalidInput
from ps_core._trace import Amounts, Phase, Trace
from ps_core.engine._parameters.state import TensorRecord
from ps_core.engine._tracing.child import ChildFailed, in_child
from ps_core.engine._tracing.fake_trace import Wanted, fake_pass
from ps_core.engine._tracing.moments import Beat, Recording

_TIMEOUT_S = 120.0


def foresee(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    records: list[TensorRecord],
    plain: Callable[[], None],
    cast: torch.dtype | None,
) -> Recording | None:
    """The moments of a training pass, from a fake-tensor pass; None where the model does not allow one.

    ``plain`` takes the engine's hooks off; it is called in a copy of the process only. A model that does not return its
    loss cannot be foreseen: what its caller computes from the outputs is part of the pass. Nor can any once CUDA has
    begun: in a copy of such a process whatever comes to CUDA fails, or ends it, and PyTorch's backward pass may.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    record_of = {record.name: record for record in records}
    wanted = Wanted(
        unit_of=lambda name: record_of[name].group.index if name in record_of else -1,
        dtype_of=lambda name: record_of[name].dtype if name in record_of else torch.float32,
        input_dtype=cast,
        stays_on_host=lambda name: name in record_of and record_of[name].group.on_host,
    )

    def work() -> str:
        plain()
        return fake_pass(model, args, kwargs, wanted).to_json()

    try:
        trace = Trace.from_json(in_child(work, _TIMEOUT_S))
    except (ChildFailed, InvalidInput):
        return None
    return _as_recording(trace, record_of)


def _as_recording(trace: Trace, record_of: dict[str, TensorRecord]) -> Recording:
    found = [record_of.get(tensor.name) for tensor in trace.tensors]
    recording, above, besides = Recording(), 0, Amounts()
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
            Beat(
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


def _add(beat: Beat, nonmodel_bytes: int, work: Amounts) -> tuple[int, Amounts]:
    """More of a moment; nothing is left of it."""
    assert beat.work is not None, "a fake pass counts it"
    beat.nonmodel_bytes, beat.work = max(beat.nonmodel_bytes, nonmodel_bytes), beat.work.plus(work)
    return 0, Amounts()
