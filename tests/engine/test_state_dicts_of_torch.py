"""State dicts as torch's own functions take and give them: `get_state_dict`, `set_state_dict`, `dcp.save`, `dcp.load`.

Everything here is bitwise: what one optimizer gave, the other has.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from _states import ADAMW, MOMENTUM, assert_same_states, loss_of, ours, stack, state_of, train
from _twins import twin
from ps_core import SGD, Adam, AdamW
from ps_core.engine import release, statistics

ADAM, PLAIN_SGD = Adam(lr=0.01, weight_decay=0.1), SGD(lr=0.1, weight_decay=0.1)
OPTIONS = {
    "as they are": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full on the CPU": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def assert_same(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    for name, value in one[0].state_dict().items():
        assert torch.equal(other[0].state_dict()[name], value), name
    assert_same_states(one[1], other[1])
    assert one[1].loss_scale == other[1].loss_scale


def read_again(pair: tuple[nn.Module, Any], folder: Path, options: StateDictOptions) -> None:
    """Load by way of a state dict of what is there, as torch's tutorial has it."""
    model, optimizer = get_state_dict(*pair, options=options)
    found = {"model": model, "optimizer": optimizer}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    told = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
    set_state_dict(*pair, **told, options=options)


@EVERY
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("spec", "precision"), [(ADAMW, "bf16"), (ADAMW, "fp16"), (ADAMW, "fp32"), (ADAM, "bf16"), (MOMENTUM, "bf16")]
)
def test_there_and_back(spec: Any, precision: str, steps: int, options: StateDictOptions, tmp_path: Path) -> None:
    run, again, third = ours(spec, precision), ours(spec, precision, seed=1), ours(spec, precision, seed=2)
    train(*run, 0, steps)
    before = state_of(run[1])
    model, optimizer = get_state_dict(*run, options=options)
    if steps:
        after = state_of(run[1])
        assert all(torch.equal(after[index][name], each) for index, row in before.items() for name, each in row.items())
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "a", no_dist=True)
    read_again(again, tmp_path / "a", options)
    set_state_dict(*third, model_state_dict=model, optim_state_dict=optimizer, options=options)
    assert_same(run, again)
    assert_same(run, third)
    losses = train(*run, 3, 6)
    assert losses == train(*again, 3, 6) == train(*third, 3, 6)
    assert_same(run, again)
    for each, _ in (run, again, third):
        release(each)


