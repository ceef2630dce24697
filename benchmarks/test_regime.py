"""A model whose arithmetic is out of the ordinary is refused before anything is timed; the benchmarks' own is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import engine_figures as figures
from ps_core.engine import chunked, materialized, release
from regime import Subnormals, check_regime

SHAPE = figures.Shape(layers=2, hidden=128, heads=2, vocabulary=2048, batch=2, length=32)
TINY = figures.Shape(layers=2, hidden=16, heads=2, vocabulary=32, batch=1, length=4)


class Tied(nn.Module):
    """A token table that is the head, too, and a layer between."""

    def __init__(self, std: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.layer = nn.Embedding(SHAPE.vocabulary, SHAPE.hidden), nn.Linear(SHAPE.hidden, SHAPE.hidden)
        nn.init.normal_(self.tokens.weight, std=std)
        self.batch = next(figures.batches(SHAPE))

    def forward(self) -> torch.Tensor:
        rows = self.tokens(self.batch)
        logits = nn.functional.layer_norm(rows + self.layer(rows), (SHAPE.hidden,)) @ self.tokens.weight.t()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), self.batch[:, 1:].flatten())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SHAPE, TINY], ids=["small", "tiny"])
def test_the_benchmarks_model_trains_as_models_do(shape: figures.Shape, precision: str) -> None:
    figures.check(shape, precision)


def test_tables_drawn_without_memory_are_drawn_alike() -> None:
    """The disk's figures build on `meta`, where modules' own initialisers decide."""
    with torch.device("meta"):
        model = figures.GPT(SHAPE)
    model, _ = chunked(model, None, precision="fp32")
    with materialized(model):
        assert model.tokens.weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert model.places.weight.std().item() == pytest.approx(0.02, rel=0.05)
    release(model)


def test_a_tied_table_from_a_wide_normal_is_refused() -> None:
    sane, wide = Tied(0.02), Tied(1.0)
    check_regime(sane, sane, SHAPE.vocabulary)
    with pytest.raises(SystemExit, match=r"^not timed: the first loss is \d+\.\d\d, but ln\(2048\) = 7\.62 .* 0\.02$"):
        check_regime(wide, wide, SHAPE.vocabulary)


def test_a_wide_tables_subnormal_numbers_are_found() -> None:
    shares = []
    for model in (Tied(0.02), Tied(1.0)):
        with Subnormals() as found:
            model().backward()
        shares.append(found.share)
    assert shares[0] == 0
    assert shares[1] > 0.01


def test_subnormal_numbers_are_refused_whatever_the_loss() -> None:
    model = Tied(0.02)
    with pytest.raises(SystemExit, match=r"^not timed: \d+% of a tensor \(.*\) that aten\.\S+ reads is subnormal"):
        check_regime(model, lambda: model() + 0 * (model.layer.weight * 1e-38).sum(), SHAPE.vocabulary)


def test_a_loss_that_does_not_fall_is_refused() -> None:
    model = Tied(0.02)

    def with_opposite_gradient() -> torch.Tensor:
        loss: torch.Tensor = model()
        return 2 * loss.detach() - loss

    with pytest.raises(SystemExit, match=r"^not timed: 4 steps on one batch must lower the loss, found 7\.\d\d"):
        check_regime(model, with_opposite_gradient, SHAPE.vocabulary)


def test_a_last_step_that_overshoots_is_not_refused() -> None:
    model, above = Tied(0.02), iter((0.0, -0.1, -0.2, 1.0))

    def overshooting() -> torch.Tensor:
        loss: torch.Tensor = model()
        return loss - loss.detach() + math.log(SHAPE.vocabulary) + next(above)

    check_regime(model, overshooting, SHAPE.vocabulary)


def test_what_is_subnormal_is_counted_by_tensor() -> None:
    with Subnormals() as found:
        torch.tensor([0.0, 1.0, 1e-39, -1e-40]).neg()
        torch.empty(4).fill_(1.0)
    assert found.share == 0.5
    assert found.where.startswith("a tensor (4,) that aten.neg.default reads")
