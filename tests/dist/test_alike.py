"""What one rank does otherwise than the others, and would train parts of unlike models by: found, and said.

Each rank applies it to its own shard, so that afterwards all would read the same mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

from _threads import Together, run
from ps_core import SGD, AdamW, Budget, Group, RanksDiverged
from ps_core.engine import chunked, materialized, save_checkpoint
from ps_core.engine._optim.kernel_rule import Settings
from ps_core.engine._support.checksum import checksum

WIDTH = 24
_SEED = Lock()


def layers(seed: int = 0) -> nn.Sequential:
    with _SEED:  # ranks are threads here
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


class Front:
    """One rank's model and its optimizer."""

    def __init__(self, each: Together, rule: Any = None, model: nn.Module | None = None, **settings: Any) -> None:
        settings = {"precision": "fp32", "budget": Budget(host="64MiB")} | settings
        self.rank, self.is_odd = each.rank, each.rank == each.ranks - 1
        # Any: the types of modules of a Sequential, and of an optimizer that may be none.
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = chunked(model or layers(), rule or AdamW(lr=0.01), collectives=each, **settings)

    def backward(self, turn: int = 0) -> None:
        data = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * self.rank + turn))
        self.optimizer.scale(self.model(data).float().square().mean()).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


Change = Callable[[Front], None]


def lr(one: Front) -> None:
    one.optimizer.param_groups[0]["lr"] = 0.001


def lr_tensor(one: Front) -> None:
    one.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def betas(one: Front) -> None:
    one.optimizer.param_groups[0]["betas"] = (0.5, 0.999)


def max_grad_norm(one: Front) -> None:
    one.optimizer.max_grad_norm = 0.25


def freezing(one: Front) -> None:
    one.model[0].weight.requires_grad_(False)


def loss_scale(one: Front) -> None:
    one.optimizer.scaler.load_state_dict({**one.optimizer.scaler.state_dict(), "scale": 4.0})


