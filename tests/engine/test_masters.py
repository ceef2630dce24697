"""fp32 masters outlast what is loaded: 16-bit weights and an optimizer's state, whichever comes first."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from _states import ADAMW, MOMENTUM, assert_same_states, masters_of, ours, stack, state_of, train
from _twins import twin
from ps_core import AdamW, InvalidInput
from ps_core.engine import chunked, load_checkpoint, load_weights, materialized, release, save_checkpoint

SLOW = AdamW(lr=1e-6)
"""Of which nothing shows in 16 bits for a while."""
LOST = "training goes on from weights of 16 bits, without the fp32 masters"


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[nn.Module, Any]]]:
    """Makes managed pairs, and releases them in the end."""
    made: list[nn.Module] = []

    def make(*args: Any, **more: Any) -> tuple[nn.Module, Any]:
        model, optimizer = ours(*args, **more)
        made.append(model)
        return model, optimizer

    yield make
    for model in made:
        release(model)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Gives what was said at level WARNING since the last time."""

    def give() -> list[str]:
        rows = [each.message for each in caplog.records if each.levelno == logging.WARNING and each.name == "ps_core"]
        caplog.clear()
        return rows

    return give


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    for name, value in one[0].state_dict().items():
        assert torch.equal(other[0].state_dict()[name], value), name
    assert_same_states(one[1], other[1])


# Resuming.


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("steps", [0, 20])
@pytest.mark.parametrize("spec", [SLOW, ADAMW, MOMENTUM])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resumed_to_the_bit_whichever_is_loaded_first(
    pair: Any, said: Any, precision: str, spec: Any, steps: int, first: str
) -> None:
    run, again = pair(spec, precision), pair(spec, precision, seed=1)
    train(*run, 0, steps)
    model, optimizer = through_a_file(run[0].state_dict()), through_a_file(run[1].state_dict())
    if first == "optimizer":
        again[1].load_state_dict(optimizer)
    again[0].load_state_dict(model)
    if first == "model":
        again[1].load_state_dict(optimizer)
    assert_same(run, again)
    assert train(*run, steps, steps + 3) == train(*again, steps, steps + 3)
    assert_same(run, again)
    assert said() == []


def test_an_earlier_formats_masters_are_read(pair: Any) -> None:
    """They were beside the states, under a key of their own."""
    run, again = pair(), pair(seed=1)
    train(*run, 0, 3)
    state = run[1].state_dict()
    state["masters"] = {index: entry.pop("master") for index, entry in state["state"].items()}
    again[0].load_state_dict(run[0].state_dict())
    again[1].load_state_dict(through_a_file(state))
    assert_same(run, again)


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_masters_of_another_precision(pair: Any, first: str) -> None:
    """Weights of bf16 in a run in fp16 agree with masters that round to them in bf16."""
    run, again = pair(ADAMW, "bf16"), pair(ADAMW, "fp16", seed=1)
    train(*run, 0, 3)
    again[1].load_state_dict(run[1].state_dict())
    again[0].load_state_dict(run[0].state_dict())
    if first == "model":
        again[1].load_state_dict(run[1].state_dict())
    assert all(torch.equal(masters_of(again[1].state_dict())[i], v) for i, v in masters_of(run[1].state_dict()).items())


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_weights_that_were_changed_stay_as_they_were_loaded(pair: Any, said: Any, first: str) -> None:
    run, again = pair(), pair(seed=1)
    train(*run, 0, 3)
    weights, state = run[0].state_dict(), run[1].state_dict()
    weights["0.weight"][3] = 7.0
    if first == "optimizer":
        again[1].load_state_dict(state)
    again[0].load_state_dict(weights)
    if first == "model":
        again[1].load_state_dict(state)
    for name, value in again[0].state_dict().items():
        assert torch.equal(value, weights[name]), name
    expected, found = masters_of(state), masters_of(again[1].state_dict())
    expected[0][3] = 7.0
    assert all(torch.equal(found[index], value) for index, value in expected.items()), "the others' masters came too"


def test_a_state_of_fp32_weights_gives_the_masters(pair: Any, said: Any) -> None:
    """A plain run's goes on in 16 bits without a loss, whichever is loaded first."""
    plain = stack(3)
    torchs = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    train(plain, torchs, 0, 3)
    for order in ("model", "optimizer"):
        model, optimizer = pair(seed=1)
        if order == "model":
            model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(torchs.state_dict())
        if order == "optimizer":
            model.load_state_dict(plain.state_dict())
        for index, value in enumerate(plain.parameters()):
            assert torch.equal(masters_of(optimizer.state_dict())[index], value)
        train(model, optimizer, 3, 4)
    assert said() == []


