"""The largest model a machine can train at a useful speed.

Shapes are GPT-like: layers varied at some hidden sizes, and the named sizes. For each hidden size the cheap lower
bound says how many layers cannot fit; below that, real plans are made, and the answer is one that `verify` accepted.
The loss is computed in chunks of rows, as ps_models does, unless told otherwise; checkpoints are offloaded where that
helps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ps_core._command.forecast import Forecast, Training, bounds, forecast, model_of
from ps_core._errors import DoesNotFit, InvalidInput
from ps_core._workloads.apart import check_apart
from ps_core._workloads.named import gpt, names, shape
from ps_core._workloads.shapes import Family, TransformerShape

HIDDEN = (2048, 3072, 4096, 6144, 8192, 9216, 12288)
"""Hidden sizes tried."""
_MOST_LAYERS = 512
_DEEP = 160
"""Layers up to which the group size is searched; beyond, groups hold several layers, so that planning stays quick."""
_LEAST_BYTES = 14
"""Of model data, a parameter."""
_GAIN = 1.02
"""Another hidden size must promise this much more before it is looked at."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The answer: a shape, and what training it would be like."""

    shape: TransformerShape
    forecast: Forecast
    limit: str
    """What stopped a larger one."""


def largest(training: Training, *, min_tflops: float | None = None, vocabulary: int | None = None) -> Largest | None:
    """The most parameters for which a verified plan keeps each GPU at ``min_tflops`` (None: half its matmul rate).

    None if not even the smallest model does.
    """
    least = training.peak_flops / 2e12 if min_tflops is None else min_tflops
    if not 0 <= least < math.inf:
        raise InvalidInput(f"--min-tflops must be a number of at least 0, found {least:g}")
    return _Hunt(training, least, vocabulary).run()


class _Hunt:
    """Keeps the largest shape found so far, and the smallest above it that failed."""

    def __init__(self, training: Training, least: float, vocabulary: int | None) -> None:
        self._training = training
        self._least = least
        self._vocabulary = vocabulary
        self._best: Largest | None = None
        self._failed: dict[int, str] = {}
        self._last = 0.0

    def run(self) -> Largest | None:
        training = self._training
        check_apart(self._shape(HIDDEN[0], 1), head_tiles=training.head_tiles, cpu_embedding=training.cpu_embedding)
        tops = [(hidden, self._most_layers(hidden)) for hidden in HIDDEN]
        for hidden, top in sorted(tops, key=lambda pair: -(pair[0] ** 2) * pair[1]):
            self._search(hidden, top)
        for name in names():
            named = shape(name, vocabulary=self._vocabulary)
            if training.untied_head and named.family is Family.BERT:
                continue
            named = self._as_asked(named)
            if named.positions >= self._training.seq and named.parameters > self._enough():
                self._try(named)
        if self._best is None:
            return None
        above = [count for count in self._failed if count > self._best.shape.parameters]
        limit = self._failed[min(above)] if above else "one more layer is more than memory can hold"
        return replace(self._best, limit=limit)

    def _shape(self, hidden: int, layers: int) -> TransformerShape:
        found = gpt(layers, hidden, positions=max(1024, self._training.seq))
        return self._as_asked(found if self._vocabulary is None else replace(found, vocabulary=self._vocabulary))

    def _as_asked(self, found: TransformerShape) -> TransformerShape:
        """With a head of its own, where that is asked for."""
        model = model_of(found, self._training)
        assert isinstance(model, TransformerShape), "a shape's model is a shape"
        return model

    def _enough(self) -> float:
        return self._best.shape.parameters * _GAIN if self._best else 0.0

    def _most_layers(self, hidden: int) -> int:
        """The most layers that the lower bound does not rule out, looked for from what bytes alone allow."""
        one, two = self._shape(hidden, 1).parameters, self._shape(hidden, 2).parameters
        cluster = self._training.cluster
        room = sum(tier.capacity_bytes for tier in cluster.tiers()) * cluster.gpus
        bad = min(_MOST_LAYERS, room // (_LEAST_BYTES * (two - one))) + 1
        good, stride = bad - 1, 1
        while good > 0 and not self._possible(hidden, good):
            bad, good, stride = good, good - stride, 2 * stride
        good = max(0, good)
        while bad - good > 1:
            middle = (good + bad) // 2
            if self._possible(hidden, middle):
                good = middle
            else:
                bad = middle
        return good

    def _possible(self, hidden: int, layers: int) -> bool:
        return bool(self._ways(self._shape(hidden, layers)))

    def _search(self, hidden: int, top: int) -> None:
        """Find the most layers that will do: between a count that would be better than the best and the bound."""
        one, two = self._shape(hidden, 1).parameters, self._shape(hidden, 2).parameters
        low = max(1, int((self._enough() - one) // (two - one)) + 2)
        if low > top:
            return
        good, bad = low, top + 1
        if self._best is not None:
            if not self._try(self._shape(hidden, low)):
                return
        else:
            good, bad = self._descend(hidden, top)
        while bad - good > 1:
            middle = bad - 1 if bad > top else (good + bad) // 2
            if self._try(self._shape(hidden, middle)):
                good = middle
            else:
                bad = middle

    def _descend(self, hidden: int, top: int) -> tuple[int, int]:
        """Down from the bound in growing strides: a count that will do (0: none), and one above it that will not."""
        bad, layers, stride = top + 1, top, max(1, top // 64)
        while layers > 0 and not self._try(self._shape(hidden, layers)):
            shortfall = max(0.0, 1 - self._last / self._least) if self._last else 0.0
            stride = max(stride, int(layers * shortfall / 2))
            bad, layers, stride = layers, layers - stride, 2 * stride
        return max(0, layers), bad

    def _ways(self, model: TransformerShape) -> list[Training]:
        """Trainings the lower bound does not rule out, the one it leaves most room first."""
        asked = self._training.offload_checkpoints
        offloads = self._training.checkpointing and len(self._training.cluster.tiers()) > 1
        ways = []
        for offload in ((False, True) if offloads else (False,)) if asked is None else (asked,):
            training = replace(self._training, offload_checkpoints=offload)
            if model.layers > _DEEP and training.group_bytes is None:
                layer = 13 * model.hidden**2 * training.weight_bytes
                training = replace(training, group_bytes=-(-model.layers // _DEEP) * layer)
            room = min(-need.missing_bytes / max(1, need.available_bytes) for need in bounds(model, training))
            if room >= 0:
                ways.append((room, training))
        return [training for _, training in sorted(ways, key=lambda way: -way[0])]

    def _try(self, model: TransformerShape) -> bool:
        """Whether there is a plan of enough speed; if so it is the best so far.

        Where memory is so short that the first way had to move extents one at a time, the other is not looked at.
        """
        reason, self._last = "does not fit", 0.0
        for training in self._ways(model):
            try:
                told = forecast(model, training)
            except DoesNotFit as refusal:
                reason = f"{refusal.tier} is too small"
                break
            self._last = max(self._last, told.tflops_per_gpu)
            if told.tflops_per_gpu >= self._least:
                self._best = Largest(shape=model, forecast=told, limit="")
                return True
            reason = f"{told.tflops_per_gpu:.3g} TFLOPS per GPU, below {self._least:.3g}"
            if told.planned.placement is None:
                break
        self._failed[model.parameters] = f"{model.name}: {reason}"
        return False
