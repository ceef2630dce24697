"""Measure operators that take longer than their reads and writes suggest: attention and hyperbolic tangents."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ps_core._trace import Amounts
from ps_core.engine._calibration.probes import Probe, Row

_HEADS, _HEAD, _TOKENS = 8, 64, 512
_LENGTHS = (128, 512)
"""Lengths of sequences: the second has more products of queries and keys."""
_BENT = (512, 2048)
"""Shape of the inputs of GELU: as many elements as in a block that is 512 wide."""
_TIMES = 4
"""Calls in a row: within a model, too, operators read tensors that were just made."""


class Attended(NamedTuple):
    """Attention over sequences of one length, and the seconds that it took."""

    queries: float
    flops: float
    """Operations of both directions; two sevenths are forward's."""
    forward_s: float
    backward_s: float


class Slow(NamedTuple):
    """Rates of attention and tanh, in one precision."""

    attention_flops: float
    query_s: float
    query_backward_s: float
    tanh_s: float

    def seconds(self, amounts: Amounts) -> float:
        """Return the seconds of the attention and tanh in ``amounts``, without their time per element."""
        attention = amounts.attention_flops / self.attention_flops
        queries = amounts.queries * self.query_s + amounts.queries_backward * self.query_backward_s
        return attention + queries + amounts.tanhs * self.tanh_s


class Operators:
    """Measure such operators in one precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        kind = str(dtype).removeprefix("torch.")
        self._attention = [_attention(kind, length, dtype) for length in _LENGTHS]
        self._bent = [_gelu(kind, form, dtype) for form in ("none", "tanh")]
        self.rows: list[Row] = [*self._attention, self._bent]

    def fit(self) -> Slow:
        """Return the rates of attention and tanh, from the seconds of all probes."""
        short, long = (
            Attended(
                _HEADS * _TOKENS,
                14.0 * _HEADS * _TOKENS * length * _HEAD,
                *(probe.seconds / _TIMES for probe in probes),
            )
            for length, probes in zip(_LENGTHS, self._attention, strict=True)
        )
        plain, tanh = (probe.seconds / _TIMES for probe in self._bent)
        return Slow(*attention(short, long), max(0.0, tanh - plain) / (2 * _BENT[0] * _BENT[1]))


def attention(short: Attended, long: Attended) -> tuple[float, float, float]:
    """Return attention's operations a second, and its seconds for each query in both directions.

    The two probes have equally many queries and different lengths.
    """
    before, after = (each.forward_s + each.backward_s for each in (short, long))
    rate = (long.flops - short.flops) / max(after - before, 0.25 * after)
    forward, backward = (part * short.flops / 7 / rate for part in (2, 5))
    return (
        rate,
        max(0.0, short.forward_s - forward) / short.queries,
        max(0.0, short.backward_s - backward) / short.queries,
    )


def _attention(kind: str, length: int, dtype: torch.dtype) -> list[Probe]:
    """Return probes of attention: forward, and backward from the latest forward."""
    shape = _TOKENS // length, length, _HEADS, _HEAD
    q, k, v = (torch.rand(shape, dtype=dtype, device="cpu").transpose(1, 2).requires_grad_() for _ in range(3))
    found: list[torch.Tensor] = []

    def forward() -> None:
        for _ in range(_TIMES):
            found[:] = [nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)]

    def backward() -> None:
        for _ in range(_TIMES):
            torch.autograd.grad(found, (q, k, v), [torch.ones_like(found[0])], retain_graph=True)

    name = f"{kind} attention in sequences of {length}"
    return [Probe(name, forward), Probe(f"{name}, backward", backward)]


def _gelu(kind: str, form: str, dtype: torch.dtype) -> Probe:
    """Return a probe of one form of GELU, in forward and backward."""
    x = torch.linspace(-2, 2, _BENT[0] * _BENT[1], dtype=torch.float32, device="cpu").to(dtype).view(_BENT)

    def work() -> None:
        for _ in range(_TIMES):
            made = nn.functional.gelu(x, approximate=form)
            torch.ops.aten.gelu_backward(made, x, approximate=form)

    return Probe(f"{kind} gelu, {form}", work)