def test_loading_what_is_there_changes_nothing(pair: Any, said: Any) -> None:
    """As where an evaluation swaps weights and puts them back."""
    run, twin = pair(SLOW), pair(SLOW)
    for each in (run, twin):
        train(*each, 0, 5)
    run[0].load_state_dict(run[0].state_dict())
    assert_same(run, twin)
    assert train(*run, 5, 8) == train(*twin, 5, 8)
    assert said() == []


def test_partial_loads_keep_the_others(pair: Any) -> None:
    run, twin = pair(SLOW), pair(SLOW)
    for each in (run, twin):
        train(*each, 0, 5)
    run[0].load_state_dict({"2.bias": torch.ones(16)}, strict=False)
    before, after = masters_of(state_of_all(twin)), masters_of(state_of_all(run))
    assert torch.equal(after.pop(3), torch.ones(16))
    assert all(torch.equal(value, before[index]) for index, value in after.items())


def state_of_all(pair: tuple[nn.Module, Any]) -> dict[str, Any]:
    return {"state": state_of(pair[1])}


# What is lost is told.


@pytest.mark.parametrize("how", ["model first", "optimizer first", "load_weights", "built from 16 bits"])
def test_resuming_without_masters_is_told_once(pair: Any, said: Any, how: str, tmp_path: Path) -> None:
    run, again = pair(SLOW), pair(SLOW, seed=1)
    train(*run, 0, 5)
    weights, state = run[0].state_dict(), run[1].state_dict(masters=False)
    if how == "built from 16 bits":
        plain = stack().bfloat16()
        plain.load_state_dict(weights)
        again = chunked(plain, SLOW)
    if how == "model first":
        again[0].load_state_dict(weights)
    elif how == "load_weights":
        save_file(weights, tmp_path / "model.safetensors")
        load_weights(again[0], tmp_path)
    assert said() == [], "nothing is known of training yet"
    again[1].load_state_dict(state)
    if how == "optimizer first":
        again[0].load_state_dict(weights)
    (message,) = said()
    count = 5 if how == "optimizer first" else 6  # the weight of the norm is 1 before and after
    assert message.startswith(f"Sequential: {LOST} of {count} parameters ('0.weight' first)")
    assert "optimizer.state_dict()" in message
    train(*again, 5, 7)
    again[0].load_state_dict(weights)
    train(*again, 7, 8)
    assert said() == [], "once is enough"
    if how == "built from 16 bits":
        release(again[0])


def test_an_older_state_of_the_model_alone_is_told_when_training_goes_on(pair: Any, said: Any) -> None:
    model, optimizer = pair()
    older = model.state_dict()
    train(model, optimizer, 0, 3)
    model.load_state_dict(older)
    assert said() == [], "the best model may have been loaded at the end"
    for name, value in model.state_dict().items():
        assert torch.equal(value, older[name])
    for value, master in zip(older.values(), masters_of(optimizer.state_dict()).values(), strict=True):
        assert torch.equal(master, value.float()), "nothing of the last model is left in the masters"
    train(model, optimizer, 3, 4)
    assert len(said()) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_loses_nothing_is_not_told(pair: Any, said: Any, precision: str, tmp_path: Path) -> None:
    model, optimizer = pair(ADAMW, precision)
    model.load_state_dict({name: value.bfloat16() for name, value in stack(4).state_dict().items()})
    optimizer.load_state_dict(optimizer.state_dict(masters=False))
    train(model, optimizer, 0, 2)
    optimizer.load_state_dict(optimizer.state_dict(masters=False))
    train(model, optimizer, 2, 3)
    save_checkpoint(tmp_path / "a", model, optimizer)
    if precision == "bf16":
        model.load_state_dict({name: value.bfloat16() for name, value in stack(4).state_dict().items()})
        load_checkpoint(tmp_path / "a", model, optimizer)
        train(model, optimizer, 3, 4)
    assert said() == []


# Masters in the state dict, or not.