SETTINGS = {
    lr: r"lr must be the same on all ranks, found: \['0.01'(, '0.01')?, '0.001'\]",
    lr_tensor: r"lr must be the same on all ranks, found: \['0.01'(, '0.01')?, '0.5'\]",
    betas: r"betas must be the same on all ranks, found: \['\(0.9, 0.999\)'(, '\(0.9, 0.999\)')?, '\(0.5, 0.999\)'\]",
    max_grad_norm: r"max_grad_norm must be the same on all ranks, found: \['None'(, 'None')?, '0.25'\]",
    freezing: r"requires_grad must be the same on all ranks, found: \['True'(, 'True')?, 'False for 1, True for 3'\]",
    loss_scale: r"the loss scale must be the same on all ranks, found: \['65536.0'(, '65536.0')?, '4.0'\]",
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("change", SETTINGS)
def test_settings_that_differ_when_a_step_begins(change: Change, ranks: int) -> None:
    def case(each: Together) -> None:
        one = Front(each, precision="fp16" if change is loss_scale else "fp32")
        for turn in range(3):
            if one.is_odd and turn == 1:
                change(one)
            one.backward(turn)
            one.step()

    with pytest.raises(RanksDiverged, match=rf"when optimizer.step\(\) is called, {SETTINGS[change]}"):
        run(ranks, case)


@pytest.mark.parametrize("what", ["decay", "members"])
def test_groups_that_differ(what: str) -> None:
    def case(each: Together) -> None:
        odd = each.rank == 1
        decay, dims = (0.5 if odd and what == "decay" else 0.0), (2 if odd and what == "members" else 1)
        group = Group(match=lambda name, parameter: parameter.dim() <= dims, weight_decay=decay)
        one = Front(each, SGD(lr=0.1, weight_decay=0.1, groups=(group,)))
        one.backward()
        one.step()

    with pytest.raises(RanksDiverged, match=r"weight_decay must be the same on all ranks, found: \['0.1 for 1, 0.0"):
        run(2, case)


def multiplied(one: Front) -> None:
    for parameter in one.model.parameters():
        parameter.grad.mul_(0.5)


def clipped(one: Front) -> None:
    nn.utils.clip_grad_norm_(one.model.parameters(), 1e-3)


def forgotten(one: Front) -> None:
    one.model[0].weight.grad = None


def zeroed_between_passes(one: Front) -> None:
    one.optimizer.zero_grad()
    one.backward(5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("change", [multiplied, clipped, forgotten, zeroed_between_passes])
def test_gradients_that_are_changed_on_one_rank(change: Change, precision: str) -> None:
    def case(each: Together) -> None:
        one = Front(each, SGD(lr=0.1), precision=precision)
        one.backward()
        if one.is_odd:
            change(one)
        elif change is zeroed_between_passes:
            one.backward(5)
        one.step()

    with pytest.raises(RanksDiverged, match=r"must be the same on all ranks|do different things"):
        run(2, case)


def load_weights(one: Front) -> None:
    one.model.load_state_dict(layers(7).state_dict())


def load_states(one: Front) -> None:
    found = one.optimizer.state_dict()
    found["state"][0]["exp_avg"].add_(1.0 if one.is_odd else 0.0)
    one.optimizer.load_state_dict(found)


def load_unlike_weights(one: Front) -> None:
    one.model.load_state_dict(layers(7 + one.rank).state_dict())


def write_unlike_weights(one: Front) -> None:
    with materialized(one.model, write=True):
        one.model[2].weight.data.add_(one.rank)


UNLIKE: list[tuple[Change, bool]] = [
    (load_weights, False),
    (load_states, True),
    (load_unlike_weights, True),
    (write_unlike_weights, True),
]
"""With whether all ranks do it."""


def go_on(one: Front, folder: Path) -> None:
    one.backward(3)


def look(one: Front, folder: Path) -> None:
    one.model.state_dict()


def save(one: Front, folder: Path) -> None:
    save_checkpoint(folder / "saved", one.model, one.optimizer)


@pytest.mark.parametrize("then", [go_on, look, save])
@pytest.mark.parametrize(("change", "by_all"), UNLIKE, ids=[change.__name__ for change, _ in UNLIKE])
def test_values_that_differ_are_found_before_they_are_used(
    change: Change, by_all: bool, then: Callable[[Front, Path], None], tmp_path: Path
) -> None:
    def case(each: Together) -> None:
        one = Front(each)
        one.backward()
        one.step()
        if by_all or one.is_odd:
            change(one)
        then(one, tmp_path)

    with pytest.raises(RanksDiverged, match=r"what was done between passes|do different things"):
        run(2, case)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [0, WIDTH, WIDTH * WIDTH])
def test_one_element_of_the_initial_parameters_that_differs(place: int) -> None:
    def case(each: Together) -> None:
        model = layers()
        if each.rank == 1:
            model[0].weight.data.view(-1)[place] += 2.0**-10
        Front(each, model=model)

    with pytest.raises(RanksDiverged, match=r"the initial parameters .* must be the same on all ranks"):
        run(2, case)


def test_what_all_ranks_do_alike_is_fine() -> None:
    """With the same results as one process that does it."""

    def case(each: Together | None) -> dict[str, torch.Tensor]:
        rank, ranks = (0, 1) if each is None else (each.rank, each.ranks)
        settings: Any = {"precision": "fp32", "budget": Budget(host="64MiB")}
        model, found = chunked(layers(), SGD(lr=0.1, momentum=0.5), collectives=each, **settings)
        optimizer: Any = found
        for turn in range(4):
            optimizer.param_groups[0]["lr"] *= 0.5
            for part in range(rank, 2, ranks):
                data = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * part + turn))
                model(data).square().mean().backward()
            if turn == 1:
                model.get_parameter("0.bias").grad = None
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            with materialized(model, write=True):
                model.get_parameter("2.bias").data.add_(0.25)
            optimizer.load_state_dict(optimizer.state_dict())
        return {name: value.clone() for name, value in model.state_dict().items()}

    (first, second), _ = run(2, case)
    for name, wanted in case(None).items():
        assert torch.equal(first[name], wanted), name
        assert torch.equal(second[name], wanted), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_the_checksum_is_of_every_element_in_its_place(dtype: torch.dtype) -> None:
    value = torch.arange(12).reshape(3, 4).remainder(5).to(dtype)
    assert checksum(value) == checksum(value.clone().t().contiguous().t())
    assert checksum(value) != checksum(value.flip(0))
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))
    assert checksum(torch.empty(0)) == checksum(torch.empty(0, 3))


def test_a_step_reads_the_numbers_of_each_group_of_parameters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a parameter, of which a model may have thousands."""
    read: list[int] = []
    values = Settings.values_by_name
    monkeypatch.setattr(Settings, "values_by_name", lambda self: read.append(1) or values(self))

    def steps(each: Together) -> None:
        one = Front(each, AdamW(lr=0.01, groups=(Group(match=lambda name, _: name.startswith("2"), lr=0.1),)))
        for turn in range(3):
            one.backward(turn)
            one.step()

    run(2, steps)
    ranks_and_groups = 2 * 2
    assert len(read) == 3 * ranks_and_groups, "there are four parameters"
