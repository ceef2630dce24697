"""What a fake pass counts of what is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ps_core._trace import Amounts
from ps_core.engine._tracing.fake_trace import trace

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 5, 4
ROWS = BATCH * HEADS * LENGTH


class Attending(nn.Module):
    """Attention of what one weight makes to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        x = x * self.scale
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum()


class Bending(nn.Module):
    """A GELU, and perhaps the tangent itself."""

    def __init__(self, form: str, *, tanh: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.form, self.tanh = form, tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        x = functional.gelu(x * self.scale, approximate=self.form)
        return (x.tanh() if self.tanh else x).sum()


def total(model: nn.Module, *shape: int) -> Amounts:
    found = Amounts()
    for moment in trace(model, (torch.zeros(*shape),), loss=lambda loss: loss).moments:
        found = found.plus(moment.amounts)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_counted_by_queries_and_products(dtype: torch.dtype) -> None:
    """Two products there and five back, of each query with each key."""
    found = total(Attending().to(dtype), BATCH, HEADS, LENGTH, WIDTH)
    assert found.attention_flops == found.flops == (2 + 5) * 2 * ROWS * LENGTH * WIDTH
    assert (found.queries, found.queries_backward) == (ROWS, ROWS)
    assert found.tanhs == 0 < found.elements


def test_tangents_are_counted_there_and_back() -> None:
    """The tangent's own derivative needs none."""
    numel = 7 * WIDTH
    assert total(Bending("none", tanh=False), 7, WIDTH).tanhs == 0
    assert total(Bending("tanh", tanh=False), 7, WIDTH).tanhs == 2 * numel
    assert total(Bending("none", tanh=True), 7, WIDTH).tanhs == numel
    assert total(Bending("tanh", tanh=True), 7, WIDTH) == total(Bending("none", tanh=True), 7, WIDTH)._replace(
        tanhs=3 * numel
    )
