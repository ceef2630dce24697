"""Writes to parameters that PyTorch does not count, or that reach a copy only: kept, or refused by name."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from _fake_cuda import FakeRuntime
from _runs import HOST, let_go, stand_in
from _twins import twin
from ps_core import AdamW, Budget, Options, UnsupportedParameter
from ps_core.engine import chunked, materialized, release, save_checkpoint, statistics
from ps_core.engine._devices.cuda.device import CudaDevice

WIDTH, LAYERS, STEPS = 32, 6, 5
ADAMW = AdamW(lr=1e-2, weight_decay=0.1)
LOST = r"'2\.weight' was changed in place.*materialized\(model, names=\['2\.weight'\], write=True\)"
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"host": "64MiB"},
    "roomy": {"device": "1MiB", "host": "64MiB"},
    "tight": {"device": "28KiB", "host": "64MiB"},
    "snug": {"device": "32KiB", "host": "64MiB"},
    "disk": {"device": "28KiB", "host": "64KiB", "disk": "1MiB"},
}
EVERYWHERE = ("cpu", "roomy", "tight", "disk")


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def loss_of(model: nn.Module, index: int) -> Tensor:
    torch.manual_seed(index)
    return (model(torch.randn(4, WIDTH)).float() - torch.randn(4, WIDTH)).square().mean()


Act = Callable[[nn.Module, int], Any]


def train(model: nn.Module, optimizer: Any, before: Act | None = None, between: Act | None = None) -> list[float]:
    """A loop in which something is done before the forward pass, or before the step."""
    losses = []
    for index in range(STEPS):
        if before is not None:
            before(model, index)
        loss = loss_of(model, index)
        loss.backward()
        if between is not None:
            between(model, index)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def manage(place: str, tmp_path: Path, precision: str = "fp32", model: nn.Module | None = None) -> Any:
    where = {"disk_dir": str(tmp_path)} if place == "disk" else {}
    return chunked(
        linears() if model is None else model,
        ADAMW,
        device="cpu" if place == "cpu" else stand_in(),
        budget=Budget(**PLACES[place], **where),
        precision=precision,
        options=Options(group_bytes=4 * WIDTH * (WIDTH + 2), poison=True),
    )


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[...] *= 0.5


def by_numpy_of_data(weight: Tensor) -> None:
    weight.data.numpy()[3] = 0.5


def by_numpy_of_a_view(weight: Tensor) -> None:
    weight.view(-1)[3:7].detach().numpy()[:] = 0.5


def by_dlpack(weight: Tensor) -> None:
    np.from_dlpack(weight.detach()).__imul__(0.5)


def by_a_tensor_of_an_array(weight: Tensor) -> None:
    torch.from_numpy(weight.detach().numpy()).mul_(0.5)


def by_storage(weight: Tensor) -> None:
    weight.detach().untyped_storage().fill_(0)


def by_the_parameters_storage(weight: Tensor) -> None:
    weight.untyped_storage().fill_(0)


def by_address(weight: Tensor) -> None:
    ctypes.memset(weight.data_ptr(), 0, 64)


def by_foreach(weight: Tensor) -> None:
    """Which PyTorch does not count while a mode is on, as between a touch and the end of a pass."""
    torch._foreach_mul_([weight.detach()], 0.5)


WRITES = [
    by_numpy,
    by_numpy_of_data,
    by_numpy_of_a_view,
    by_dlpack,
    by_a_tensor_of_an_array,
    by_storage,
    by_the_parameters_storage,
    by_address,
    by_foreach,
]


def at(step: int, write: Callable[[Tensor], None]) -> Act:
    def act(model: nn.Module, index: int) -> None:
        if index == step:
            with torch.no_grad():
                write(model[2].weight)

    return act


ROWS = [(write, "tight", "before") for write in WRITES if write is not by_numpy]
ROWS += [(by_numpy, place, where) for place in EVERYWHERE for where in ("before", "between")]


@pytest.mark.parametrize(("write", "place", "where"), ROWS)
def test_in_fp32_a_write_is_kept_as_in_plain_pytorch(write: Any, place: str, where: str, tmp_path: Path) -> None:
    plain = linears()
    act = at(2, write)
    expected = train(plain, twin(ADAMW, plain), **{where: act})
    assert train(linears(), twin(ADAMW, linears())) != expected
    model, optimizer = manage(place, tmp_path)
    assert train(model, optimizer, **{where: act}) == pytest.approx(expected, rel=1e-6)
    assert place in ("cpu", "roomy") or statistics(model).evictions
    release(model)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def to_bits(weight: Tensor) -> None:
    weight.detach().view(torch.int16).numpy()[0] = 0


ROWS_16 = [(to_bits, place, "bf16") for place in EVERYWHERE]
ROWS_16 += [(by_storage, "tight", "bf16"), (by_address, "tight", "bf16"), (to_bits, "tight", "fp16")]


@pytest.mark.parametrize(("write", "place", "precision"), ROWS_16)
def test_in_16_bits_a_write_is_refused_and_undone(write: Any, place: str, precision: str, tmp_path: Path) -> None:
    """At the next pass, at the step, and where values are read; then everything is as if nothing had been written."""
    model, optimizer = manage(place, tmp_path, precision)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    occasions: list[Callable[[], Any]] = [
        lambda: loss_of(model, 0),
        model.state_dict,
        lambda: materialized(model).__enter__(),
        lambda: save_checkpoint(tmp_path / "saved", model, optimizer),
    ]
    for occasion in occasions:
        with torch.no_grad():
            write(model[2].weight)
        with pytest.raises(UnsupportedParameter, match=LOST):
            occasion()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
    optimizer.scale(loss_of(model, 0)).backward()
    with torch.no_grad():
        write(model[2].weight)
    with pytest.raises(UnsupportedParameter, match=LOST):
        optimizer.step()
    optimizer.step()
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    release(model)


@pytest.mark.parametrize("device_bytes", ["44KiB", "1MiB"])
def test_on_the_played_cuda_device(device_bytes: str) -> None:
    for precision, refused in (("fp32", False), ("bf16", True)):
        with FakeRuntime(1) as runtime:
            model, optimizer = chunked(
                linears(),
                ADAMW,
                device=CudaDevice(runtime),
                budget=Budget(device=device_bytes, host=HOST),
                precision=precision,
            )
            train(model, optimizer)
            assert device_bytes == "1MiB" or statistics(model).evictions
            with torch.no_grad():
                by_storage(model[2].weight)
            if refused:
                with pytest.raises(UnsupportedParameter, match=LOST):
                    loss_of(model, 0)
            else:
                assert not model.state_dict()["2.weight"].any()
            let_go(model)


# Aliases that are kept.


@pytest.mark.parametrize("place", ["cpu", "roomy"])
def test_a_kept_array_is_the_parameter_as_in_plain_pytorch(place: str, tmp_path: Path) -> None:
    """It shows what steps do, and what is written to it is trained."""
    runs = []
    for plain in (True, False):
        seen: list[Any] = []
        kept: list[Any] = []

        def act(model: nn.Module, index: int, seen: list[Any] = seen, kept: list[Any] = kept) -> None:
            if index == 1:
                kept.append(model[2].weight.detach().numpy())
            elif index > 1:
                seen.append(kept[0].copy())
                kept[0][0] *= 0.5

        if plain:
            model = linears()
            losses = train(model, twin(ADAMW, model), before=act)
        else:
            model, optimizer = manage(place, tmp_path)
            losses = train(model, optimizer, before=act)
            kept.clear()
            release(model)
        runs.append((losses, seen))
    (expected, shown), (losses, seen) = runs
    assert losses == pytest.approx(expected, rel=1e-6)
    for one, other in zip(seen, shown, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert not np.array_equal(seen[0], seen[1])


@pytest.mark.parametrize("place", ["cpu", "roomy"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_kept_alias_shows_what_is_loaded_and_stepped(precision: str, place: str, tmp_path: Path) -> None:
    model, optimizer = manage(place, tmp_path, precision)
    loss_of(model, 0).backward()
    alias = model[2].weight.detach()
    before = alias.clone()
    optimizer.step()
    assert not torch.equal(alias, before)
    assert torch.equal(alias, model.state_dict()["2.weight"])
    model.load_state_dict({"2.weight": torch.ones(WIDTH, WIDTH)}, strict=False)
    assert bool((alias == 1).all())
    del alias
    let_go(model)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("write", [False, True])
def test_an_alias_keeps_its_memory_through_a_block_of_plain_parameters(write: bool, place: str, tmp_path: Path) -> None:
    model, optimizer = manage(place, tmp_path)
    loss_of(model, 0).backward()
    alias = model[2].weight.detach()
    with materialized(model, write=write), torch.no_grad():
        model[2].weight.mul_(0.5)
    for index in range(1, 3):
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(alias, model.state_dict()["2.weight"])
        loss_of(model, index).backward()
    others = {name: value.clone() for name, value in model.state_dict().items() if name != "2.weight"}
    alias.zero_()  # in memory that is still its own
    with pytest.raises(UnsupportedParameter, match=LOST):
        loss_of(model, 3)
    assert all(torch.equal(value, others[name]) for name, value in model.state_dict().items() if name in others)
    del alias
    let_go(model)


@pytest.mark.parametrize("place", ["roomy", "tight"])
def test_a_change_through_an_alias_of_before_a_step_is_noticed(place: str, tmp_path: Path) -> None:
    model, optimizer = manage(place, tmp_path)
    loss_of(model, 0).backward()
    alias = model[2].bias.detach()
    optimizer.step()
    alias.add_(1)
    with pytest.raises(UnsupportedParameter, match=r"'2\.bias' was changed in place"):
        loss_of(model, 0)
    del alias
    let_go(model)


def test_a_write_inside_forward_is_kept(tmp_path: Path) -> None:
    class Bounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            np.clip(self.weight.detach().numpy(), -0.1, 0.1, out=self.weight.detach().numpy())
            return super().forward(x)

    def build() -> nn.Module:
        model = linears()
        model[2].__class__ = Bounded
        return model

    plain = build()
    expected = train(plain, twin(ADAMW, plain))
    model, optimizer = manage("tight", tmp_path, model=build())
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-6)
    release(model)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_what_is_written_to_one_of_a_tie_is_written_to_both(place: str, tmp_path: Path) -> None:
    runs = []
    for managed in (False, True):
        model = linears()
        model[4].weight.data = model[2].weight.data
        optimizer: Any = twin(ADAMW, model)
        if managed:
            model, optimizer = manage(place, tmp_path, model=model)
        runs.append(train(model, optimizer, before=at(2, by_numpy)))
        if managed:
            assert torch.equal(model[2].weight.detach(), model[4].weight.detach())
            release(model)
    assert runs[1] == pytest.approx(runs[0], rel=1e-6)


def test_a_frozen_weight_is_what_was_written(tmp_path: Path) -> None:
    model = linears()
    model[2].requires_grad_(False)
    model, _ = manage("tight", tmp_path, "bf16", model=model)
    to_bits(model[2].weight)
    assert not model.state_dict()["2.weight"][0].any()
    let_go(model)


# Reading is no writing.


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", EVERYWHERE)
def test_who_only_reads_changes_nothing(place: str, precision: str, tmp_path: Path) -> None:
    """As moving averages and statistics do, at every step."""

    def read(model: nn.Module, index: int) -> None:
        for parameter in model.parameters():
            float(parameter.detach().float().norm())
            parameter.data_ptr()
            parameter.detach().float().numpy().sum()

    runs = []
    for act in (None, read):
        model, optimizer = manage(place, tmp_path, precision)
        losses = train(model, optimizer, before=act, between=act)
        runs.append((losses, model.state_dict()))
        release(model)
    (expected, state), (losses, found) = runs
    assert losses == expected
    assert all(torch.equal(state[name], found[name]) for name in state)


def test_ordinary_training_exposes_nothing_and_compares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("nothing was exposed")

    monkeypatch.setattr("ps_core.engine._parameters.unseen_writes.ExposedParameters.add", never)
    model, optimizer = manage("tight", tmp_path, "bf16")
    train(model, optimizer)
    model.eval()
    with torch.no_grad():
        loss_of(model, 0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.load_state_dict(model.state_dict())
    save_checkpoint(tmp_path / "saved", model, optimizer)
    release(model)


# What is lost otherwise: said.


def test_release_says_what_it_goes_without(tmp_path: Path) -> None:
    for write in (to_bits, lambda weight: weight.data.fill_(1)):
        model, _ = manage("tight", tmp_path, "bf16")
        write(model[2].weight)
        with pytest.warns(UserWarning, match=r"release\(model\) goes without what was written: '2\.weight'"):
            release(model)
    model, _ = manage("tight", tmp_path, "bf16")
    model[2].weight.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        release(model)


def write_into(model: nn.Module) -> None:
    model.state_dict()["2.weight"].fill_(1)


def write_into_a_kept_one(model: nn.Module) -> None:
    model.kept = model.state_dict()
    model.kept["2.weight"][0] = 1


def write_into_a_part(model: nn.Module) -> None:
    model[2].state_dict()["weight"].detach().mul_(2)


@pytest.mark.parametrize("write", [write_into, write_into_a_kept_one, write_into_a_part])
@pytest.mark.parametrize("place", ["cpu", "tight"])
def test_writing_into_a_state_dict_is_refused_for_it_is_a_copy(write: Any, place: str, tmp_path: Path) -> None:
    model, optimizer = manage(place, tmp_path)
    occasions: list[Callable[[], Any]] = [lambda: loss_of(model, 0), model.state_dict, optimizer.step]
    for occasion in occasions:
        write(model)
        with pytest.raises(UnsupportedParameter, match=r"'2\.weight' was changed in place in what state_dict\(\) ret"):
            occasion()
        loss_of(model, 0).backward()
    release(model)


def test_a_state_dict_that_is_changed_and_loaded_is_fine(tmp_path: Path) -> None:
    model, optimizer = manage("tight", tmp_path)
    kept = model.state_dict()
    kept["2.weight"].fill_(1)
    model.load_state_dict(kept)
    other = {name: value.clone().mul_(2) for name, value in model.state_dict().items()}
    loss_of(model, 0).backward()
    optimizer.step()
    assert bool((other["2.weight"] == 2).all())
    release(model)


class Cached(nn.Linear):
    """Keeps a view of its weight from its first forward on, of which plain PyTorch's steps change the elements."""

    view: Tensor | None = None

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        if self.view is None:
            self.view = self.make(self.weight)
        return super().forward(x) + x @ self.view


@pytest.mark.parametrize("make", [lambda w: w.t(), lambda w: w.data, lambda w: w.detach().t()], ids=["t", "data", "d"])
@pytest.mark.parametrize("place", ["cpu", "snug"])
def test_a_view_that_a_module_caches_shows_what_steps_do(make: Any, place: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = linears()
        model[2] = Cached(make)
        return model

    plain = build()
    expected = train(plain, twin(ADAMW, plain))
    model, optimizer = manage(place, tmp_path, model=build())
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-6)
    let_go(model)
