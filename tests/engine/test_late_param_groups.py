"""`add_param_group` for parameters that are unfrozen or added after `chunked`, and models whose parts are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_core import SGD, AdamW, Budget, InvalidInput, TorchOptimizer, UnsupportedParameter
from ps_core.engine import load_checkpoint, release, save_checkpoint
from test_late_parameters import ROOMY, STAGES, Net, X, add_layer, managed, run_once, unfreeze

SPECS: dict[str, tuple[Any, Any]] = {
    "AdamW": (AdamW(lr=0.01), lambda given: torch.optim.AdamW(given, lr=0.01, fused=True)),
    "SGD": (SGD(lr=0.1, momentum=0.9), lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True)),
    "RMSprop": (TorchOptimizer(torch.optim.RMSprop, lr=0.01), lambda given: torch.optim.RMSprop(given, lr=0.01)),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("change", [unfreeze, add_layer])
@pytest.mark.parametrize("spec", SPECS)
def test_a_param_group_of_their_own(spec: str, change: Callable[[nn.Module, int], None], named: bool) -> None:
    """As in PyTorch: `add_param_group` gives late parameters settings that they keep, and that schedulers change."""
    found = []
    for manage in (False, True):
        model = Net()
        change(model, 0)
        begun = [each for each in model.parameters() if each.requires_grad]
        model, optimizer = managed(model, spec=SPECS[spec][0]) if manage else (model, SPECS[spec][1](begun))
        if manage:
            optimizer._leave_out(each for each in model.parameters() if not each.requires_grad)
        known, losses = set(begun), []
        for stage in range(STAGES):
            change(model, stage)
            late = [(name, each) for name, each in model.named_parameters() if each.requires_grad and each not in known]
            known.update(each for _, each in late)
            if late:
                given = late if named and manage else [each for _, each in late]
                optimizer.add_param_group({"params": given, "lr": 0.05 / stage, "weight_decay": 0.1})
            for index in range(2):
                losses.append(model(X + index))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.param_groups[-1]["lr"] *= 0.5
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        rates = [group["lr"] for group in optimizer.param_groups]
        state = optimizer.state_dict()
        if manage:
            release(model)
        found.append(([loss.item() for loss in losses], sizes, rates, model.state_dict(), state["state"]))
    one, other = found
    assert one[:3] == other[:3]
    assert len(one[1]) == STAGES
    assert all(torch.equal(value, other[3][name]) for name, value in one[3].items())
    assert one[4].keys() == other[4].keys()


def replace_head(model: nn.Module, seed: int) -> list[nn.Parameter]:
    """A new head under the old one's name, as for another number of classes."""
    torch.manual_seed(seed)
    model.layers[1] = nn.Linear(64, 64 - seed)
    return list(model.layers[1].parameters())


