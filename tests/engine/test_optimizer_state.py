"""The optimizer's state is torch's: each goes on from the other's, and what does not fit changes nothing."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from _fake_engine import FakeEngine, gradients, model
from _states import masters_of, ours, train
from _twins import ADAM, ADAMW, MOMENTUM, NO_DECAY, Spec, assert_near, steps, twin, with_groups
from ps_core import SGD, Group, InvalidInput
from ps_core._extents import Kind
from ps_core.engine import WeightAverage, load_checkpoint, save_checkpoint
from ps_core.engine._gradients.loss_scale import LossScale

BOTH = [(spec, groups) for spec in (ADAMW, ADAM, MOMENTUM) for groups in ((), NO_DECAY)]
IDS = [f"{type(spec).__name__}-{len(groups) + 1}" for spec, groups in BOTH]


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        assert got["state"][index].keys() == entry.keys()
        for name, value in entry.items():
            mine = got["state"][index][name]
            assert (mine.shape, mine.dtype, mine.device) == (value.shape, value.dtype, value.device)
            torch.testing.assert_close(mine, value, rtol=1e-6, atol=1e-7)
    for mine, theirs in zip(got["param_groups"], expected["param_groups"], strict=True):
        assert {key: mine[key] for key in theirs} == theirs | {"fused": True}, "the step that is the engine's"


@pytest.mark.parametrize(("spec", "groups"), BOTH, ids=IDS)
def test_state_is_torchs_and_each_goes_on_from_the_others(spec: Spec, groups: tuple[Group, ...]) -> None:
    spec = with_groups(spec, groups)
    plain, engine = model(), FakeEngine(managed := model())
    expected, optimizer = twin(spec, plain), engine.optimizer(spec)
    before = [each.detach().clone() for each in plain.parameters()]
    steps(optimizer, managed, range(3), engine)
    steps(expected, plain, range(3))
    assert_same_state(optimizer.state_dict(), expected.state_dict())
    # Ours goes on in torch's optimizer, torch's in ours, through a file.
    plain_on, engine_on = copy.deepcopy(plain), FakeEngine(managed_on := copy.deepcopy(plain))
    after_plain, after_managed = twin(spec, plain_on), engine_on.optimizer(spec)
    after_plain.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    after_managed.load_state_dict(pickle.loads(pickle.dumps(expected.state_dict())))
    steps(expected, plain, range(3, 6))
    steps(after_plain, plain_on, range(3, 6))
    steps(after_managed, managed_on, range(3, 6), engine_on)
    assert_near(plain_on, plain, before, 6)
    assert_near(managed_on, plain, before, 6)
    assert_same_state(after_managed.state_dict(), expected.state_dict())


@pytest.mark.parametrize("spec", [ADAMW, MOMENTUM])
def test_with_masters_a_run_resumes_to_the_bit(spec: Spec) -> None:
    engine = FakeEngine(managed := model(), LossScale(value=8.0, growth_interval=4))
    optimizer = engine.optimizer(spec)
    for seed in range(3):
        optimizer.scale(torch.ones(()))
        steps(optimizer, managed, range(seed, seed + 1), engine)
    state = pickle.loads(pickle.dumps(optimizer.state_dict(masters=True)))
    assert masters_of(state).keys() == {0, 1, 2, 3}
    assert (
        state["loss_scale"]
        == state["param_groups"][0]["loss_scale"]
        == LossScale(value=8.0, growth_interval=4, clean_steps=3).state_dict()
    )
    fresh = FakeEngine(other := model(seed=9), LossScale())
    resumed = fresh.optimizer(spec)
    resumed.load_state_dict(state)
    assert resumed.loss_scale == 8.0
    for seed in range(3, 6):
        for opt, net, eng in ((optimizer, managed, engine), (resumed, other, fresh)):
            opt.scale(torch.ones(()))
            steps(opt, net, range(seed, seed + 1), eng)
    for one, two in zip(engine.records, fresh.records, strict=True):
        assert one.steps == two.steps or spec is MOMENTUM
        assert all(torch.equal(one.states[kind], two.states[kind]) for kind in one.states)
    assert optimizer.loss_scale == resumed.loss_scale == 16.0


def test_a_fresh_state_makes_a_used_optimizer_fresh() -> None:
    engine = FakeEngine(managed := model())
    optimizer = engine.optimizer(ADAMW)
    fresh = optimizer.state_dict()
    assert fresh["state"] == {}
    steps(optimizer, managed, range(2), engine)
    optimizer.load_state_dict(fresh)
    assert [record.steps for record in engine.records] == [0] * 4
    assert not any(bool(record.states[kind].any()) for record in engine.records for kind in (Kind.M, Kind.V))


def test_frozen_parameters_have_a_place_and_no_state() -> None:
    plain, managed = model(), model()
    for each in (plain, managed):
        each[0].weight.requires_grad_(False)
    engine = FakeEngine(managed)
    optimizer, expected = engine.optimizer(ADAMW), twin(ADAMW, plain)
    for seed in range(2):
        grads = gradients(plain, seed)
        engine.put([None, *grads[1:]])
        for parameter, grad in list(zip(plain.parameters(), grads, strict=True))[1:]:
            parameter.grad = grad
        optimizer.step()
        expected.step()
    state = optimizer.state_dict(masters=True)
    assert_same_state(optimizer.state_dict(), expected.state_dict())
    assert state["state"].keys() == masters_of(state).keys() == {1, 2, 3}
    thawed = FakeEngine(model()).optimizer(ADAMW)
    thawed.load_state_dict(state)
    state["state"][0] = {"step": torch.tensor(2.0), **{key: torch.ones(33, 7) for key in ("exp_avg", "exp_avg_sq")}}
    with pytest.raises(InvalidInput, match=r"state for '0.weight', which is frozen"):
        optimizer.load_state_dict(state)


def spoil_group(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


def spoil_count(state: dict[str, Any]) -> None:
    state["param_groups"].append(state["param_groups"][0])


def spoil_shape(state: dict[str, Any]) -> None:
    state["state"][2]["exp_avg"] = torch.zeros(3)


def spoil_kind(state: dict[str, Any]) -> None:
    state["state"][3] = {"momentum_buffer": torch.zeros(5)}


def spoil_step(state: dict[str, Any]) -> None:
    del state["state"][3]["step"]


def spoil_master(state: dict[str, Any]) -> None:
    state["state"][1]["master"] = "no tensor"


def spoil_memory(state: dict[str, Any]) -> None:
    state["state"][3]["exp_avg"] = torch.zeros(5, device="meta")


def spoil_layout(state: dict[str, Any]) -> None:
    state["state"][3]["exp_avg_sq"] = torch.ones(5).to_sparse()


def spoil_type(state: dict[str, Any]) -> None:
    state["state"][3]["master"] = torch.ones(5, dtype=torch.complex64)


def spoil_infinite_step(state: dict[str, Any]) -> None:
    state["state"][3]["step"] = math.inf


def spoil_amsgrad(state: dict[str, Any]) -> None:
    state["param_groups"][0]["amsgrad"] = True


def spoil_rule(state: dict[str, Any]) -> None:
    state["param_groups"][0]["decoupled_weight_decay"] = False


def spoil_number(state: dict[str, Any]) -> None:
    state["param_groups"][0]["lr"] = math.nan


def spoil_keys(state: dict[str, Any]) -> None:
    state["state"] = {f"{index}.weight": entry for index, entry in state["state"].items()}


def spoil_entry(state: dict[str, Any]) -> None:
    state["state"][2] = 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("state"), "this is no optimizer's state dict, which has 'state', a dict, and 'param_"),
        (lambda state: state.pop("param_groups"), "pass what optimizer.state_dict.. returned"),
        (lambda state: state["param_groups"][0].pop("params"), "this is no optimizer's state dict"),
        (spoil_keys, "the state dict has a state '0.weight', which is in no param group: it would be lost"),
        (spoil_entry, "the state dict's state 2 is of type int, not a dict"),
        (spoil_group, r"groups of \[3\] parameters, the optimizer has groups of \[4\]"),
        (spoil_count, r"groups of \[4, 4\] parameters"),
        (spoil_shape, r"exp_avg of '1.weight' must be a tensor of shape \(5, 33\), found \(3,\)"),
        (spoil_kind, "the state of '1.bias' has no 'exp_avg', found .'momentum_buffer'.: is it AdamW's?"),
        (spoil_step, "the state of '1.bias' has no 'step'"),
        (spoil_master, "the master of '0.bias' must be a tensor of shape .33,., found 'no tensor'"),
        (spoil_memory, "exp_avg of '1.bias' must be a dense tensor of real numbers, found .*float32, .*, on meta"),
        (spoil_layout, "exp_avg_sq of '1.bias' must be a dense tensor of real numbers, found .*torch.sparse_coo, on"),
        (spoil_type, "the master of '1.bias' must be a dense tensor of real numbers, found torch.complex64"),
        (spoil_infinite_step, "step of '1.bias' must be a whole number of at least 0, found inf"),
        (spoil_amsgrad, "'amsgrad'. is True; the engine's AdamW has only False"),
        (spoil_rule, "'decoupled_weight_decay'. is False"),
        (spoil_number, "lr must be a finite number"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil: Callable[[dict[str, Any]], None], message: str) -> None:
    engine = FakeEngine(managed := model())
    optimizer = engine.optimizer(ADAMW)
    steps(optimizer, managed, range(2), engine)
    bad = copy.deepcopy(optimizer.state_dict(masters=True))
    for entry in bad["state"].values():
        entry["exp_avg"].add_(1.0)
    bad["param_groups"][0]["lr"] = 99.0
    spoil(bad)
    before = copy.deepcopy(optimizer.state_dict(masters=True))
    with pytest.raises(InvalidInput, match=message):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict(masters=True)
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert all(torch.equal(after["state"][index][name], value) for name, value in entry.items())


class OutOfMemory(torch.Tensor):
    """A tensor that cannot be converted."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise MemoryError("no memory for a copy")


