"""Train a small network to predict the next byte of a text, in pure Python, moment by moment.

    x_0     = embedding[byte]                                       T x D
    block   h = rms_norm(x) * gain;  z_t = [h_t, h_t-1]             T x 2D
            u = relu(z up + bias)                                   T x H
            x = x + u down
    head    y = rms_norm(x) * gain;  logits = y embedding^T         tied with the embedding

    T tokens, D width, H hidden, V classes (a byte's low five bits: letters alike in either case).

Each moment is a pure function, as an engine's would be. Its inputs are the weights it reads, the activations it takes
and what the process saved. Sums are in double precision; what outlives a moment is rounded to single.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import TypeAlias, cast

from ps_core._errors import InvalidInput
from ps_core._extents import Precision
from ps_core._reference.floats import Floats, pack, singles, unpack
from ps_core._reference.training_rules import Call, Outcome
from ps_core._trace import Activation, Moment, Phase, Tensor, Trace

Rows: TypeAlias = "list[Floats]"
"""One row a token."""

TEXT = (
    b"Twas brillig, and the slithy toves did gyre and gimble in the wabe: all mimsy were the borogoves, and the mome "
    b"raths outgrabe. Beware the Jabberwock, my son! The jaws that bite, the claws that catch! Beware the Jubjub bird, "
    b"and shun the frumious Bandersnatch! He took his vorpal sword in hand; long time the manxome foe he sought -- so "
    b"rested he by the Tumtum tree, and stood awhile in thought. And, as in uffish thought he stood, the Jabberwock, "
    b"with eyes of flame, came whiffling through the tulgey wood, and burbled as it came!"
)
CLASSES = 32
_TINY = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of the network."""

    layers: int = 3
    width: int = 16
    hidden: int = 32
    tokens: int = 16
    checkpointing: bool = False
    """Keep only each block's input, as an activation that may be moved, and recompute the rest in backward."""
    seed: int = 1

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.hidden, self.tokens) < 1:
            raise InvalidInput("layers, width, hidden and tokens must be at least 1")