@pytest.mark.parametrize("listed_first", [False, True])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_head_under_the_name_of_the_one_that_it_replaces(device: str, listed_first: bool, tmp_path: Path) -> None:
    """Twice; the optimizer is told who trains it by `add_param_group`, before or after a pass that was refused."""
    found = []
    for manage in (True, False):
        model, losses = Net(2), []
        if manage:
            budget = Budget(host="4MiB") if device == "cpu" else Budget(device="64KiB", host="4MiB")
            model, optimizer = managed(model, budget, device=device)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for stage in range(3):
            if stage:
                new = replace_head(model, stage)
                if manage and not listed_first:
                    with pytest.raises(UnsupportedParameter, match=r"give it to optimizer\.add_param_group"):
                        model(X)
                optimizer.add_param_group({"params": new, "lr": 0.05 / stage})
            for index in range(2):
                losses.append(model(X + index).item())
                model(X + index).backward()
                optimizer.step()
                optimizer.zero_grad()
        if manage:
            names = [group["param_names"] for group in optimizer.state_dict()["param_groups"]]
            heads = [names[0][2:], names[1], names[2]]
            assert heads[2] == ["layers.1.weight", "layers.1.bias"]
            assert all(name.endswith("(removed)") for name in heads[0] + heads[1])
            assert len({name for head in heads for name in head}) == 6
            save_checkpoint(tmp_path / "saved", model, optimizer)
            expected = [run_once(model, optimizer) for _ in range(2)]
            load_checkpoint(tmp_path / "saved", model, optimizer)
            assert [run_once(model, optimizer) for _ in range(2)] == expected
            load_checkpoint(tmp_path / "saved", model, optimizer)
            release(model)
        found.append((losses, model.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_a_replaced_head_resumes_in_another_process(tmp_path: Path) -> None:
    """The same change, and the same `add_param_group`, before the checkpoint is loaded."""
    runs = []
    for _ in range(2):
        model, optimizer = managed(Net(2), Budget(device="1MiB", host="4MiB"), precision="bf16")
        optimizer.add_param_group({"params": replace_head(model, 4), "lr": 0.05})
        runs.append((model, optimizer))
    first, again = runs
    run_once(*first)
    save_checkpoint(tmp_path / "saved", *first)
    load_checkpoint(tmp_path / "saved", *again)
    assert [run_once(*again) for _ in range(2)] == [run_once(*first) for _ in range(2)]
    release(first[0]), release(again[0])


def test_a_param_group_outlives_a_state_dict_and_a_checkpoint(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        model = Net()
        unfreeze(model, 0)
        model, optimizer = managed(model, Budget(device="80KiB", host="4MiB"), precision="bf16")
        unfreeze(model, 1)
        optimizer.add_param_group({"params": list(model.layers[4].parameters()), "lr": 0.05})
        runs.append((model, optimizer))
    first, again = runs
    run_once(*first), run_once(*again)
    run_once(*first)
    save_checkpoint(tmp_path / "here", *first)
    load_checkpoint(tmp_path / "here", *again)
    again[1].load_state_dict(first[1].state_dict())
    assert again[1].param_groups[1]["lr"] == 0.05
    assert "group 1: 2 parameters, lr=0.05" in repr(again[1])
    assert [run_once(*again) for _ in range(2)] == [run_once(*first) for _ in range(2)]
    release(first[0]), release(again[0])


def test_what_a_param_group_cannot_have() -> None:
    model = Net(2)
    model.layers[0].requires_grad_(False)
    model, optimizer = managed(model, ROOMY)
    for wrong in ({"params": model.layers[1].weight}, {"params": [model.layers[0].weight], "amsgrad": True}):
        with pytest.raises(InvalidInput):
            optimizer.add_param_group(wrong)
    assert len(optimizer.param_groups) == 1
    model.layers[0].requires_grad_(True)
    optimizer.add_param_group({"params": model.layers[0].weight, "lr": 0.5})
    with pytest.raises(InvalidInput, match=r"'layers\.0\.weight' is trained with param_groups\[1\] already"):
        optimizer.add_param_group({"params": model.layers[0].weight})
    stranger = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [stranger]})
    run_once(model, optimizer)  # as in PyTorch, what has no gradient is not stepped
    stranger.grad = torch.ones(2)
    model(X).backward()
    with pytest.raises(InvalidInput, match="add their module to the model, and call the model"):
        optimizer.step()
    stranger.grad = None
    optimizer.step()
    release(model)


class Parts(Net):
    """A model whose parts are called, and it itself never."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("its parts are called")

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_what_is_unfrozen_is_trained_where_parts_are_called(device: str, evaluates: bool) -> None:
    """As of a LightningModule, whose `training_step` is no forward."""
    found = []
    for manage in (False, True):
        model = Parts()
        unfreeze(model, 0)
        if manage:
            budget = Budget(host="4MiB") if device == "cpu" else Budget(device="100KiB", host="4MiB")
            model, optimizer = managed(model, budget, device=device)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        losses = []
        for stage in range(STAGES):
            unfreeze(model, stage)
            if evaluates:
                with torch.no_grad():
                    losses.append(model.loss(X))
            for index in range(2):
                losses.append(model.loss(X + index))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
        if manage:
            release(model)
        found.append(([loss.item() for loss in losses], model.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


@pytest.mark.parametrize("group", [False, True])
def test_a_checkpoint_of_parameters_that_were_added_and_not_stepped(group: bool, tmp_path: Path) -> None:
    model, optimizer = managed(Net(2), ROOMY)
    run_once(model, optimizer)
    add_layer(model, 1)
    if group:
        optimizer.add_param_group({"params": list(model.layers[-1].parameters()), "lr": 0.05})
    with torch.no_grad():
        model(X)
    save_checkpoint(tmp_path / "saved", model, optimizer)
    losses = [run_once(model, optimizer) for _ in range(2)]
    load_checkpoint(tmp_path / "saved", model, optimizer)
    assert [run_once(model, optimizer) for _ in range(2)] == losses
    assert [len(each["params"]) for each in optimizer.param_groups] == ([4, 2] if group else [6])


def test_a_checkpoint_with_frozen_parameters_in_no_group(tmp_path: Path) -> None:
    model = Net()
    unfreeze(model, 0)
    model, optimizer = managed(model, ROOMY)
    optimizer._leave_out(each for each in model.parameters() if not each.requires_grad)
    run_once(model, optimizer)
    save_checkpoint(tmp_path / "frozen", model, optimizer)
    losses = [run_once(model, optimizer) for _ in range(2)]
    load_checkpoint(tmp_path / "frozen", model, optimizer)
    assert [run_once(model, optimizer) for _ in range(2)] == losses
    unfreeze(model, 1)
    model(X).backward()
    optimizer.zero_grad()
    save_checkpoint(tmp_path / "unfrozen", model, optimizer)
    losses = [run_once(model, optimizer) for _ in range(2)]
    load_checkpoint(tmp_path / "unfrozen", model, optimizer)
    assert [run_once(model, optimizer) for _ in range(2)] == losses


def test_states_of_added_parameters_can_be_read_and_assigned_before_their_first_step() -> None:
    model, optimizer = managed(Net(2))
    run_once(model, optimizer)
    model.layers.append(nn.Linear(64, 64))
    with torch.no_grad():
        model(X)
    added = model.layers[2].weight
    assert added not in optimizer.state
    optimizer.state[added] = {"step": 3, "exp_avg": torch.ones(64, 64), "exp_avg_sq": torch.ones(64, 64)}
    assert torch.equal(optimizer.state[added]["exp_avg"], torch.ones(64, 64))
    assert sum(map(len, (group["params"] for group in optimizer.param_groups))) == 6
    release(model)
