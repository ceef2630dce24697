"""Find the largest model that a machine can train at a useful speed.

Shapes are GPT-like: layers varied at some hidden sizes, and the named sizes. For each hidden size the cheap lower bound
says how many layers cannot fit. Below that, real plans are made, and the answer is one that `verify` accepted. The loss
is computed in chunks of rows, as ps_models does, unless told otherwise. Inputs of recomputed blocks are offloaded
where that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from ps_core._command.forecast import Forecast, Training, Way, bounds, computing_s, model_of
from ps_core._errors import DoesNotFit, InvalidInput
from ps_core._planner.search import TooSlow
from ps_core._units import format_count
from ps_core._workloads.head_and_token_table import check_apart
from ps_core._workloads.named_shapes import gpt, names, shape
from ps_core._workloads.shapes import Family, TransformerShape

HIDDEN = (2048, 3072, 4096, 6144, 8192, 9216, 12288)
"""Hidden sizes that are tried."""
_MOST_LAYERS = 512
_DEEP = 160
"""Group sizes are searched up to this many layers. Beyond, groups hold several layers, so that planning stays quick."""
_FEW_LAYERS = 8
"""Layers of the small models from which the bound of larger ones is extrapolated."""
_LEAST_BYTES = 14
"""The least bytes of model data for a parameter."""
_GAIN = 1.02
"""Another hidden size is tried only if it may have more parameters by this factor."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest shape, and what training it would be like."""

    shape: TransformerShape
    forecast: Forecast
    limit: str
    """What made a larger model fail."""