@pytest.mark.parametrize("spec", [ADAMW, ADAM, MOMENTUM, PLAIN_SGD])
def test_before_any_step_it_does_what_it_does_to_torchs(spec: Any) -> None:
    """torch fills an empty state by a step with gradients of zero: torch's optimizer counts it, and ours."""
    run, plain = ours(spec, "fp32"), stack()
    theirs = twin(spec, plain)
    for model, optimizer in (run, (plain, theirs)):
        get_optimizer_state_dict(model, optimizer)
    for index, entry in theirs.state_dict()["state"].items():
        assert all(
            torch.equal(state_of(run[1])[index][name], value) for name, value in entry.items() if value is not None
        )
    assert run[1].param_groups[0]["lr"] == spec.lr
    for name, value in stack().state_dict().items():
        assert torch.equal(run[0].state_dict()[name], value), name
    release(run[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_before_any_step_parameters_stay(precision: str) -> None:
    run = ours(AdamW(lr=0.1, weight_decay=0.5), precision)
    before = {index: entry["master"] for index, entry in state_of(run[1]).items()}
    scale = run[1].loss_scale, (run[1].state_dict().get("loss_scale") or {}).get("_growth_tracker")
    get_state_dict(*run)
    assert all(torch.equal(state_of(run[1])[index]["master"], value) for index, value in before.items())
    assert scale == (run[1].loss_scale, (run[1].state_dict().get("loss_scale") or {}).get("_growth_tracker"))
    release(run[0])


@EVERY
def test_from_torchs_optimizer(options: StateDictOptions, tmp_path: Path) -> None:
    plain, run = stack(3), ours(ADAMW, "fp32")
    theirs = torch.optim.AdamW(plain.named_parameters(), lr=0.02, weight_decay=0.2)
    train(plain, theirs, 0, 3)
    model, optimizer = get_state_dict(plain, theirs, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "a", no_dist=True)
    read_again(run, tmp_path / "a", options)
    for index, entry in theirs.state_dict()["state"].items():
        assert all(torch.equal(state_of(run[1])[index][name], value) for name, value in entry.items())
    assert run[1].param_groups[0]["lr"] == 0.02
    for name, value in plain.state_dict().items():
        assert torch.equal(run[0].state_dict()[name], value), name
    release(run[0])


@EVERY
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_to_torchs_optimizer(precision: str, options: StateDictOptions, tmp_path: Path) -> None:
    run, plain = ours(ADAMW, precision), stack(3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.5)
    train(*run, 0, 3)
    model, optimizer = get_state_dict(*run, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "a", no_dist=True)
    read_again((plain, theirs), tmp_path / "a", options)
    for index, entry in theirs.state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(state_of(run[1])[index][name], value)
    assert theirs.param_groups[0]["lr"] == 0.01
    train(plain, theirs, 3, 5)
    release(run[0])


MADE = {
    "AdamW": (ADAMW, lambda rows, **how: torch.optim.AdamW(rows, lr=0.01, weight_decay=0.1, **how)),
    "Adam": (ADAM, lambda rows, **how: torch.optim.Adam(rows, lr=0.01, weight_decay=0.1, **how)),
    "momentum": (MOMENTUM, lambda rows, **how: torch.optim.SGD(rows, lr=0.1, momentum=0.9, **how)),
    "SGD": (PLAIN_SGD, lambda rows, **how: torch.optim.SGD(rows, lr=0.1, weight_decay=0.1, **how)),
}


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
@pytest.mark.parametrize("name", MADE)
def test_torchs_optimizers_go_on_with_the_same_bits(name: str, how: dict[str, bool]) -> None:
    """The state names the fused step, which is the engine's; a state of theirs says what theirs said."""
    spec, make = MADE[name]
    model, optimizer = ours(spec, "fp32")
    train(model, optimizer, 0, 2)
    plain = stack()
    plain.load_state_dict(model.state_dict())
    theirs = make(plain.parameters(), **how)
    before = {key: theirs.state_dict()["param_groups"][0][key] for key in ("fused", "foreach")}
    before["fused"] = before["fused"] if how else True
    other, loaded = ours(spec, "fp32")
    loaded.load_state_dict(theirs.state_dict())
    assert {key: loaded.state_dict()["param_groups"][0][key] for key in before} == before
    release(other)
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.param_groups[0]["fused"] is True
    assert train(plain, theirs, 2, 4) == train(model, optimizer, 2, 4)
    release(model)
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", MADE)
def test_torchs_optimizers_pass_over_masters(name: str, steps: int, how: dict[str, bool]) -> None:
    spec, make = MADE[name]
    run = ours(spec, "bf16")
    train(*run, 0, steps)
    with_masters, without = run[1].state_dict(masters=True), run[1].state_dict(masters=False)
    assert all("master" in entry for entry in with_masters["state"].values())
    assert not any("master" in entry for entry in without["state"].values())
    release(run[0])
    kept, results = io.BytesIO(), []
    torch.save(with_masters, kept)
    kept.seek(0)
    for state in (torch.load(kept, weights_only=True), without):
        plain = stack()
        optimizer = make(plain.parameters())
        optimizer.load_state_dict(copy.deepcopy(state))
        for group in optimizer.param_groups:
            group.update(how)
        results.append((train(plain, optimizer, 2, 5), list(plain.parameters()), optimizer.state_dict()["state"]))
    (losses, weights, states), (expected, others, other_states) = results
    assert losses == expected
    assert all(torch.equal(one, two) for one, two in zip(weights, others, strict=True))
    for index, entry in other_states.items():
        for key, value in entry.items():
            assert value is None or torch.equal(states[index][key], value)


def test_states_are_read_without_gradients_between_forward_and_step() -> None:
    """Amid a pass torch finds gradients, and makes none of its own."""
    run, other = ours(ADAMW, "bf16"), ours(ADAMW, "bf16")
    for model, optimizer in (run, other):
        loss_of(model, 0).backward()
        if model is run[0]:
            get_optimizer_state_dict(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(run, other)
    assert statistics(run[0]).steps == 1
    for model, _ in (run, other):
        release(model)


def test_a_state_that_lacks_some_parameters() -> None:
    """``strict=False`` loads what there is; the others begin anew, as in torch."""
    run, plain = ours(ADAMW, "fp32"), stack()
    theirs = torch.optim.AdamW(plain.named_parameters(), lr=0.01, weight_decay=0.1)
    for model, optimizer in (run, (plain, theirs)):
        train(model, optimizer, 0, 2)
        state = get_optimizer_state_dict(model, optimizer)
        del state["state"]["0.weight"]  # type: ignore[union-attr, arg-type]
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
    steps = {index: entry["step"].item() for index, entry in run[1].state_dict()["state"].items()}
    assert steps == {1: 2, 2: 2, 3: 2, 4: 2, 5: 2}
    assert steps.keys() == theirs.state_dict()["state"].keys()
    release(run[0])


def loss_scales(optimizer: Any) -> list[Tensor]:
    return [optimizer.state_dict()["loss_scale"][key] for key in ("scale", "_growth_tracker")]


def test_the_loss_scale_goes_with_the_groups(tmp_path: Path) -> None:
    run, again = ours(ADAMW, "fp16"), ours(ADAMW, "fp16", seed=1)
    train(*run, 0, 2)
    (run[1].scale(loss_of(run[0], 2)) * float("inf")).backward()
    run[1].step()
    train(*run, 3, 5)
    assert loss_scales(run[1]) == [2.0**15, 2]
    set_optimizer_state_dict(again[0], again[1], get_optimizer_state_dict(*run))
    assert loss_scales(again[1]) == [2.0**15, 2]
    for model, _ in (run, again):
        release(model)