def test_masters_can_be_left_out(pair: Any) -> None:
    model, optimizer = pair()
    train(model, optimizer, 0, 2)

    def kept(state: dict[str, Any]) -> int:
        return sum(value.nbytes for entry in state["state"].values() for name, value in entry.items() if name != "step")

    numel = sum(parameter.numel() for parameter in model.parameters())
    assert kept(optimizer.state_dict()) == 12 * numel
    assert kept(optimizer.state_dict(masters=False)) == 8 * numel
    optimizer.masters_in_state_dict = False
    assert kept(optimizer.state_dict()) == 8 * numel
    assert "master" not in optimizer.state[next(model.parameters())]
    assert kept(optimizer.state_dict(masters=True)) == 12 * numel


def test_in_fp32_they_are_there_if_asked_for(pair: Any) -> None:
    model, optimizer = pair(ADAMW, "fp32")
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer, 0, 2)
    assert not masters_of(optimizer.state_dict())
    for index, value in enumerate(model.state_dict().values()):
        assert torch.equal(masters_of(optimizer.state_dict(masters=True))[index], value)


# Changes outside of the loop.


def test_what_materialized_did_not_change_keeps_its_masters(pair: Any) -> None:
    """Clipping weights after every step must not round all of them."""
    run, twin = pair(SLOW), pair(SLOW)
    for each in (run, twin):
        train(*each, 0, 5)
    with materialized(run[0], write=True), torch.no_grad():
        for parameter in run[0].parameters():
            parameter.clamp_(max=0.1)
    changed = 0
    before, after = masters_of(state_of_all(twin)), masters_of(state_of_all(run))
    for index, weight in enumerate(twin[0].state_dict().values()):
        over = weight > torch.tensor(0.1).bfloat16()
        changed += int(over.sum())
        assert torch.equal(after[index][~over], before[index][~over])
        assert bool((after[index][over] == torch.tensor(0.1).bfloat16().float()).all())
    assert changed > 0


# A run that goes on elsewhere, and comes back.


@pytest.mark.parametrize("spec", [ADAMW, MOMENTUM])
@pytest.mark.parametrize("again", ["loaded", "built"])
def test_masters_that_torchs_optimizer_carried_along_are_behind(pair: Any, caplog: Any, spec: Any, again: str) -> None:
    """torch keeps the entry, and steps parameters without it: newer weights that are loaded stay."""
    model, optimizer = pair(spec)
    train(model, optimizer, 0, 2)
    plain = stack()
    plain.load_state_dict(model.state_dict())
    torchs = twin(spec, plain)
    torchs.load_state_dict(optimizer.state_dict())
    train(plain, torchs, 2, 5)
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    assert "master" in torchs.state_dict()["state"][0]
    caplog.set_level(logging.INFO, "ps_core")
    if again == "loaded":
        back, state = pair(spec, seed=1)
        back.load_state_dict(weights)
        state.load_state_dict(torchs.state_dict())
    else:
        back, state = ours(spec, made=plain)
        state.load_state_dict(torchs.state_dict())
        assert "the parameters are those masters now" in caplog.text, "what is there could be newer or older"
        back.load_state_dict(weights)
    for value, master in zip(weights.values(), masters_of(state.state_dict()).values(), strict=True):
        assert torch.equal(master, value)
    if again == "built":
        release(back)


def test_masters_of_16_bits_are_none(pair: Any) -> None:
    """torch's optimizers cast what they load to their parameters' type."""
    (model, optimizer), (other, receiver) = pair(), pair(seed=1)
    train(model, optimizer, 0, 2)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["master"] = entry["master"].bfloat16()
    before = other.state_dict()
    receiver.load_state_dict(state)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in before.items())


def test_states_belong_to_names_in_whatever_order(pair: Any) -> None:
    (model, optimizer), (other, receiver) = pair(), pair(seed=1)
    train(model, optimizer, 0, 2)
    state = optimizer.state_dict(masters=True)
    group = state["param_groups"][0]
    group["param_names"], group["params"] = group["param_names"][::-1], group["params"][::-1]
    receiver.load_state_dict(state)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    group["params"] = group["params"][::-1]
    with pytest.raises(InvalidInput, match=r"the master of '0\.weight' must be a tensor of shape"):
        receiver.load_state_dict(state)


def test_after_release_there_is_no_state() -> None:
    model, optimizer = ours()
    train(model, optimizer, 0, 1)
    state, parameter = optimizer.state_dict(), next(model.parameters())
    entry = optimizer.state[parameter]
    value = entry["exp_avg"]
    release(model)
    for use in (
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(state),
        lambda: entry["exp_avg"],
        value.zero_,
        optimizer.state.clear,
    ):
        with pytest.raises(InvalidInput, match="this model was released"):
            use()
