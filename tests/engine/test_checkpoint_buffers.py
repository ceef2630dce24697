"""Buffers of every kind in checkpoints and weight files: loaded with the values they had, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.utils._pytree import tree_map

from _refusals import X, managed
from ps_core import CheckpointMismatch, InvalidInput
from ps_core.engine import export_checkpoint, load_checkpoint, load_weights, release, save_checkpoint, save_weights

PAIRS = torch.tensor([[1 + 2j, 3 - 4j, 0.5j], [5 + 1j, 6j, -1]])
BITS = torch.arange(6, dtype=torch.uint8)


def unchangeable() -> Tensor:
    with torch.inference_mode():
        return torch.arange(6.0).view(2, 3).t()


KEPT: dict[str, Callable[[], Tensor]] = {
    "conjugate": PAIRS.conj,
    "conjugate, turned": lambda: PAIRS.mH,
    "conjugate number": lambda: torch.tensor(1 + 2j).conj(),
    "negated": lambda: PAIRS.conj().imag,
    "negated number": lambda: torch.tensor(1 + 2j).conj().imag,
    "made for inference": unchangeable,
    "with a gradient": lambda: torch.ones(2, 3, requires_grad=True).t(),
    "number": lambda: torch.tensor(True),
    "empty": lambda: torch.ones(0, 3),
    "turned": lambda: torch.arange(6.0).view(2, 3).t(),
    "of eight bits": lambda: BITS.view(torch.float8_e4m3fn),
}


class Wrapped(Tensor):
    """A tensor that holds another one and has no memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda each: each.inner if isinstance(each, Wrapped) else each, (args, kwargs or {}))
        return tree_map(lambda each: Wrapped(each) if isinstance(each, Tensor) else each, func(*args, **kwargs))


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "wrapped": (lambda: Wrapped(torch.ones(3)), "is a Wrapped without memory of its own"),
    "masked": (
        lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])),
        "is a MaskedTensor without memory of its own",
    ),
    "zeros": (lambda: torch._efficientzerotensor((3,)), "is a tensor of zeros without memory of its own"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]), "is a tensor of layout nested on cpu"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "is a tensor of layout torch.sparse_coo on cpu"),
}


class Kept(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("kept", value)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def train(model: nn.Module, optimizer: Any) -> None:
    model(X).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(value: Tensor) -> Any:
    model, optimizer = managed(Kept(value))
    train(model, optimizer)
    return model, optimizer


def others(value: Tensor) -> Iterator[tuple[nn.Module, Any]]:
    """Models whose buffer has other values, in the same memory order and in plain rows."""
    same = value if value.is_inference() else copy.deepcopy(value.detach())
    for other in (same, torch.empty(value.shape, dtype=value.dtype)):
        with torch.inference_mode(other.is_inference()):
            other.zero_()
        model, optimizer = managed(Kept(other))
        yield model, optimizer
        release(model)


def values(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(torch.uint8) if plain.dtype.itemsize == 1 else plain


@pytest.mark.parametrize("kind", KEPT)
def test_a_buffer_is_loaded_as_it_was(kind: str, tmp_path: Path) -> None:
    expected = values(KEPT[kind]()).clone()
    model, optimizer = trained(KEPT[kind]())
    save_checkpoint(tmp_path / "run", model, optimizer)
    save_weights(tmp_path / "saved.safetensors", model)
    export_checkpoint(tmp_path / "run", tmp_path / "exported.safetensors")
    for other, its_optimizer in others(KEPT[kind]()):
        load_checkpoint(tmp_path / "run", other, its_optimizer)
        assert torch.equal(values(other.kept), expected)
        for file in ("saved.safetensors", "exported.safetensors"):
            with torch.inference_mode(other.kept.is_inference()):
                other.kept.detach().zero_()
            load_weights(other, tmp_path / file)
            assert torch.equal(values(other.kept), expected), file
    release(model)


@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:.*MaskedTensors")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_without_memory_is_refused_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    make, words = REFUSED[kind]
    model, optimizer = trained(make())
    with pytest.raises(InvalidInput, match=f"'kept' {words}, which a checkpoint cannot hold: make it dense"):
        save_checkpoint(tmp_path / "run", model, optimizer)
    with pytest.raises(InvalidInput, match=f"'kept' {words}"):
        save_weights(tmp_path / "saved.safetensors", model)
    model.kept = torch.ones(3)
    with pytest.raises(InvalidInput, match=rf"extra\['key'\] {words}, which a checkpoint cannot hold"):
        save_checkpoint(tmp_path / "run", model, optimizer, extra={"key": make()})
    assert not list(tmp_path.iterdir())
    save_weights(tmp_path / "saved.safetensors", model)
    model.kept = make()
    with pytest.raises(CheckpointMismatch, match=f"'kept': in the model it {words}, expected a dense one"):
        load_weights(model, tmp_path / "saved.safetensors")
    train(model, optimizer)
    release(model)


def test_an_expanded_buffer_is_saved_and_nothing_is_loaded_into_it(tmp_path: Path) -> None:
    model, optimizer = trained(torch.arange(3.0).expand(4, 3))
    save_checkpoint(tmp_path / "run", model, optimizer)
    train(model, optimizer)
    expected = model(torch.ones(1, 4))
    for load in (load_checkpoint, lambda path, model, _: load_weights(model, path)):
        with pytest.raises(CheckpointMismatch, match="'kept': in the model it is an expanded tensor, whose elements"):
            load(tmp_path / "run", model, optimizer)
    assert torch.equal(model(torch.ones(1, 4)), expected)
    train(model, optimizer)
    model.kept = model.kept.clone()
    load_checkpoint(tmp_path / "run", model, optimizer)
    assert torch.equal(model.kept, torch.arange(3.0).expand(4, 3))
    release(model)