def largest(
    training: Training,
    *,
    min_tflops: float | None = None,
    vocabulary: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Largest | None:
    """Return the largest model for which a verified plan keeps each GPU at ``min_tflops`` (None: half its matmul rate).

    Return None if not even the smallest model reaches that; raise `TooFast` if no computer of this rate could. ``tell``
    is called with what is tried.
    """
    least = training.peak_flops / 2e12 if min_tflops is None else min_tflops
    if not 0 <= least < math.inf:
        raise InvalidInput(f"--min-tflops must be a number of at least 0, found {least:g}")
    return _Hunt(training, least, vocabulary, tell).run()


class TooFast(Exception):
    """Say that no model reaches so many TFLOPS, even if nothing ever moved."""

    def __init__(self, least: float, most: float) -> None:
        super().__init__(
            f"no model does: --min-tflops {least:g} is more than {most:.3g} TFLOPS per GPU, which this machine's "
            "rates allow where nothing ever waits"
        )


class _Hunt:
    """Remember the largest shape found so far, and the smallest one above it that failed."""

    def __init__(self, training: Training, least: float, vocabulary: int | None, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._training = training
        self._least = least
        self._vocabulary = vocabulary
        self._best: Largest | None = None
        self._failed: dict[int, str] = {}
        self._last = 0.0
        """TFLOPS of the last plan that was too slow; 0: its moves did not overlap, or there was none."""

    def run(self) -> Largest | None:
        training = self._training
        check_apart(self._shape(HIDDEN[0], 1), head_tiles=training.head_tiles, cpu_embedding=training.cpu_embedding)
        self._check_rate()
        tops = [(hidden, self._most_layers(hidden)) for hidden in HIDDEN]
        for hidden, top in sorted(tops, key=lambda pair: -(pair[0] ** 2) * pair[1]):
            self._search(hidden, top)
        for named in self._named():
            if named.parameters > self._enough():
                self._try(named)
        if self._best is None:
            return None
        above = [count for count in self._failed if count > self._best.shape.parameters]
        limit = self._failed[min(above)] if above else "one more layer is more than memory can hold"
        return replace(self._best, limit=limit)

    def _check_rate(self) -> None:
        """Raise `TooFast` for a speed that computing alone does not reach: it only rises, or only falls, with more
        layers.
        """
        most = 0.0
        ends = (self._shape(hidden, layers) for hidden in HIDDEN for layers in (1, _MOST_LAYERS))
        for model in chain(ends, self._named()):
            most = max(most, self._operations(model) / computing_s(model, self._training) / 1e12)
            if most >= self._least:
                return
        raise TooFast(self._least, most)

    def _named(self) -> Iterator[TransformerShape]:
        """Yield the named sizes that can be trained as requested."""
        for name in names():
            model = shape(name, vocabulary=self._vocabulary)
            if model.positions >= self._training.seq and not (
                self._training.untied_head and model.family is Family.BERT
            ):
                yield self._as_asked(model)

    def _shape(self, hidden: int, layers: int) -> TransformerShape:
        found = gpt(layers, hidden, positions=max(1024, self._training.seq))
        return self._as_asked(found if self._vocabulary is None else replace(found, vocabulary=self._vocabulary))

    def _as_asked(self, found: TransformerShape) -> TransformerShape:
        """Return the shape, with a separate head if that is requested."""
        model = model_of(found, self._training)
        assert isinstance(model, TransformerShape), "a shape's model is a shape"
        return model

    def _enough(self) -> float:
        return self._best.shape.parameters * _GAIN if self._best else 0.0

    def _most_layers(self, hidden: int) -> int:
        """Return the most layers that the lower bound does not exclude, searched around an extrapolation from small
        models.
        """
        one, two = self._shape(hidden, 1).parameters, self._shape(hidden, 2).parameters
        cluster = self._training.cluster
        room = sum(tier.capacity_bytes for tier in cluster.tiers()) * cluster.gpus // cluster.copies
        most = min(_MOST_LAYERS, room // (_LEAST_BYTES * (two - one)))
        good, bad, stride = 0, most + 1, 1
        probe = max(1, min(most, self._expected_layers(hidden)))
        while bad - good > 1:
            if self._possible(hidden, probe):
                good = probe
            else:
                bad = probe
            if good and bad <= most:
                probe = (good + bad) // 2
            else:
                probe = min(good + stride, most) if good else max(bad - stride, 1)
            stride *= 2
        return good

    def _expected_layers(self, hidden: int) -> int:
        """Return how many layers the lower bound allows by extrapolation; needs grow evenly but for the cut of
        groups.
        """
        found = 0.0
        few, more = _FEW_LAYERS, 2 * _FEW_LAYERS
        for training in self._asked():
            first, second = (bounds(self._shape(hidden, layers), training) for layers in (few, more))
            grown = [
                few - few * low.missing_bytes / max(1, high.needed_bytes - low.needed_bytes)
                for low, high in zip(first, second, strict=False)
            ]
            found = max(found, min(grown))
        return min(_MOST_LAYERS, int(found))

    def _possible(self, hidden: int, layers: int) -> bool:
        return next(self._ways(self._shape(hidden, layers)), None) is not None

    def _search(self, hidden: int, top: int) -> None:
        """Find the most layers that work: between a count that would beat the best so far and the bound."""
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
        """Search down from the bound in growing steps; return a count that works (0: none) and one above that fails."""
        bad, layers, stride = top + 1, top, max(1, top // 64)
        while layers > 0 and not self._try(self._shape(hidden, layers)):
            shortfall = max(0.0, 1 - self._last / self._least) if self._last else 0.0
            stride = max(stride, int(layers * shortfall / 2))
            bad, layers, stride = layers, layers - stride, 2 * stride
        return max(0, layers), bad

    def _ways(self, model: TransformerShape) -> Iterator[tuple[float, Training]]:
        """Yield trainings that the lower bound does not exclude, and the fraction of memory that it leaves."""
        for training in self._asked():
            if model.layers > _DEEP and training.group_bytes is None:
                layer = 13 * model.hidden**2 * training.weight_bytes
                training = replace(training, group_bytes=-(-model.layers // _DEEP) * layer)
            room = min(-need.missing_bytes / max(1, need.available_bytes) for need in bounds(model, training))
            if room >= 0:
                yield room, training

    def _asked(self) -> Iterator[Training]:
        """Yield the training with checkpoints off the GPU and on it, or only the requested one."""
        asked = self._training.offload_checkpoints
        offloads = self._training.checkpointing and len(self._training.cluster.tiers()) > 1
        for offload in ((True, False) if offloads else (False,)) if asked is None else (asked,):
            yield replace(self._training, offload_checkpoints=offload)

    def _try(self, model: TransformerShape) -> bool:
        """Return True if there is a plan of sufficient speed; it is then the best so far."""
        best = "" if self._best is None else f"; best so far: {self._best.shape.name}"
        self._tell(f"trying {model.name}, {format_count(model.parameters)} parameters{best}")
        self._last, reason = 0.0, "does not fit"
        for attempt, overlaps in self._attempts(model):
            try:
                told = attempt()
            except TooSlow as slow:
                speed = self._operations(model) / slow.step_time_s / 1e12
            except DoesNotFit as refusal:
                reason = f"{refusal.tier} is too small"
                continue
            else:
                if told is None:
                    continue
                speed = told.tflops_per_gpu
                if speed >= self._least:
                    self._best = Largest(shape=model, forecast=told, limit="")
                    return True
            self._last = speed if overlaps else 0.0
            reason = f"{speed:.3g} TFLOPS per GPU, below {self._least:.3g}"
        self._failed[model.parameters] = f"{model.name}: {reason}"
        return False

    def _attempts(self, model: TransformerShape) -> Iterator[tuple[Callable[[], Forecast | None], bool]]:
        """Yield every way to plan the model, the one with most free memory first, and whether its moves overlap.

        Plans that move one thing at a time are tried only if there is no other plan.
        """
        slowest_s = self._operations(model) / self._least / 1e12 if self._least else math.inf
        ways = [
            Way(model, training, offload=bool(training.offload_checkpoints), slowest_s=slowest_s)
            for _, training in sorted(self._ways(model), key=lambda way: -way[0])
        ]
        yield from ((way.roomy, True) for way in ways)
        if ways and not self._last:
            yield ways[0].tight, False

    def _operations(self, model: TransformerShape) -> int:
        """Return the operations of a step on one GPU, as TFLOPS are counted."""
        return 8 * model.parameters * self._training.batch * self._training.seq * self._training.accumulate
