"""Optimizers of torch.optim under a budget: PyTorch's own bits, states and formats; and which are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import _models as models
from _buggy import Original
from _cases import finish, next_token, tokens
from _checkpoints import Run, assert_same
from _fake_cuda import FakeRuntime
from _reference import Make, Settings, Spec
from _runs import HOST, check_same, let_go, managed, stand_in
from ps_core import AdamW, Budget, CheckpointDamaged, CheckpointMismatch, Group, InvalidInput, Options, TorchOptimizer
from ps_core.engine import chunked, load_checkpoint, save_checkpoint, statistics
from ps_core.engine._optim import torch_stepper
from test_host_worker import late_device
from test_matrix import is_norm_or_bias

STEPS = 4
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "RMSprop, three states": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01, "weight_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0, "weight_decay": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "weight_decay": 0.1, "t0": 2}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "Adam, maximize": (torch.optim.Adam, {"lr": 0.01, "maximize": True, "weight_decay": 0.1}),
    "SGD, nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD, dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
}
STATES = dict(zip(CASES, (1, 3, 2, 2, 1, 2, 2, 1, 2, 3, 2, 1, 1, 0, 1), strict=True))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that end within parameters, and within what a processor does at once."""
    monkeypatch.setattr(torch_stepper, "PIECE_NUMEL", 333)


def loop(spec: Spec, micro_batches: int = 1) -> Callable[[Make], list[Tensor]]:
    """Train a small language model, at rates that change."""

    def train(make: Make) -> list[Tensor]:
        model, optimizer = make(models.Language(tied=True), spec)
        logs = []
        for index in range(STEPS):
            for micro in range(micro_batches):
                loss = next_token(model, *tokens(100 * index + micro))
                optimizer.scale(loss).backward()
                logs.append(loss.detach())
            finish(optimizer)
            for group in optimizer.param_groups:
                group["lr"] *= 0.75
            norm = optimizer.last_norm if math.isfinite(optimizer.last_norm) else -1.0
            logs += [torch.tensor(norm, dtype=torch.float64), torch.tensor(optimizer.loss_scale)]
        return logs

    return train


def spec_of(name: str) -> TorchOptimizer:
    kind, settings = CASES[name]
    return TorchOptimizer(kind, **settings, groups=(Group(match=is_norm_or_bias, lr=settings["lr"] / 2),))


