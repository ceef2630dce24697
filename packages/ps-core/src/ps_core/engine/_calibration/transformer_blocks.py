"""Measure the matrix work inside transformer blocks, and what comes with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ps_core._trace import Amounts
from ps_core.engine._calibration.cpu_caches import last_cache, stack_size
from ps_core.engine._calibration.operators import Slow
from ps_core.engine._calibration.probes import Probe
from ps_core.engine._tracing.fake_trace import trace

_LENGTH = 64
_HEAD = 64
_TOKENS = 512
_WIDTHS = (32, 192, 512)
"""Widths of a model that hardly computes, of one where elements count, and of one where products do."""
_DEVICE_WIDTH, _DEVICE_BLOCKS, _DEVICE_LENGTH = 2048, 2, 512
_DEVICE_TOKENS = {torch.bfloat16: 16384, torch.float32: 4096}
"""So many that launching kernels takes less time than running them."""


class Block(nn.Module):
    """A transformer block, which is recomputed in backward."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.joint, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block, to be recomputed in backward."""
        found: torch.Tensor = checkpoint(self._compute, x, use_reentrant=False)
        return found

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.joint(self.before(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        moved: torch.Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return moved


class Blocks(nn.Module):
    """Run several blocks in a row; the output is a loss."""

    def __init__(self, blocks: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(hidden, hidden)  # so that recomputed blocks have an input with a gradient
        self.blocks = nn.Sequential(*(Block(hidden, max(1, hidden // _HEAD)) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of squares of the output."""
        made: torch.Tensor = self.blocks(self.first(x))
        return made.float().square().mean()


class Timed(NamedTuple):
    """Blocks: what they compute, the bytes of weights and gradients that they move, and their seconds."""

    amounts: Amounts
    weight_bytes: float
    seconds: float


class OnTheCpu:
    """Measure three widths in one precision on the CPU: the same operators, other amounts of work.

    There are as many blocks of each width. At the largest width the caches do not hold their weights and gradients.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._counts: list[tuple[Amounts, float]] = []
        self.probes: list[Probe] = []
        cache, widest = last_cache(), max(_WIDTHS)
        each = 2 * sum(parameter.nbytes for parameter in Block(widest, 1).to(dtype).parameters())
        self.blocks = stack_size(each, cache.bytes)
        stack = self.blocks * each / 2**20
        self.note = f"{self.blocks} blocks in {dtype}: {stack:.0f} MiB of weights and gradients beside {cache}"
        for hidden in _WIDTHS:
            model = Blocks(self.blocks, hidden).to(dtype)
            x = torch.rand(max(1, _TOKENS // _LENGTH), min(_LENGTH, _TOKENS), hidden, dtype=dtype, device="cpu")
            self._counts.append(counted(model, x))
            self.probes.append(_probe(f"{dtype} blocks, {hidden} wide", model, x))

    def fit(self, copy_rate: float, slow: Slow) -> tuple[float, float]:
        """Return the operations a second, and the seconds for an element."""
        timed = (Timed(*counts, probe.seconds) for counts, probe in zip(self._counts, self.probes, strict=True))
        return fit(list(timed), copy_rate, slow)


def fit(timed: Sequence[Timed], copy_rate: float, slow: Slow) -> tuple[float, float]:
    """Return the operations a second and the seconds for an element, from three amounts of work.

    What takes equally long in all three is part of neither. Weights and gradients move at the rate of a copy. Attention
    and other slow operators take the seconds measured for them.
    """
    rows = [
        (
            each.amounts.flops - each.amounts.attention_flops,
            each.amounts.elements,
            each.seconds - each.weight_bytes / copy_rate - slow.seconds(each.amounts),
        )
        for each in timed
    ]
    (flops, elements, seconds), (many, touched, longer) = (
        tuple(value - base for value, base in zip(row, rows[0], strict=True)) for row in rows[1:]
    )
    both = flops * touched - many * elements
    an_operation = (seconds * touched - longer * elements) / both
    an_element = (flops * longer - many * seconds) / both
    if an_operation <= 0 or an_element < 0:  # noise: assume that the largest is mostly matrix products
        return many / max(longer, 0.25 * timed[2].seconds), 0.0
    return 1 / an_operation, an_element


class OnADevice:
    """Measure blocks as wide as large models have them, with many tokens, in one precision."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        model, tokens = Blocks(_DEVICE_BLOCKS, _DEVICE_WIDTH).to(device, dtype), _DEVICE_TOKENS[dtype]
        x = torch.rand(tokens // _DEVICE_LENGTH, _DEVICE_LENGTH, _DEVICE_WIDTH, device=device, dtype=dtype)
        self._amounts, _ = counted(model, x)
        self._element_bytes = x.element_size()
        self.probe = _probe(f"{dtype} blocks of {tokens} tokens", model, x)

    def fit(self, memory_rate: float) -> tuple[float, float]:
        """Return the operations a second, and the seconds for an element, which takes its bytes over this rate."""
        element_s = self._element_bytes / memory_rate
        others_s = min(self._amounts.elements * element_s, self.probe.seconds / 2)
        return self._amounts.flops / (self.probe.seconds - others_s), element_s


def _probe(name: str, model: nn.Module, x: torch.Tensor) -> Probe:
    def run() -> None:
        model(x).backward()
        model.zero_grad()

    return Probe(name.removeprefix("torch."), run, x.device)


def counted(model: nn.Module, x: torch.Tensor) -> tuple[Amounts, float]:
    """Return a pass's amounts of work, and the bytes moved for parameters, as plans count both.

    A pass reads each weight in forward and in backward, and makes and copies its gradient.
    """
    found = Amounts()
    for moment in trace(model, (x,), loss=lambda loss: loss, unit_of=lambda _: 0).moments:
        found = found.plus(moment.amounts)
    return found, 4.0 * sum(each.nbytes for each in model.parameters())