@pytest.mark.parametrize("how", ["load_state_dict", "state"])
def test_what_was_half_loaded_is_not_trained(tmp_path: Path, how: str) -> None:
    managed, optimizer = ours(precision="fp16")
    train(managed, optimizer, 0, 2)
    sound = copy.deepcopy(optimizer.state_dict())
    save_checkpoint(tmp_path / "saved", managed, optimizer)
    train(managed, optimizer, 2, 4)
    bad = {**sound, "state": {**sound["state"]}}
    bad["state"][3] = {**sound["state"][3], "exp_avg": torch.ones(16).as_subclass(OutOfMemory)}

    def load(state: dict[str, Any]) -> None:
        if how == "load_state_dict":
            optimizer.load_state_dict(state)
        else:
            optimizer.state = dict(zip(managed.parameters(), state["state"].values(), strict=False))

    with pytest.raises(MemoryError, match="no memory for a copy"):
        load(bad)
    message = r"optimizer\..* failed half way, so that parameters are a mixture of old and new: load a sound one"
    for attempt in (
        lambda: train(managed, optimizer, 4, 5),
        lambda: save_checkpoint(tmp_path / "half", managed, optimizer),
    ):
        with pytest.raises(InvalidInput, match=message):
            attempt()
    if how == "state":
        load_checkpoint(tmp_path / "saved", managed, optimizer)
    else:
        load(sound)
    train(managed, optimizer, 4, 5)


