"""One rank evaluates alone, without a plan, after all ranks changed something that they have not compared yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from _threads import Together, going_by, run
from ps_core import CheckpointMismatch
from ps_core.engine import WeightAverage, load_checkpoint, load_weights, release, save_checkpoint, save_weights
from test_alike import WIDTH, Front, layers

Change = Callable[[Front], None]
Then = Callable[[Front, Path], object]


def forgotten(one: Front) -> None:
    one.backward()
    one.optimizer.zero_grad()


def scaled(one: Front) -> None:
    one.backward()
    for parameter in one.model.parameters():
        parameter.grad.mul_(0.5)


def scaled_and_forgotten(one: Front) -> None:
    scaled(one)
    one.optimizer.zero_grad()


def state_assigned(one: Front) -> None:
    one.optimizer.state[one.model[0].weight]["exp_avg"] = torch.ones(2 * WIDTH, WIDTH)


def master_assigned(one: Front) -> None:
    one.optimizer.state[one.model[0].weight]["master"] = torch.ones(2 * WIDTH, WIDTH)


def state_doubled(one: Front) -> None:
    one.optimizer.state[one.model[2].weight]["exp_avg"].mul_(2)


def states_replaced(one: Front) -> None:
    one.optimizer.state = {
        parameter: {**entry, "master": torch.ones(parameter.shape)} for parameter, entry in one.optimizer.state.items()
    }


def state_deleted(one: Front) -> None:
    one.optimizer.state[one.model[0].weight].clear()


AFTER_GRADIENTS: dict[str, Then] = {
    "steps": lambda one, _: one.optimizer.step(),
    "forgets": lambda one, _: one.optimizer.zero_grad(),
    "clips": lambda one, _: nn.utils.clip_grad_norm_(one.model.parameters(), 1e-3),
    "reads a gradient": lambda one, _: one.model[0].weight.grad.sum(),
    "accumulates": lambda one, _: one.backward(3),
}
AFTER: dict[str, Then] = {
    "trains": lambda one, _: one.backward(3),
    "evaluates": lambda one, _: one.model(torch.ones(2, WIDTH)),
    "saves": lambda one, folder: save_checkpoint(folder / "saved", one.model, one.optimizer),
    "loads": lambda one, folder: load_checkpoint(folder / "before", one.model, one.optimizer),
    "loads weights": lambda one, folder: load_weights(one.model, folder / "before"),
    "saves weights": lambda one, folder: save_weights(folder / "weights", one.model),
    "looks": lambda one, _: one.model.state_dict(),
    "looks at states": lambda one, _: one.optimizer.state_dict(),
    "loads states": lambda one, _: one.optimizer.load_state_dict(one.optimizer.state_dict()),
    "loads a state dict": lambda one, _: one.model.load_state_dict(
        {name: value * 0.5 for name, value in one.model.state_dict().items()}
    ),
    "averages": lambda one, _: WeightAverage(one.model, 0.5).update(),
    "adds a layer": lambda one, _: added(one),
    "releases": lambda one, _: release(one.model),
}


def append(model: nn.Sequential) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.5)
    model.append(layer)


def added(one: Front) -> None:
    append(one.model)
    one.backward()


ASSIGNED = (state_assigned, master_assigned)
MORE = (forgotten, scaled_and_forgotten, state_doubled, states_replaced, state_deleted)
CASES = [
    *((scaled, then, False) for then in AFTER_GRADIENTS),
    *((change, then, False) for change in (*ASSIGNED, *MORE) for then in AFTER),
    *((change, then, True) for change in ASSIGNED for then in AFTER),
]


@pytest.mark.parametrize(("change", "then", "plans"), CASES)
def test_all_ranks_go_on_alike(change: Change, then: str, plans: bool, tmp_path: Path) -> None:
    def case(each: Together) -> dict[str, torch.Tensor]:
        one = Front(each)
        if not plans:
            one.backward()
            one.step()
        save_checkpoint(tmp_path / "before", one.model, one.optimizer)
        change(one)
        if one.is_odd:
            with torch.no_grad():
                one.model(torch.ones(2, WIDTH))
        (AFTER_GRADIENTS | AFTER)[then](one, tmp_path)
        return {name: value.clone() for name, value in one.model.state_dict().items()}

    with going_by(plan=plans):
        (one, other), _ = run(2, case)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("then", AFTER)
def test_one_rank_evaluates_alone_after_all_added_and_unfroze_layers(then: str, precision: str, tmp_path: Path) -> None:
    """The lone rank gets the values that both ranks get later, when the engine manages the added layers."""

    def case(each: Together) -> dict[str, torch.Tensor]:
        model = layers()
        model[0].requires_grad_(False)
        one = Front(each, model=model, precision=precision)
        x = torch.ones(2, WIDTH)
        for _ in range(2):
            one.backward()
            one.step()
        save_checkpoint(tmp_path / "before", one.model, one.optimizer)
        one.model.requires_grad_(True)
        append(one.model)
        weight = one.model[-1].weight
        if one.is_odd:
            with torch.no_grad():
                alone = one.model(x)
            assert one.model[-1].weight is weight
        if then in ("loads", "loads weights"):  # the checkpoint lacks the layer
            with pytest.raises(CheckpointMismatch):
                AFTER[then](one, tmp_path)
        else:
            AFTER[then](one, tmp_path)
        if then == "releases":
            return {name: value.clone() for name, value in one.model.state_dict().items()}
        one.optimizer.zero_grad()
        one.backward()
        one.optimizer.zero_grad()
        with torch.no_grad():
            together = one.model(x)
        if one.is_odd and not then.startswith(("loads", "adds")):
            assert torch.equal(alone, together)
        one.backward()
        one.step()
        return {name: value.clone() for name, value in one.model.state_dict().items()}

    with going_by(plan=False):
        (one, other), _ = run(2, case)
    assert all(torch.equal(one[name], other[name]) for name in one)
