"""Models built without memory get, to the bit, the numbers of models built with it; one parameter at a time."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from _unreal import Make, assert_same, both, hugging_face, on_meta
from ps_core import UnsupportedParameter
from ps_core.engine._parameters.meta_init.initial_values import initial_values
from ps_models import build

# ---- PyTorch's own modules ----

LAYER = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "batch_first": True}
MODULES: dict[str, Make] = {
    "linear": lambda: nn.Linear(3, 4),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "embedding": lambda: nn.Embedding(30, 4, padding_idx=2),
    "embedding bag": lambda: nn.EmbeddingBag(30, 4),
    "convolutions": lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(2, 3, 3)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(5), nn.PReLU()),
    "batch norms": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm1d(4, affine=False), nn.Linear(3, 3)),
    "instance norm": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    "lstm": lambda: nn.LSTM(4, 6, 2, bidirectional=True, proj_size=3),
    "gru": lambda: nn.Sequential(nn.GRU(4, 5), nn.RNN(3, 4), nn.GRUCell(3, 4), nn.LSTMCell(3, 4)),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "attention, other sizes": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(16, 2, 2, 3, 32, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), 3, enable_nested_tensor=False),
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER), 2, norm=nn.LayerNorm(16)),
    "adaptive softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 100, [10, 50]),
    "types": lambda: nn.Sequential(nn.Linear(64, 64, dtype=torch.float64), nn.Linear(64, 4, dtype=torch.bfloat16)),
    "frozen": lambda: nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 4)),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_torchs_modules(make: Make) -> None:
    plain, got, (expected, drawn) = both(make)
    assert_same(plain, got)
    assert torch.equal(expected, drawn), "what is drawn later is the same too"


def test_the_seed_matters() -> None:
    _, got, _ = both(MODULES["linear"], seed=3)
    _, other, _ = both(MODULES["linear"], seed=4)
    assert not torch.equal(got.weight, other.weight)


def test_recurrent_modules_run_afterwards() -> None:
    plain, got, _ = both(lambda: nn.LSTM(4, 6, 2))
    x = torch.randn(5, 2, 4)
    assert torch.equal(plain(x)[0], got(x)[0])
    assert all(ref() is each for ref, each in zip(got._flat_weight_refs, got._flat_weights, strict=True))


# ---- modules of one's own ----


class Filled(nn.Module):
    """Every way there is to fill a tensor; the last words are about the first tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(40, 30))
        self.inner = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 7))
        self.rest = nn.ParameterDict({name: nn.Parameter(torch.empty(24, 24)) for name in "abcdefgh"})
        self.register_buffer("mask", torch.empty(24, 24, dtype=torch.bool), persistent=False)
        self.register_buffer("order", torch.empty(24, dtype=torch.int64))
        self.scales = torch.empty(3)
        if not self.first.is_meta:  # It looks at values.
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        rest = self.rest
        nn.init.orthogonal_(rest["a"])
        nn.init.trunc_normal_(rest["b"], std=1.0, a=-0.5, b=0.5)
        nn.init.sparse_(rest["c"], 0.25)
        nn.init.eye_(rest["d"])
        rest["e"][:12].normal_()
        rest["e"][12:] = rest["a"][:12] * 2 + torch.randn(12, 24)
        rest["f"].copy_(torch.randn(24, 24).t())
        rest["g"].uniform_(generator=torch.Generator().manual_seed(5)).mul_(3).clamp_(0.5, 2)
        rest["h"].copy_(torch.linspace(0, 1, 24).expand(24, 24))
        for index, value in enumerate(torch.linspace(0, 2, 24).tolist()):
            rest["h"][index].add_(value)
        self.mask.copy_(torch.ones(24, 24, device=self.mask.device).tril().bool())
        self.order.copy_(torch.randperm(24, device=self.order.device))
        self.scales.copy_(torch.tensor([0.5, 1.0, 2.0]))
        if min(torch.rand(5).tolist()) < 0.5 or rest["a"][0, 0].item() > 0:
            torch.rand(3)
        passing = torch.randn(24, 24) * torch.tensor([2.0])
        rest["f"].add_(passing)
        passing.normal_()
        self.inner[1].weight.normal_(0, 0.1 + float(rest["e"].abs().mean()))
        self.first.normal_()