@pytest.mark.parametrize("given", [None, 3, {}, [("state", {}), ("param_groups", [])], "state"])
def test_what_is_no_state_dict_is_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidInput, match="this is no optimizer's state dict"):
        FakeEngine(model()).optimizer(ADAMW).load_state_dict(given)


def test_a_load_that_is_refused_keeps_the_loss_scale() -> None:
    managed, optimizer = ours(precision="fp16")
    train(managed, optimizer, 0, 1)
    state = copy.deepcopy(optimizer.state_dict())
    state["loss_scale"]["scale"] = 8.0
    average = WeightAverage(managed)
    average.update()
    before = optimizer.loss_scale
    with average.applied(), pytest.raises(InvalidInput, match=r"inside applied\(\)"):
        optimizer.load_state_dict(state)
    assert optimizer.loss_scale == before
    train(managed, optimizer, 1, 2)
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 8.0


def test_what_is_loaded_is_a_copy() -> None:
    engine = FakeEngine(managed := model())
    optimizer = engine.optimizer(ADAMW)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = torch.tensor(0.5)
    optimizer.load_state_dict(state)
    state["param_groups"][0]["lr"].fill_(9.0)
    steps(optimizer, managed, range(1), engine)
    assert engine.steps[0][0]["0.bias"].lr == 0.5


def test_momentum_that_is_off_has_no_state() -> None:
    plain, engine = model(), FakeEngine(managed := model())
    spec = SGD(lr=0.1)
    optimizer, expected = engine.optimizer(spec), twin(spec, plain)
    steps(optimizer, managed, range(2), engine)
    steps(expected, plain, range(2))
    assert_same_state(optimizer.state_dict(), expected.state_dict())
    optimizer.load_state_dict(expected.state_dict())