WAYS = {
    "fp32": Settings(),
    "bf16": Settings(precision="bf16", max_grad_norm=None),
    "fp16": Settings(precision="fp16", max_grad_norm=0.3, accumulation_steps=3),
}
DEVICE = {"fp32": "160KiB", "bf16": "96KiB", "fp16": "140KiB"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_as_pytorch_steps_single_tensors(name: str, way: str) -> None:
    run = loop(spec_of(name), WAYS[way].accumulation_steps)
    check_same(run, WAYS[way], managed(run, WAYS[way], "cpu", Budget(host=HOST)))
    tight = managed(run, WAYS[way], stand_in, Budget(device=DEVICE[way], host=HOST))
    check_same(run, WAYS[way], tight)
    assert tight.evictions > 0


@pytest.mark.parametrize("name", ["NAdam", "AdamW, amsgrad", "Adafactor"])
def test_on_a_disk(name: str, tmp_path: Path) -> None:
    run, told = loop(spec_of(name)), Settings(precision="bf16")
    budget = Budget(device=130_000, host=60_000, disk="64MiB", disk_dir=str(tmp_path))
    got = managed(run, told, stand_in, budget)
    check_same(run, told, got)
    assert got.statistics[0].moved_bytes["host->disk"] > 0 < got.statistics[0].moved_bytes["disk->host"]


@pytest.mark.parametrize("name", ["RMSprop, three states", "ASGD", "SGD", "Adafactor"])
def test_on_a_played_card_also_within_backward(name: str) -> None:
    kind, settings = CASES[name]

    def trained(device: Any, size: str | None, step: str) -> list[Tensor]:
        torch.manual_seed(0)
        model, optimizer = chunked(
            models.Language(tied=True, checkpointing=True),
            TorchOptimizer(kind, **settings),
            device=device,
            budget=Budget(device=size, host=HOST),
            options=Options(group_bytes=4096, step=step),
        )
        for index in range(6):
            next_token(model, *tokens(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = statistics(model)
        assert size is None or (found.divergences, found.planned_passes) == (0, 5)
        values = [value.clone() for value in model.state_dict().values()]
        let_go(model)
        return values

    right = trained("cpu", None, "after_backward")
    for step in ("after_backward", "in_backward"):
        runtime = FakeRuntime(1)
        with runtime:
            got = trained(late_device(runtime, 2), "80KiB", step)
        assert all(map(torch.equal, right, got))


def test_each_state_takes_four_bytes_a_parameter() -> None:
    bytes_of = {}
    for name, (kind, settings) in CASES.items():
        model, _ = chunked(models.Language(), TorchOptimizer(kind, **settings))
        bytes_of[name] = statistics(model).bytes_per_parameter
        let_go(model)
    model, _ = chunked(models.Language(), AdamW())
    adamw = statistics(model).bytes_per_parameter
    assert bytes_of["RAdam"] == adamw
    padded = adamw / 14
    assert bytes_of == {name: pytest.approx((6 + 4 * count) * padded) for name, count in STATES.items()}


# ---- state dicts ----


def plain_pair(name: str, steps: int) -> tuple[nn.Module, Any]:
    kind, settings = CASES[name]
    torch.manual_seed(0)
    model = models.Language()
    optimizer = kind(model.parameters(), **settings, foreach=False)
    train(model, optimizer, range(steps))
    return model, optimizer


def managed_pair(name: str, steps: int = 0) -> tuple[Any, Any]:
    kind, settings = CASES[name]
    torch.manual_seed(0)
    model, optimizer = chunked(models.Language(), TorchOptimizer(kind, **settings), precision="fp32")
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for index in steps:
        next_token(model, *tokens(index)).backward()
        optimizer.step()
        optimizer.zero_grad()


def same_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for index, entry in one.items():
        assert entry.keys() == other[index].keys()
        for key, value in entry.items():
            assert type(value) is type(other[index][key])
            assert value.dtype == other[index][key].dtype
            assert torch.equal(value, other[index][key]), key


@pytest.mark.parametrize("name", CASES)
def test_state_dicts_are_pytorchs_both_ways(name: str) -> None:
    model, optimizer = plain_pair(name, 3)
    ours, our_optimizer = managed_pair(name, 3)
    theirs, found = optimizer.state_dict(), our_optimizer.state_dict()
    same_states(theirs["state"], found["state"])
    assert {**found["param_groups"][0], "param_names": None} == {**theirs["param_groups"][0], "param_names": None}

    fresh, fresh_optimizer = plain_pair(name, 0)
    fresh.load_state_dict(ours.state_dict())
    fresh_optimizer.load_state_dict(found)
    late, late_optimizer = managed_pair(name)
    late.load_state_dict(model.state_dict())
    late_optimizer.load_state_dict(theirs)
    pairs = [(model, optimizer), (ours, our_optimizer), (fresh, fresh_optimizer), (late, late_optimizer)]
    for pair in pairs:
        train(*pair, range(3, 5))
    for other, other_optimizer in pairs[1:]:
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
        same_states(optimizer.state_dict()["state"], other_optimizer.state_dict()["state"])
    let_go(ours, late)


def test_a_state_of_pytorchs_for_a_frozen_parameter_that_was_never_stepped() -> None:
    # Adagrad makes states of all parameters when it is made, also of those that no step changes.
    frozen = [models.Language(), models.Language()]
    for each in frozen:
        each.requires_grad_(False)
        next(each.parameters()).requires_grad_(True)
    optimizer = torch.optim.Adagrad(frozen[0].parameters(), foreach=False)
    train(frozen[0], optimizer, range(2))
    model, ours = chunked(frozen[1], TorchOptimizer(torch.optim.Adagrad), precision="fp32")
    model.load_state_dict(frozen[0].state_dict())
    ours.load_state_dict(optimizer.state_dict())
    same_states({0: optimizer.state_dict()["state"][0]}, ours.state_dict()["state"])
    for pair in ((frozen[0], optimizer), (model, ours)):
        train(*pair, range(2, 4))
    assert all(map(torch.equal, frozen[0].state_dict().values(), model.state_dict().values()))
    let_go(model)


def test_masters_of_parameters_without_a_step_are_beside_the_states() -> None:
    spec = TorchOptimizer(torch.optim.NAdam)
    torch.manual_seed(0)
    model, optimizer = chunked(models.Language(), spec)
    loaded = torch.optim.NAdam(models.Language().parameters())
    loaded.load_state_dict(optimizer.state_dict())
    assert not loaded.state
    found = optimizer.state_dict()
    assert found["state"] == {}
    assert all(value.dtype == torch.float32 for value in found["masters"].values())
    torch.manual_seed(1)
    other, other_optimizer = chunked(models.Language(), spec)
    other_optimizer.load_state_dict(deepcopy(found))
    got = other_optimizer.state_dict()["masters"]
    assert got.keys() == found["masters"].keys()
    assert all(torch.equal(value, got[index]) for index, value in found["masters"].items())
    let_go(model, other)


def test_a_state_dict_of_another_class_is_refused_and_of_an_older_pytorch_taken() -> None:
    model, optimizer = managed_pair("RMSprop", 1)
    found = optimizer.state_dict()
    theirs = plain_pair("NAdam", 1)[1].state_dict()
    with pytest.raises(InvalidInput, match=r"has no 'momentum': is it torch\.optim\.RMSprop's"):
        optimizer.load_state_dict(theirs)
    with pytest.raises(InvalidInput, match=r"has no 'square_avg', found .* is it torch\.optim\.RMSprop's"):
        optimizer.load_state_dict({**found, "state": theirs["state"]})
    for switch in ("maximize", "centered", "foreach"):
        del found["param_groups"][0][switch]
    optimizer.load_state_dict(found)
    found["param_groups"][0]["centered"] = True
    with pytest.raises(InvalidInput, match="keeps step, square_avg, grad_avg for each parameter; memory was laid out"):
        optimizer.load_state_dict(found)
    let_go(model)


def test_the_state_is_read_and_written_as_a_mapping() -> None:
    model, optimizer = managed_pair("NAdam")
    weight = model.blocks[0].wide.weight
    assert weight not in optimizer.state
    with pytest.raises(InvalidInput, match="has no state before its first step, so 'exp_avg' cannot be set alone"):
        optimizer.state[weight]["exp_avg"] = torch.zeros(weight.shape)
    train(model, optimizer, range(2))
    entry = optimizer.state[weight]
    assert set(entry) == {"step", "mu_product", "exp_avg", "exp_avg_sq"}
    entry["mu_product"] = 0.5
    entry["exp_avg"].zero_()
    assert (float(entry["mu_product"]), float(entry["step"]), bool(entry["exp_avg"].any())) == (0.5, 2.0, False)
    with pytest.raises(InvalidInput, match=r"mu_product of 'blocks\.0\.wide\.weight' must be one number"):
        entry["mu_product"] = torch.zeros(2)
    with pytest.raises(InvalidInput, match=r"'exp_avg' of 'blocks\.0\.wide\.weight' cannot be deleted alone"):
        del entry["exp_avg"]
    del optimizer.state[weight]
    assert weight not in optimizer.state
    train(model, optimizer, range(2, 3))
    assert float(optimizer.state[weight]["step"]) == 1.0
    let_go(model)


def test_a_scheduler_that_cycles_momentum() -> None:
    ways = []
    for make in (plain_pair, managed_pair):
        model, optimizer = make("SGD, nesterov", 0)
        scheduler = OneCycleLR(optimizer, 0.2, total_steps=8)
        for index in range(6):
            train(model, optimizer, range(index, index + 1))
            scheduler.step()
        ways.append([value.clone() for value in model.state_dict().values()])
    assert all(map(torch.equal, *ways))
    let_go(model)


def test_groups_with_settings_of_their_own() -> None:
    groups = (Group(match=is_norm_or_bias, lr=0.1, momentum=0.5, settings={"alpha": 0.5}),)
    spec = TorchOptimizer(torch.optim.RMSprop, lr=0.01, groups=groups)
    torch.manual_seed(0)
    model, optimizer = chunked(models.Language(), spec, precision="fp32")
    torch.manual_seed(0)
    other = models.Language()
    split: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in other.named_parameters():
        split[is_norm_or_bias(name, parameter)].append(parameter)
    rows = [{"params": split[0]}, {"params": split[1], "lr": 0.1, "momentum": 0.5, "alpha": 0.5}]
    theirs = torch.optim.RMSprop(rows, lr=0.01, foreach=False)
    for pair in ((model, optimizer), (other, theirs)):
        train(*pair, range(4))
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    same_states(theirs.state_dict()["state"], optimizer.state_dict()["state"])
    let_go(model)


def test_a_parameter_that_is_unfrozen_later_begins_then() -> None:
    ways = []
    for make in (plain_pair, managed_pair):
        model, optimizer = make("Adagrad", 0)
        model.blocks[1].requires_grad_(False)
        train(model, optimizer, range(2))
        model.blocks[1].requires_grad_(True)
        train(model, optimizer, range(2, 4))
        ways.append([value.clone() for value in model.state_dict().values()])
        ways.append([entry["step"] for entry in optimizer.state_dict()["state"].values()])
    assert all(map(torch.equal, ways[0], ways[2]))
    assert ways[1] == ways[3]
    let_go(model)


# ---- checkpoints ----


@pytest.mark.parametrize("name", ["NAdam", "AdamW, amsgrad", "Rprop", "Adafactor"])
def test_a_checkpoint_resumes_exactly_under_another_budget(name: str, tmp_path: Path) -> None:
    spec: Any = spec_of(name)
    with Run("emulated", precision="fp16", spec=spec) as run:
        run.train(3)
        save_checkpoint(tmp_path / "saved", run.model, run.optimizer, extra={"scheduler": run.scheduler.state_dict()})
        losses, values = run.train(3), run.values()
        save_checkpoint(tmp_path / "other", run.model, run.optimizer)
        save_checkpoint(tmp_path / "other", run.model, run.optimizer, overwrite=True)  # its states' files are its own
    with Run("cpu, disk", precision="fp16", spec=spec, seed=2, group_bytes=8192) as other:
        extra = load_checkpoint(tmp_path / "saved", other.model, other.optimizer)
        other.scheduler.load_state_dict(extra["scheduler"])
        assert all(map(torch.equal, losses, other.train(3)))
        assert_same(values, other.values())


@pytest.mark.parametrize("other", [AdamW(), TorchOptimizer(torch.optim.NAdam), TorchOptimizer(torch.optim.Adam)])
def test_a_checkpoint_of_another_optimizer_is_refused(other: Any, tmp_path: Path) -> None:
    model, optimizer = chunked(models.Language(), TorchOptimizer(torch.optim.Adam, amsgrad=True))
    save_checkpoint(tmp_path / "saved", model, optimizer)
    let_go(model)
    model, optimizer = chunked(models.Language(), other)
    words = r"exp_avg, exp_avg_sq, max_exp_avg_sq in the checkpoint|torch.optim.Adam in the checkpoint, .*Adam"
    with pytest.raises(CheckpointMismatch, match=words):
        load_checkpoint(tmp_path / "saved", model, optimizer)
    let_go(model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.pop("states"), "RMSprop' without 'states', expected these, or one of AdamW"),
        (lambda found: found.pop("scalars"), "the optimizer has no 'scalars'"),
        (lambda found: found.update(states=[1]), r"the optimizer's states are \[1\], expected different texts"),
        (lambda found: found["scalars"].pop("table.weight"), "the optimizer's scalars lack 'table.weight'"),
        (lambda found: found["scalars"].update({"table.weight": {"step": "1"}}), "expected numbers by name"),
        (lambda found: found["scalars"].update({"table.weight": {"eta": 1.0}}), "'table.weight': the optimizer's eta"),
    ],
)
def test_a_manifest_that_lacks_something(change: Callable[[Any], Any], words: str, tmp_path: Path) -> None:
    model, optimizer = managed_pair("RMSprop", 1)
    save_checkpoint(tmp_path / "saved", model, optimizer)
    changed = Original(tmp_path / "saved").changed(lambda manifest, _: change(manifest["optimizer"]))
    with pytest.raises((CheckpointDamaged, CheckpointMismatch), match=words):
        load_checkpoint(changed, model, optimizer)
    let_go(model)


# ---- what cannot be managed ----


class CountsInGroup(torch.optim.SGD):
    """Keeps its count of steps in the param group, where pieces would count too."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        group["lr"] = group["lr"] / group["count"]
        return super().step(closure)


class Draws(torch.optim.Optimizer):
    """Adds noise, which is other noise when a step is made again."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            each += torch.randn_like(each)


class NormInState(torch.optim.Optimizer):
    """Keeps a single value that depends on the gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            self.state[each]["norm"] = float(each.grad.norm())
            each -= each.grad


class FiveStates(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            for name in "abcde":
                self.state[each][name] = torch.zeros_like(each)


class Reserved(FiveStates):
    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            self.state[each]["masters"] = torch.zeros_like(each)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (TorchOptimizer(torch.optim.LBFGS), "could not be .* no closure: .*closure.*; use a class that needs only"),
        (
            TorchOptimizer(torch.optim.SparseAdam),
            "SparseAdam does not support dense gradients.*; use a class that needs only",
        ),
        (TorchOptimizer(torch.optim.RMSprop, rate=1), "RMSprop could not be made: .* unexpected keyword .*'rate'"),
        (TorchOptimizer(torch.optim.RMSprop, lr=-1.0), "RMSprop could not be made: Invalid learning rate: -1.0"),
        (TorchOptimizer(nn.Linear), "expects a subclass of torch.optim.Optimizer, found torch.nn.*Linear"),
        (TorchOptimizer(CountsInGroup, lr=0.1), "so it counts or draws numbers elsewhere"),
        (TorchOptimizer(Draws), "so it counts or draws numbers elsewhere"),
        (TorchOptimizer(NormInState), "keeps single values that depend on gradients"),
        (TorchOptimizer(FiveStates), "FiveStates cannot be managed: it keeps a, b, c, d, e: at most 4 states"),
        (TorchOptimizer(Reserved), "Reserved has a state 'masters', a name that checkpoints use otherwise"),
    ],
    ids=lambda value: value.kind.__name__ if isinstance(value, TorchOptimizer) else "",
)
def test_others_are_refused(spec: TorchOptimizer, words: str) -> None:
    model = models.Language()
    with pytest.raises(InvalidInput, match=words):
        chunked(model, spec)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_settings_that_change_the_states_are_refused_at_the_step() -> None:
    model, optimizer = managed_pair("SGD", 1)
    optimizer.param_groups[0]["momentum"] = 0.9
    next_token(model, *tokens(1)).backward()
    with pytest.raises(
        InvalidInput, match=r"keeps momentum_buffer for each parameter; memory was laid out for no state"
    ):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = torch.zeros(2)
    next_token(model, *tokens(2)).backward()
    with pytest.raises(InvalidInput, match="lr must be one number when the optimizer steps"):
        optimizer.step()
    let_go(model)


def test_a_trial_needs_no_default_type_and_calls_no_hooks() -> None:
    stepped: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    model = models.Language()
    torch.set_default_dtype(torch.float64)
    try:
        model, optimizer = chunked(model, TorchOptimizer(torch.optim.NAdam), precision="fp32")
    finally:
        torch.set_default_dtype(torch.float32)
    try:
        train(model, optimizer, range(2))
        assert stepped == [optimizer, optimizer], "those that step pieces are not the user's"
    finally:
        hook.remove()
    let_go(model)
