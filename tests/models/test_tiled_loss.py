"""The loss of a head in tiles against the plain one: numbers, gradients, and the bytes it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ps_core import AdamW, Budget, DoesNotFit, InvalidInput
from ps_core.engine import chunked, release
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker
from ps_models import build
from ps_models._loss import IGNORED, head_loss

TOKENS, HIDDEN, VOCABULARY = 50, 16, 211
WORDS = 4096
SMALL: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 4, "vocabulary": 61, "positions": 8}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    table = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[7:11] = IGNORED
    return x.to(dtype), table.to(dtype), labels


def gradients(tiles: int, rows: int | None, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    """The loss, and what x and the whole table get."""
    x, table, labels = inputs(dtype)
    leaves = [x.requires_grad_(), *(part.clone().requires_grad_() for part in table.tensor_split(tiles))]
    loss, _ = head_loss(leaves[0], leaves[1:], labels, rows=rows)
    of_x, *of_parts = torch.autograd.grad(loss * scale, leaves)
    return [loss.detach(), of_x, torch.cat(of_parts)]


def exact(dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    x, table, labels = inputs(dtype)
    leaves = [each.double().requires_grad_() for each in (x, table)]
    loss = functional.cross_entropy(functional.linear(*leaves), labels, ignore_index=IGNORED)
    return [loss.detach(), *torch.autograd.grad(loss * scale, leaves)]


@pytest.mark.parametrize("rows", [1, 7, 50, 1000])
@pytest.mark.parametrize("tiles", [2, 5, VOCABULARY])
def test_it_is_the_plain_one(tiles: int, rows: int) -> None:
    for found, right in zip(gradients(tiles, rows, scale=3.0), exact(torch.float32, 3.0), strict=True):
        assert found.dtype is torch.float32
        assert torch.allclose(found, right.float(), rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_as_exact_as_in_chunks(dtype: torch.dtype) -> None:
    right = exact(dtype)

    def apart(found: list[Tensor]) -> list[float]:
        return [float((each.double() - row).norm() / row.norm()) for each, row in zip(found, right, strict=True)]

    loss, of_x, of_table = apart(gradients(4, 7, dtype))
    _, whole_x, whole_table = apart(gradients(1, 7, dtype))
    assert loss < 0.01
    assert of_table < 1.1 * whole_table
    assert of_x < 2.0 * whole_x, "four roundings in place of one"


def test_fp16_gradients_of_single_tokens_do_not_vanish() -> None:
    x = torch.zeros(4096, 8, dtype=torch.float16, requires_grad=True)
    tiles = [torch.full((128, 8), 0.1, dtype=torch.float16).requires_grad_() for _ in range(4)]
    loss, _ = head_loss(x, tiles, torch.arange(4096) % 512, rows=1024)
    (loss * 2**16).backward()
    assert x.grad is not None
    one = torch.full((512,), 1 / 512)
    one[0] -= 1
    expected = 2**16 / 4096 * (one @ torch.full((512, 8), 0.1))
    assert torch.allclose(x.grad[0].float(), expected, rtol=0.02, atol=2e-3)


def test_tokens_that_do_not_count() -> None:
    _, of_x, _ = gradients(3, 7)
    assert not of_x[7:11].any()
    assert of_x[:7].any(1).all()
    x, table, labels = inputs()
    leaves = [x.requires_grad_(), *(part.clone().requires_grad_() for part in table.tensor_split(3))]
    loss, _ = head_loss(leaves[0], leaves[1:], torch.full_like(labels, IGNORED), rows=7)
    assert loss.isnan()
    assert not any(each.any() for each in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_a_label_that_is_no_word(wrong: int) -> None:
    x, table, labels = inputs()
    labels[3] = wrong
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds: expected 0 to {VOCABULARY - 1}"):
        head_loss(x, table.tensor_split(3), labels, rows=7)


def test_backward_twice_and_a_gradient_of_the_gradient() -> None:
    x, table, labels = inputs()
    leaves = [x.requires_grad_(), *(part.clone().requires_grad_() for part in table.tensor_split(3))]
    loss, _ = head_loss(leaves[0], leaves[1:], labels.int()[None].expand(2, -1).t()[:, 0], rows=7)
    first, again = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    with pytest.raises(InvalidInput, match="create_graph=True through a loss in tiles"):
        torch.autograd.grad(loss, leaves, create_graph=True)


@pytest.mark.parametrize("whole", [True, False])
def test_whole_logits_are_those_of_one_matrix(whole: bool) -> None:
    model: Any = build("gpt2", "cpu", **SMALL, tied_head=False, head_tiles=3)
    ids = torch.arange(12).view(2, 6)
    table = torch.cat([tile.weight for tile in model.lm_head.tiles])
    states, _ = model.transformer(ids)
    out = model(ids, labels=ids, return_logits=True) if whole else model(ids)
    assert torch.allclose(out.logits, functional.linear(states, table), atol=1e-6)
    if whole:
        assert torch.allclose(out.loss, model(ids, labels=ids).loss, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama-10m"])
def test_files_hold_a_whole_head(name: str, tmp_path: Path) -> None:
    model: Any = build(name, "cpu", **SMALL, tied_head=False, head_tiles=3)
    model.save_pretrained(tmp_path)
    whole = type(model).from_pretrained(tmp_path)
    assert torch.equal(whole.lm_head.weight, torch.cat([tile.weight for tile in model.lm_head.tiles]))
    again = type(model).from_pretrained(tmp_path, head_tiles=5)
    assert [len(tile.weight) for tile in again.lm_head.tiles] == [13, 12, 12, 12, 12]
    ids = torch.arange(12).view(2, 6)
    assert torch.allclose(again(ids, labels=ids).loss, whole(ids, labels=ids).loss, rtol=1e-5)


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match="head_tiles=2, but the head of gpt2 is its token table"):
        build("gpt2", head_tiles=2)
    with pytest.raises(InvalidInput, match="head_tiles must be at least 1, found 0"):
        build("gpt2", tied_head=False, head_tiles=0)


@pytest.mark.parametrize("head_tiles", [1, 16])
def test_a_head_larger_than_the_accelerator_trains_in_tiles(head_tiles: int) -> None:
    """Weights of 256 KiB, with the same bytes of gradients; the table that is looked up stays in the host's memory."""
    sizes: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": WORDS, "positions": 16}
    made = build("gpt2", **sizes, tied_head=False, head_tiles=head_tiles, cpu_embedding=True, loss_chunk_tokens=8)
    budget = Budget(device="320KiB", host="64MiB")
    torch.manual_seed(0)
    ids = torch.arange(24).view(2, 12)

    def train() -> list[float]:
        model, optimizer = chunked(made, AdamW(lr=1e-2), device="emulated", budget=budget)
        assert optimizer is not None
        losses = []
        try:
            for _ in range(4):
                loss = model(ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        finally:
            release(model)
        return losses

    if head_tiles == 1:
        with pytest.raises(DoesNotFit):
            train()
    else:
        losses = train()
        assert losses[-1] < losses[0] - 1


def test_peak_bytes() -> None:
    """Logits of eight tokens by one tile's words, a few times, and a tile's gradient; never a whole head's."""
    count, rows = 8, 8
    x = torch.randn(64, HIDDEN, requires_grad=True)
    whole = torch.randn(WORDS, HIDDEN)
    tiles = [part.clone().requires_grad_() for part in whole.tensor_split(count)]
    for leaf in tiles:
        # As the engine takes it.
        leaf.register_post_accumulate_grad_hook(lambda done: setattr(done, "grad", None))  # type: ignore[no-untyped-call]
    tracker = TensorBytesTracker()
    tracker.start()
    loss, _ = head_loss(x, tiles, torch.arange(64), rows=rows)
    forward = tracker.take_peak()
    loss.backward()  # type: ignore[no-untyped-call]
    tracker.stop()
    backward, logits, tile = tracker.take_peak(), rows * WORDS // count * 4, whole.nbytes // count
    numbers = 64 * 4 * 8 * count
    assert logits < forward < 3 * logits + numbers
    assert logits + tile < backward < 3 * logits + tile + 3 * x.nbytes + numbers
    assert backward < whole.nbytes / 2