class ByteNetwork:
    """Implement the network above as a `Network`."""

    def __init__(self, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.trace = make_trace(self.shape)

    def initial(self, tensor: int) -> Floats:
        """Return gains of one, biases of zero, and normally distributed values of all other tensors."""
        name, numel = self.trace.tensors[tensor].name, self.trace.tensors[tensor].numel
        if name.endswith("gain"):
            return singles([1.0] * numel)
        if name.endswith("bias"):
            return singles([0.0] * numel)
        rng = random.Random(f"{self.shape.seed} {name}")
        return singles([rng.gauss(0.0, self.shape.width**-0.5) for _ in range(numel)])

    def batch(self, iteration: int, micro: int, rank: int) -> bytes:
        """Return a part of the text, another one for every iteration, micro-batch and process."""
        tokens = self.shape.tokens
        start = random.Random(f"{iteration} {micro} {rank}").randrange(len(TEXT) - tokens)
        return TEXT[start : start + tokens + 1]

    def run(self, call: Call) -> Outcome:
        """Run one moment."""
        layers, index = self.shape.layers, call.moment
        if index == 0:
            return self._embed(call)
        if index <= layers:
            return self._block(call, index - 1)
        if index == layers + 1:
            return self._head(call)
        if index == layers + 2:
            return self._head_backward(call)
        if index <= 2 * layers + 2:
            return self._block_backward(call, 2 * layers + 2 - index)
        return self._embed_backward(call)

    # Embedding.

    def _embed(self, call: Call) -> Outcome:
        (weight,) = call.weights.values()
        table = _rows(weight, self.shape.width)
        return Outcome(saved={"x": [table[byte % CLASSES] for byte in call.batch[:-1]]})

    def _embed_backward(self, call: Call) -> Outcome:
        gradient = [0.0] * (CLASSES * self.shape.width)
        for byte, row in zip(call.batch, _saved(call, "dx"), strict=False):
            start = byte % CLASSES * self.shape.width
            for offset, value in enumerate(row):
                gradient[start + offset] += value
        return Outcome(grads={0: singles(gradient)})

    # Blocks.

    def _block(self, call: Call, layer: int) -> Outcome:
        x = _saved(call, "x")
        out, inner = self._forward(_block_weights(call, layer), x)
        saved: dict[str, object] = {**call.saved, "x": out}
        if not call.training:
            return Outcome(saved=saved)
        if self.shape.checkpointing:
            return Outcome(saved=saved, activations={layer: b"".join(pack(row, Precision.FP32) for row in x)})
        return Outcome(saved={**saved, f"block {layer}": [x, *inner]})

    def _forward(self, weights: Sequence[Floats], x: Rows) -> tuple[Rows, tuple[Rows, Rows]]:
        """Return the block's output, and what its backward needs besides its input: z and u."""
        gain, up, bias, down = weights
        h = [_normed(row, gain) for row in x]
        z = [array("f", [*row, *before]) for row, before in zip(h, [_zeros(len(gain)), *h], strict=False)]
        columns = _rows(up, 2 * self.shape.width)
        u = [singles([max(0.0, _dot(row, column) + b) for column, b in zip(columns, bias, strict=True)]) for row in z]
        outputs = _rows(down, self.shape.hidden)
        out = [
            singles([a + _dot(r, column) for a, column in zip(row, outputs, strict=True)])
            for row, r in zip(x, u, strict=True)
        ]
        return out, (z, u)

    def _block_backward(self, call: Call, layer: int) -> Outcome:
        width = self.shape.width
        gain, up, _, down = weights = _block_weights(call, layer)
        saved = dict(call.saved)
        if self.shape.checkpointing:
            x = _rows(unpack(call.activations[layer], Precision.FP32), width)
            z, u = self._forward(weights, x)[1]
        else:
            x, z, u = cast("tuple[Rows, Rows, Rows]", saved.pop(f"block {layer}"))
        dx = cast("Rows", saved["dx"])
        by_hidden = list(zip(*_rows(down, self.shape.hidden), strict=True))
        du = [
            [_dot(row, column) if active > 0 else 0.0 for column, active in zip(by_hidden, r, strict=True)]
            for row, r in zip(dx, u, strict=True)
        ]
        by_input = list(zip(*_rows(up, 2 * width), strict=True))
        dz = [[_dot(row, column) for column in by_input] for row in du]
        dh = [
            [a + b for a, b in zip(row[:width], after[width:], strict=True)]
            for row, after in zip(dz, [*dz[1:], [0.0] * (2 * width)], strict=True)
        ]
        d_gain, passed = _normed_backward(x, gain, dh)
        saved["dx"] = [_added(row, more) for row, more in zip(dx, passed, strict=True)]
        first = 1 + 4 * layer
        return Outcome(
            grads={
                first: d_gain,
                first + 1: _outer(du, z),
                first + 2: singles([sum(column) for column in zip(*du, strict=True)]),
                first + 3: _outer(dx, u),
            },
            saved=saved,
        )

    # Head.

    def _head(self, call: Call) -> Outcome:
        gain = call.weights[len(self.trace.tensors) - 1]
        table = _rows(call.weights[0], self.shape.width)
        x, loss, d_logits = _saved(call, "x"), 0.0, []
        tokens = self.shape.tokens
        for row, byte in zip(x, call.batch[1:], strict=True):
            y = _normed(row, gain)
            logits = [_dot(y, column) for column in table]
            top = max(logits)
            parts = [math.exp(logit - top) for logit in logits]
            total, wanted = sum(parts), byte % CLASSES
            loss -= (logits[wanted] - top - math.log(total)) / tokens
            d_logits.append(singles([(part / total - (index == wanted)) / tokens for index, part in enumerate(parts)]))
        saved: dict[str, object] = {**call.saved, "logits": d_logits} if call.training else {}
        return Outcome(loss=loss, saved=saved)

    def _head_backward(self, call: Call) -> Outcome:
        last = len(self.trace.tensors) - 1
        gain, table = call.weights[last], _rows(call.weights[0], self.shape.width)
        saved = dict(call.saved)
        x, d_logits = cast("Rows", saved.pop("x")), cast("Rows", saved.pop("logits"))
        scaled = [singles([value * call.loss_scale for value in row]) for row in d_logits]
        by_width = list(zip(*table, strict=True))
        dy = [[_dot(row, column) for column in by_width] for row in scaled]
        d_gain, passed = _normed_backward(x, gain, dy)
        y = [_normed(row, gain) for row in x]
        saved["dx"] = [singles(row) for row in passed]
        return Outcome(grads={0: _outer(scaled, y), last: d_gain}, saved=saved)


def make_trace(shape: Shape) -> Trace:
    """Return the network's trace; non-model bytes are 4 for each value that a moment finds, makes or uses."""
    d, h, t, layers = shape.width, shape.hidden, shape.tokens, range(shape.layers)
    sizes = {"gain": d, "up": 2 * d * h, "bias": h, "down": d * h}
    blocks = [Tensor(name=f"block {layer} {name}", numel=sizes[name]) for layer in layers for name in sizes]
    tensors = (Tensor(name="embedding", numel=CLASSES * d), *blocks, Tensor(name="head gain", numel=d))
    x, inner, logits = 4 * t * d, 4 * t * (3 * d + h), 4 * t * CLASSES
    kept = 0 if shape.checkpointing else inner
    work, head_work = 6.0 * t * d * h, 2.0 * t * d * CLASSES
    again = 3 if shape.checkpointing else 2
    reads = [tuple(range(1 + 4 * layer, 5 + 4 * layer)) for layer in layers]
    acts = [(layer,) if shape.checkpointing else () for layer in layers]
    head, top = (0, len(tensors) - 1), shape.layers * kept + 2 * x + 2 * logits
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    moments = (
        Moment(name="embedding", phase=forward, reads=(0,), nonmodel_bytes=x),
        *(
            Moment(
                name=f"block {layer}",
                phase=forward,
                reads=reads[layer],
                makes=acts[layer],
                nonmodel_bytes=layer * kept + 2 * x + inner,
                flops=work,
            )
            for layer in layers
        ),
        Moment(name="head", phase=forward, reads=head, nonmodel_bytes=top, flops=head_work),
        Moment(
            name="head backward",
            phase=backward,
            reads=head,
            grads=head,
            nonmodel_bytes=top + 2 * x,
            flops=2 * head_work,
        ),
        *(
            Moment(
                name=f"block {layer} backward",
                phase=backward,
                reads=reads[layer],
                grads=reads[layer],
                takes=acts[layer],
                nonmodel_bytes=layer * kept + 2 * inner + 3 * x,
                flops=again * work,
            )
            for layer in reversed(layers)
        ),
        Moment(name="embedding backward", phase=backward, grads=(0,), nonmodel_bytes=2 * x),
    )
    made = tuple(Activation(name=f"input of block {layer}", bytes=x) for layer in layers)
    return Trace(
        model=f"bytes {shape.layers}x{d}",
        tensors=tensors,
        moments=moments,
        activations=made if shape.checkpointing else (),
        tokens=t,
    )


def _saved(call: Call, name: str) -> Rows:
    return cast("Rows", call.saved[name])


def _block_weights(call: Call, layer: int) -> list[Floats]:
    return [call.weights[1 + 4 * layer + place] for place in range(4)]


def _rows(values: Floats, width: int) -> Rows:
    return [values[start : start + width] for start in range(0, len(values), width)]


def _zeros(width: int) -> Floats:
    return array("f", bytes(4 * width))


def _added(left: Sequence[float], right: Sequence[float]) -> Floats:
    return singles([a + b for a, b in zip(left, right, strict=True)])


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    total: float = sum(map(mul, left, right))
    return total


def _outer(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> Floats:
    """Return the gradient of a weight stored row by row: the sum over tokens of left_i times right_j."""
    columns = list(zip(*right, strict=True))
    return singles([_dot(row, column) for row in zip(*left, strict=True) for column in columns])


def _scale_of(row: Sequence[float]) -> float:
    return 1.0 / math.sqrt(_dot(row, row) / len(row) + _TINY)


def _normed(row: Floats, gain: Floats) -> Floats:
    scale = _scale_of(row)
    return singles([value * scale * factor for value, factor in zip(row, gain, strict=True)])


def _normed_backward(x: Rows, gain: Floats, dh: Sequence[Sequence[float]]) -> tuple[Floats, list[list[float]]]:
    """Return the gradients of the gain and of the rows."""
    d_gain, dx = [0.0] * len(gain), []
    for row, grad in zip(x, dh, strict=True):
        scale = _scale_of(row)
        for index, (value, d) in enumerate(zip(row, grad, strict=True)):
            d_gain[index] += d * value * scale
        inner = [d * factor for d, factor in zip(grad, gain, strict=True)]
        shared = _dot(inner, row) * scale**3 / len(row)
        dx.append([d * scale - value * shared for d, value in zip(inner, row, strict=True)])
    return singles(d_gain), dx