def test_modules_with_initialisers_of_their_own() -> None:
    plain, got, (expected, drawn) = both(Filled)
    assert_same(plain, got)
    assert torch.equal(expected, drawn)
    assert got._non_persistent_buffers_set == {"mask"}


def test_large_tensors_are_made_as_small_ones() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(300, 300))
            self.register_buffer("mask", torch.empty(300, 300))
            self.reset_parameters()

        @torch.no_grad()
        def reset_parameters(self) -> None:
            self.mask.copy_(torch.full((300, 300), float("-inf")).triu(1))
            self.weight.copy_(torch.randn(300, 300).cumsum(0) * torch.arange(300 * 300).view(300, 300).flip(0))

    plain, got, (expected, drawn) = both(Large)
    assert_same(plain, got)
    assert torch.equal(expected, drawn)


@torch.library.custom_op("ps_test::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """The same numbers, stored the other way round."""
    return x.t().contiguous().t()


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operation_that_lays_out_its_result_otherwise() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 5))
            self.reset_parameters()

        @torch.no_grad()
        def reset_parameters(self) -> None:
            self.weight.view(-1).copy_(turned(torch.randn(3, 5)).reshape(-1))

    plain, got, _ = both(Turned)
    assert_same(plain, got)


def test_ps_models_gpt() -> None:
    for tied in (True, False):
        shape = {"layers": 2, "hidden": 32, "heads": 2, "vocabulary": 99, "positions": 16, "tied_head": tied}
        plain, got, (expected, drawn) = both(lambda shape=shape: build("gpt2", torch.get_default_device(), **shape))
        assert_same(plain, got)
        assert torch.equal(expected, drawn)


def test_tied_parameters_come_once_with_the_values_of_the_first() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 9)
            self.head.weight = self.table.weight

    plain, got, (expected, drawn) = both(Tied)
    assert got.head.weight is got.table.weight
    assert_same(plain, got)
    assert torch.equal(expected, drawn)


def test_a_module_used_twice_is_initialised_once() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 2))

    plain, got, _ = both(make)
    assert got[0] is got[2]
    assert_same(plain, got)


def test_real_parameters_stay_as_they_are() -> None:
    real = nn.Linear(3, 3)
    before = copy.deepcopy(real)
    mixed = nn.Sequential(real, on_meta(lambda: nn.Linear(3, 3)))
    partly = on_meta(lambda: nn.BatchNorm1d(3))
    partly.weight = nn.Parameter(torch.full((3,), 7.0))
    partly.register_buffer("running_mean", torch.full((3,), 5.0))
    mixed.append(partly)
    found = {name: value for name, _, value in initial_values(mixed)}
    assert list(found) == [name for name, _ in mixed.named_parameters()]
    assert found["0.weight"].data_ptr() == real.weight.data_ptr()
    assert_same(before, real)
    assert torch.equal(partly.weight, torch.full((3,), 7.0))
    assert torch.equal(partly.running_mean, torch.full((3,), 5.0))
    assert torch.equal(partly.running_var, torch.ones(3))


def test_a_real_model_draws_nothing() -> None:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    before, state = copy.deepcopy(model), torch.get_rng_state()
    assert [name for name, _, _ in initial_values(model)] == [name for name, _ in model.named_parameters()]
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(before, model)


def test_attributes_and_hooks_survive() -> None:
    class Marked(nn.Parameter):
        pass

    model = on_meta(lambda: nn.Linear(3, 1))
    model.weight = Marked(model.weight.detach())
    model.weight.no_decay = True
    seen: list[str] = []
    model.weight.register_hook(lambda grad: seen.append("hook"))
    handle = model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
    for _ in initial_values(model):
        pass
    assert type(model.weight) is Marked
    assert model.weight.no_decay
    model(torch.ones(2, 3)).sum().backward()
    assert seen == ["hook", "after"]
    assert model.weight.grad.tolist() == [[2.0, 2.0, 2.0]]
    handle.remove()
    model(torch.ones(2, 3)).sum().backward()
    assert seen == ["hook", "after", "hook"]


# ---- what cannot be ----


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("mask", torch.ones(3, 3).tril(), persistent=False)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale[:3])


class Loose(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.positions = torch.arange(3)


class Asks(Bare):
    def reset_parameters(self, value: float) -> None:
        nn.init.constant_(self.scale, value)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Bare, "parameter 'part.scale'"),
        (Masked, "tensor 'part.mask'"),
        (Half, "parameter 'part.scale'"),
        (Loose, "tensor 'part.positions'"),
        (Asks, "parameter 'part.scale'"),
        (lambda: nn.ParameterList([torch.ones(3)]), "parameter 'part.0'"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), "parameter 'part.parametrizations.weight"),
    ],
)
def test_what_nothing_initialises_is_named_before_anything_is_made(make: Make, what: str) -> None:
    model = nn.Sequential()
    model.add_module("fine", on_meta(lambda: nn.Linear(3, 3)))
    model.add_module("part", on_meta(make))
    with pytest.raises(UnsupportedParameter, match=rf"the {what}.* is on meta and nothing initialises it: .*CPU"):
        next(initial_values(model))
    assert model.fine.weight.is_meta


def test_a_lazy_module_is_named() -> None:
    with pytest.raises(UnsupportedParameter, match=r"'1.weight' has no shape yet.*call the model once"):
        next(initial_values(nn.Sequential(on_meta(lambda: nn.Linear(2, 2)), nn.LazyLinear(3))))


def test_a_parameter_that_cannot_be_swapped_is_named() -> None:
    model = on_meta(lambda: nn.Linear(3, 3))
    reference = weakref.ref(model.weight)
    with pytest.raises(UnsupportedParameter, match=r"'weight' on meta cannot become real .*weakref.*on the CPU"):
        next(initial_values(model))
    assert reference() is model.weight


# ---- memory ----


class Live(TorchDispatchMode):
    """The most bytes of memory that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, result)):
            if isinstance(each, Tensor) and not each.is_meta:
                storage = each.untyped_storage()
                self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self.alive.values()))
        return result


