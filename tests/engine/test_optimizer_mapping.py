"""``optimizer.state``: what torch's has, once there was a step; read when it is asked for, and written through."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _states import ADAMW, MOMENTUM, assert_same_states, ours, stack, state_of, train
from ps_core import Budget, InvalidInput
from ps_core.engine import chunked, release


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


NAMES = [
    (ADAMW, "fp32", ["step", "exp_avg", "exp_avg_sq"]),
    (ADAMW, "bf16", ["step", "exp_avg", "exp_avg_sq", "master"]),
    (MOMENTUM, "fp32", ["momentum_buffer"]),
    (MOMENTUM, "bf16", ["momentum_buffer", "master"]),
]


@pytest.mark.parametrize(("spec", "precision", "names"), NAMES)
def test_entries_are_there_once_there_was_a_step(pair: Any, spec: Any, precision: str, names: list[str]) -> None:
    model, optimizer = pair(spec, precision)
    parameters = list(model.parameters())
    assert not optimizer.state
    assert len(optimizer.state) == 0
    assert parameters[0] not in optimizer.state
    assert optimizer.state.get(parameters[0]) is None
    assert dict(optimizer.state[parameters[0]]) == {}, "torch's is a defaultdict"
    train(model, optimizer, 0, 2)
    assert optimizer.state
    assert list(optimizer.state) == parameters
    assert list(optimizer.state.keys()) == parameters
    saved = state_of(optimizer)
    for index, (parameter, entry) in enumerate(optimizer.state.items()):
        assert parameter in optimizer.state
        assert list(entry) == names
        assert entry.get("max_exp_avg_sq") is None
        for name, value in entry.items():
            assert torch.equal(value, saved[index][name])
            assert value.shape == (() if name == "step" else parameter.shape)
    with pytest.raises(KeyError):
        optimizer.state[nn.Parameter(torch.zeros(3))]
    assert nn.Parameter(torch.zeros(3)) not in optimizer.state


def halve_in_place(state: Any, key: str) -> None:
    state[key].mul_(0.5)


def assign(state: Any, key: str) -> None:
    state[key] = state[key] * 0.5


def by_augmented_assignment(state: Any, key: str) -> None:
    state[key] *= 0.5


def by_views(state: Any, key: str) -> None:
    value = state[key]
    for row in value.view(value.shape[0], -1).unbind():
        row[:1].mul_(0.5)
        row[1:].mul_(0.5)


def by_data(state: Any, key: str) -> None:
    state[key].data.copy_(state[key].detach() * 0.5)


def by_foreach(state: Any, key: str) -> None:
    torch._foreach_mul_([state[key]], 0.5)


def by_out(state: Any, key: str) -> None:
    value = state[key]
    torch.mul(value, 0.5, out=value)


def by_new_data(state: Any, key: str) -> None:
    state[key].data = state[key] * 0.5


def by_other_memory(state: Any, key: str) -> None:
    value = state[key]
    assert value.set_(value.detach() * 0.5) is value


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "halve",
    [
        *(halve_in_place, assign, by_augmented_assignment, by_views, by_data, by_foreach, by_out, by_new_data),
        by_other_memory,
    ],
)
@pytest.mark.parametrize(("spec", "key"), [(ADAMW, "exp_avg"), (ADAMW, "exp_avg_sq"), (MOMENTUM, "momentum_buffer")])
def test_whatever_writes_to_a_state_is_written_through(
    pair: Any, spec: Any, key: str, halve: Callable[[Any, str], None], precision: str
) -> None:
    model, optimizer = pair(spec, precision)
    train(model, optimizer, 0, 2)
    before = state_of(optimizer)
    first, *others = model.parameters()
    halve(optimizer.state[first], key)
    after = state_of(optimizer)
    assert torch.equal(after[0].pop(key), before[0].pop(key) * 0.5)
    for index in range(len(others) + 1):
        assert all(torch.equal(after[index][name], value) for name, value in before[index].items()), index


def test_the_next_step_is_that_of_the_state_that_was_written(pair: Any) -> None:
    """As in torch, whose optimizer is told the same."""
    (model, optimizer), plain = pair(ADAMW, "fp32"), stack()
    torchs = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    for each, steps in ((model, optimizer), (plain, torchs)):
        train(each, steps, 0, 2)
        first, second, *_ = each.parameters()
        steps.state[first]["exp_avg"].zero_()
        steps.state[first]["step"] += 5
        steps.state[second]["step"].fill_(1)
        steps.state[second]["exp_avg_sq"] = torch.full_like(second, 0.25)
    for index, entry in torchs.state_dict()["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(state_of(optimizer)[index][name], value, rtol=1e-6, atol=1e-7)
    assert train(model, optimizer, 2, 5) == pytest.approx(train(plain, torchs, 2, 5), rel=1e-5)


@pytest.mark.parametrize("spec", [ADAMW, MOMENTUM])
@pytest.mark.parametrize("how", ["clear", "assign", "pop", "del", "entries"])
def test_a_state_that_is_taken_away_begins_anew(pair: Any, spec: Any, how: str) -> None:
    model, optimizer = pair(spec, "fp32")
    train(model, optimizer, 0, 2)
    (fresh, begun), parameters = pair(spec, "fp32", seed=1), list(model.parameters())
    fresh.load_state_dict(model.state_dict())
    if how == "clear":
        optimizer.state.clear()
    elif how == "assign":
        optimizer.state = defaultdict(dict)
    elif how == "pop":
        kept = [optimizer.state.pop(parameter) for parameter in parameters]
        assert all(entry[name].any() for entry in kept for name in entry)
    elif how == "entries":
        for entry in optimizer.state.values():
            entry.clear()
    else:
        for parameter in parameters:
            del optimizer.state[parameter]
    assert not optimizer.state
    with pytest.raises(KeyError):
        del optimizer.state[parameters[0]]
    assert train(model, optimizer, 2, 4) == train(fresh, begun, 2, 4)
    assert_same_states(optimizer, begun)


def test_entries_can_be_given_whole(pair: Any) -> None:
    (model, optimizer), (other, receiver) = pair(), pair(seed=1)
    train(model, optimizer, 0, 3)
    entries = {two: optimizer.state[one] for one, two in zip(model.parameters(), other.parameters(), strict=True)}
    receiver.state = entries
    assert_same_states(optimizer, receiver)
    assert train(model, optimizer, 3, 5) == train(other, receiver, 3, 5), "masters came with them"
    receiver.state[next(other.parameters())] = {}
    assert next(other.parameters()) in receiver.state, "it has a master"
    assert receiver.state[next(other.parameters())]["step"] == 0


def test_masters_are_written_through_to_the_parameter(pair: Any) -> None:
    model, optimizer = pair()
    train(model, optimizer, 0, 1)
    parameter = next(model.parameters())
    value = torch.randn(parameter.shape)
    model.load_state_dict(model.state_dict())  # assigned afterwards, it stands whatever was loaded
    optimizer.state[parameter]["master"].copy_(value)
    assert torch.equal(optimizer.state[parameter]["master"], value)
    assert torch.equal(model.state_dict()["0.weight"], value.bfloat16())


REFUSED = [
    (lambda state, p: state[p].update(ema=torch.zeros(3)), InvalidInput, "no place for 'ema' of '0.weight'"),
    (lambda state, p: state[p].update(exp_avg=torch.zeros(3)), InvalidInput, r"must be a tensor of shape .32, 24."),
    (
        lambda state, p: setattr(state[p]["exp_avg"], "data", torch.zeros(24)),
        InvalidInput,
        r"allowed is .* shape .32, 24.",
    ),
    (lambda state, p: state[p]["exp_avg"].set_(torch.zeros(1)), InvalidInput, r"given other memory .shape .1,"),
    (lambda state, p: state[p]["exp_avg"].set_(p.new_zeros(768).untyped_storage()), InvalidInput, "UntypedStorage"),
    (lambda state, p: state[p].update(step=-1), InvalidInput, "step of '0.weight' must be a whole number"),
    (lambda state, p: state[p].update(step="two"), InvalidInput, "found 'two'"),
    (lambda state, p: state[p].pop("exp_avg"), InvalidInput, "cannot be deleted alone"),
    (lambda state, p: state.update({p: {"exp_avg": torch.zeros(32, 24)}}), InvalidInput, "has no 'exp_avg_sq'"),
    (lambda state, p: state.update({nn.Parameter(torch.zeros(3)): {}}), KeyError, "no parameter of the optimizer"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_what_cannot_be_kept_is_refused(pair: Any, change: Any, error: type[Exception], message: str) -> None:
    model, optimizer = pair()
    train(model, optimizer, 0, 1)
    before = state_of(optimizer)
    with pytest.raises(error, match=message):
        change(optimizer.state, next(model.parameters()))
    after = state_of(optimizer)
    assert all(torch.equal(after[index][name], each) for index, row in before.items() for name, each in row.items())


def test_copies_are_ordinary(pair: Any) -> None:
    model, optimizer = pair()
    train(model, optimizer, 0, 1)
    entry = optimizer.state[next(model.parameters())]
    for kept in (copy.deepcopy(entry), pickle.loads(pickle.dumps(entry)), copy.copy(entry)):
        assert type(kept) is dict
        assert {name: type(value) for name, value in kept.items()} == dict.fromkeys(entry, Tensor)
        kept["exp_avg"].zero_()
    value = entry["exp_avg"]
    for plain in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), value * 1, value.clone()):
        assert type(plain) is Tensor
        plain.zero_()
    assert entry["exp_avg"].any()
    with pytest.raises(ValueError, match="read-only"):
        pytest.importorskip("numpy").asarray(entry["exp_avg"])[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        entry["exp_avg"].detach().numpy()[0] = 0


def test_frozen_parameters_have_none(pair: Any) -> None:
    model = stack()
    model[0].weight.requires_grad_(False)
    model, optimizer = chunked(model, ADAMW, device="emulated", budget=Budget(device="32KiB", host="1MiB"))
    try:
        train(model, optimizer, 0, 1)
        frozen, *others = model.parameters()
        assert list(optimizer.state) == others
        assert dict(optimizer.state[frozen]) == {}
        with pytest.raises(InvalidInput, match=r"'0.weight' is frozen and has no state"):
            optimizer.state[frozen]["exp_avg"] = torch.zeros(32, 24)
    finally:
        release(model)
