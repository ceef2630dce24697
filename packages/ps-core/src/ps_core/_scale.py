"""The largest model a machine can train at a useful speed.

Shapes are GPT-like: layers varied at some hidden sizes, and the named sizes. For each hidden size the cheap lower
bound says how many layers cannot fit; below that, real plans are made, and the answer is one that `verify` accepted.
The loss is computed in chunks of rows, as ps_models does, unless told otherwise; checkpoints are offloaded where that
helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ps_core._errors import DoesNotFit, InvalidInput
from ps_core._forecast import Forecast, Training, forecast, surely_fits
from ps_core._shapes import TransformerShape, gpt, names, shape

HIDDEN = (2048, 3072, 4096, 6144, 8192, 9216, 12288)
"""Hidden sizes tried."""
_MOST_LAYERS = 512
_GAIN = 1.01
"""Another hidden size must promise this much more before it is looked at."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The answer: a shape, and what training it would be like."""

    shape: TransformerShape
    forecast: Forecast
    limit: str
    """What stopped a larger one."""


def largest(
    training: Training, *, min_tflops: float | None = None, vocabulary: int | None = None
) -> Largest | None:
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

    def run(self) -> Largest | None:
        tops = [(hidden, self._most_layers(hidden)) for hidden in HIDDEN]
        for hidden, top in sorted(tops, key=lambda pair: -pair[0] ** 2 * pair[1]):
            self._search(hidden, top)
        for name in names():
            named = shape(name, vocabulary=self._vocabulary)
            if named.positions >= self._training.seq and named.parameters > self._enough(1.0):
                self._try(named)
        if self._best is None:
            return None
        above = [count for count in self._failed if count > self._best.shape.parameters]
        limit = self._failed[min(above)] if above else "one more layer is more than memory can hold"
        return replace(self._best, limit=limit)

    def _shape(self, hidden: int, layers: int) -> TransformerShape:
        found = gpt(layers, hidden, positions=max(1024, self._training.seq))
        return found if self._vocabulary is None else replace(found, vocabulary=self._vocabulary)

    def _enough(self, gain: float = _GAIN) -> float:
        return self._best.shape.parameters * gain if self._best else 0.0

    def _most_layers(self, hidden: int) -> int:
        """The most layers that the lower bound does not rule out."""
        low, high = 0, _MOST_LAYERS + 1
        while high - low > 1:
            middle = (low + high) // 2
            if any(True for _ in self._ways(self._shape(hidden, middle))):
                low = middle
            else:
                high = middle
        return low

    def _search(self, hidden: int, top: int) -> None:
        """Down from ``top`` in growing strides until a plan is good enough, then back up by halves."""
        one, two = self._shape(hidden, 1).parameters, self._shape(hidden, 2).parameters
        low = max(1, int((self._enough() - one) // (two - one)) + 2)
        if low > top:
            return
        bad, layers, stride = top + 1, top, max(1, top // 64)
        while not self._try(self._shape(hidden, layers)):
            if layers == low:
                return
            bad, layers, stride = layers, max(low, layers - stride), 2 * stride
        good = layers
        while bad - good > 1:
            middle = (good + bad) // 2
            if self._try(self._shape(hidden, middle)):
                good = middle
            else:
                bad = middle

    def _ways(self, model: TransformerShape) -> Iterator[Training]:
        """Trainings the lower bound does not rule out, checkpoints kept on the compute tier first."""
        asked = self._training.offload_checkpoints
        offloads = self._training.checkpointing and len(self._training.cluster.tiers()) > 1
        for offload in ((False, True) if offloads else (False,)) if asked is None else (asked,):
            training = replace(self._training, offload_checkpoints=offload)
            if surely_fits(model, training) is not False:
                yield training

    def _try(self, model: TransformerShape) -> bool:
        """Whether there is a plan of enough speed; if so it is the best so far."""
        reason = "does not fit"
        for training in self._ways(model):
            try:
                told = forecast(model, training)
            except DoesNotFit as refusal:
                reason = f"{refusal.tier} is too small"
                continue
            if told.tflops_per_gpu >= self._least:
                self._best = Largest(shape=model, forecast=told, limit="")
                return True
            reason = f"{told.tflops_per_gpu:.3g} TFLOPS per GPU, below {self._least:.3g}"
        self._failed[model.parameters] = f"{model.name}: {reason}"
        return False