def emptied(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As the engine takes them."""
    for name, parameter, value in initial_values(model):
        yield name, value
        del value
        parameter.data = torch.zeros(()).expand(parameter.shape)


def kept_and_peak(make: Make) -> tuple[int, int]:
    """Bytes of all parameters, and of all memory at the worst moment."""
    model = on_meta(make)
    with Live() as live:
        for _, value in emptied(model):
            del value
    return sum(each.nbytes for each in model.parameters()), live.peak_bytes


@pytest.mark.parametrize("name", ["linears", "transformer", "gpt", "gpt2"])
def test_at_no_moment_is_there_a_second_copy(name: str) -> None:
    shape = {"layers": 6, "hidden": 64, "heads": 2, "vocabulary": 64, "positions": 64}
    make = {
        "linears": lambda: nn.Sequential(*[nn.Linear(128, 128) for _ in range(20)]),
        "transformer": lambda: nn.Transformer(64, 2, 4, 4, 128, batch_first=True),
        "gpt": lambda: build("gpt2", torch.get_default_device(), **shape),
        "gpt2": hugging_face("gpt2"),
    }[name]
    largest = max(each.nbytes for each in on_meta(make).parameters())
    total, peak = kept_and_peak(make)
    # One parameter, perhaps another that is drawn and thrown away or copied from, and odds and ends.
    assert largest <= peak <= 2 * largest + 2**13
    assert peak < total / 2


def test_what_counts_memory_sees_a_second_copy() -> None:
    model = on_meta(lambda: nn.Sequential(*[nn.Linear(128, 128) for _ in range(20)]))
    with Live() as live:
        hoard = [value for _, _, value in initial_values(model)]
    assert live.peak_bytes >= sum(each.nbytes for each in hoard)
