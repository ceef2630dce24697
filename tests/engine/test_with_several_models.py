"""Several models that together keep to one Budget (distillation, preferences); and averages of weights."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from dataclasses import asdict, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import _models as models
from _cases import finish, next_token, tokens
from _reference import Settings
from _reference import plain as run_plain
from _states import masters_of
from ps_core import AdamW, Budget, DoesNotFit, InvalidInput, Options
from ps_core._units import parse_bytes
from ps_core.engine import chunked, materialized, release, statistics

SPEC, STEPS, HOST = AdamW(lr=0.01), 5, "64MiB"
OPTIONS = Options(poison=True, group_bytes=2048)


class Parts:
    """Manages models, each within its part of a budget (all within one, without parts), and remembers them."""

    def __init__(self, budget: Budget, *parts: float) -> None:
        self.whole, self._parts = budget, iter(budget.split(*parts)) if parts else repeat(budget)
        self.made: list[nn.Module] = []

    def __call__(self, model: nn.Module, spec: Any) -> tuple[nn.Module, Any]:
        made = chunked(model, spec, device="emulated", budget=next(self._parts), max_grad_norm=1.0, options=OPTIONS)
        self.made.append(made[0])
        return made

    def check(self) -> None:
        """Together they kept to the budget."""
        counted = [statistics(model) for model in self.made]
        assert all(each.evictions for each in counted)
        for tier, size in (("device", self.whole.device_bytes), ("host", self.whole.host_bytes)):
            assert sum(each.tiers[tier].budget_bytes for each in counted) <= size
            assert all(each.tiers[tier].peak_bytes <= each.tiers[tier].budget_bytes for each in counted)


def distilled(make: Any) -> list[Tensor]:
    teacher, none = make(models.Language(layers=6), None)
    assert none is None
    student, optimizer = make(models.Language(layers=2), SPEC)
    logs = []
    for index in range(STEPS):
        (batch,) = tokens(index)
        with torch.no_grad():
            target = teacher(batch).float().softmax(-1)
        loss = functional.cross_entropy(student(batch).float().flatten(0, 1), target.flatten(0, 1))
        loss.backward()
        finish(optimizer)
        logs.append(loss.detach())
    return logs


def log_probability(model: nn.Module, batch: Tensor) -> Tensor:
    scores = model(batch)[:, :-1].float().log_softmax(-1)
    return scores.gather(-1, batch[:, 1:, None]).sum((1, 2))


def preferred(make: Any) -> list[Tensor]:
    """Direct preference optimization; the reference runs while the policy's graph is alive."""
    policy = models.Language(layers=2)
    reference, _ = make(copy.deepcopy(policy), None)
    policy, optimizer = make(policy, SPEC)
    logs = []
    for index in range(STEPS):
        (batch,) = tokens(index)
        ours = log_probability(policy, batch)
        with torch.no_grad():
            theirs = log_probability(reference, batch)
        gain = ours - theirs
        loss = -functional.logsigmoid(0.1 * (gain[:2] - gain[2:])).mean()
        loss.backward()
        finish(optimizer)
        logs.append(loss.detach())
    return logs


@pytest.mark.parametrize("train", [distilled, preferred])
@pytest.mark.parametrize("parts", [(1, 2), ()])
def test_two_models_under_one_budget(train: Any, parts: tuple[float, ...]) -> None:
    settings = Settings(precision="bf16")
    make = Parts(Budget(device=180_000, host="2MiB"), *parts)
    torch.manual_seed(11)
    got = train(make)
    make.check()
    for model in make.made:
        release(model)
    expected = run_plain(train, settings).logs
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert got[-1] < got[0]


def trained(model: nn.Module, optimizer: Any, indices: range) -> list[Tensor]:
    """Losses and norms of these steps."""
    logs = []
    for index in indices:
        loss = next_token(model, *tokens(index))
        loss.backward()
        finish(optimizer)
        logs += [loss.detach(), torch.tensor(optimizer.last_norm)]
    return logs


TIERS = {
    "cpu": ("cpu", Budget(host="8MiB")),
    "emulated": ("emulated", Budget(device=400_000, host="8MiB")),
    "disk": ("emulated", Budget(device=400_000, host=700_000, disk="8MiB", disk_dir=".")),
}


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_makes_room_for_one_that_joins(
    tiers: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    device, budget = TIERS[tiers][0], replace(TIERS[tiers][1])
    told = {"device": device, "precision": precision, "options": replace(OPTIONS, keep_fp32=("*norm*",))}

    def run(budget: Budget, *, joined: bool) -> tuple[list[Tensor], nn.Module, nn.Module | None]:
        torch.manual_seed(3)
        first, optimizer = chunked(models.Language(layers=2), SPEC, budget=budget, **told)
        logs = trained(first, optimizer, range(3))
        second = None
        if joined:
            second, other = chunked(models.Language(layers=2), SPEC, budget=budget, **told)
            trained(second, other, range(2))
        return logs + trained(first, optimizer, range(3, 6)), first, second

    expected, alone, _ = run(replace(budget), joined=False)
    released = {name: value.clone() for name, value in release(alone).named_parameters()}
    got, first, second = run(budget, joined=True)
    assert second is not None
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    counted = [statistics(model) for model in (first, second)]
    for name, tier in counted[0].tiers.items():
        assert 0 < tier.budget_bytes <= getattr(budget, f"{name}_bytes") // 2
        assert all(each.tiers[name].peak_bytes <= each.tiers[name].budget_bytes for each in counted)
    if device == "emulated":
        assert counted[0].planned_passes >= 4, counted[0].last_divergence
    release(second)
    for name, value in release(first).named_parameters():
        assert torch.equal(value, released[name])


def test_parts_go_by_the_bytes_of_model_data_and_fall_to_who_joins_next() -> None:
    budget = Budget(host=6000 * 128)
    first, _ = chunked(models.stack(), SPEC, budget=budget, precision="bf16")
    frozen, _ = chunked(models.stack(), None, budget=budget, precision="bf16")
    assert statistics(first).tiers["host"].budget_bytes == 5250 * 128  # 14 of 16
    assert statistics(frozen).tiers["host"].budget_bytes == 750 * 128
    release(first)
    del frozen
    gc.collect()
    third, _ = chunked(models.stack(), SPEC, budget=budget)
    assert statistics(third).tiers["host"].budget_bytes == 6000 * 128
    release(third)


def test_another_budget_is_not_shared_however_it_was_made() -> None:
    budget = Budget(host=6000 * 128)
    first, _ = chunked(models.stack(), SPEC, budget=budget)
    others = [copy.copy(budget), copy.deepcopy(budget), pickle.loads(pickle.dumps(budget)), replace(budget)]
    assert all(other == budget and asdict(other) == asdict(budget) for other in others)
    for other in (*others, *budget.split(1, 1)):
        second, _ = chunked(models.stack(), SPEC, budget=other)
        release(second)
        assert statistics(first).tiers["host"].budget_bytes == 6000 * 128
    release(first)


def test_who_does_not_fit_beside_another_leaves_it_as_it_was() -> None:
    budget = Budget(device=150_000, host="2MiB")
    first, optimizer = chunked(models.Language(layers=2), SPEC, device="emulated", budget=budget, options=OPTIONS)
    before = statistics(first).tiers
    trained(first, optimizer, range(2))
    with pytest.raises(DoesNotFit) as refused:
        chunked(models.Language(layers=40), SPEC, device="emulated", budget=budget, options=OPTIONS)
    assert {name: tier.budget_bytes for name, tier in statistics(first).tiers.items()} == {
        name: tier.budget_bytes for name, tier in before.items()
    }
    assert "budget.split(3, 1)" in " ".join(getattr(refused.value, "__notes__", [])) or "host" in str(refused.value)
    trained(first, optimizer, range(2, 4))
    release(first)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_what_is_told_when_another_joins_is_enough_for_both(device: str) -> None:
    """A model that was alone in its budget is asked to leave most of it to a larger one."""
    tier = {"device": 40_000} if device == "emulated" else {}
    budget, asked = Budget(host=300_000, **tier), list[DoesNotFit]()
    for _ in range(3):
        told = {"device": device, "precision": "bf16", "budget": budget, "options": OPTIONS}
        first, _ = chunked(models.stack(), SPEC, **told)
        try:
            second, _ = chunked(models.Language(layers=2), SPEC, **told)
        except DoesNotFit as refused:
            asked.append(refused)
            budget = eval(refused.remedies[0].partition(": ")[0])
        else:
            release(second)
            break
        finally:
            release(first)
    assert (asked[0].tier, asked[0].moment) == ("host", "making room for another model")
    assert len(asked) <= 2


def test_a_part_that_is_too_small_names_the_budget_that_all_need() -> None:
    """Who follows what is said gets there, for every number is larger than the last."""
    size, sizes, (batch,) = 400_000, [0], tokens(0)
    while size > sizes[-1]:
        sizes.append(size)
        budget = Budget(device=size, host="8MiB")
        told = {"device": "emulated", "precision": "bf16", "budget": budget, "options": OPTIONS}
        first, optimizer = chunked(models.Language(layers=2), SPEC, **told)
        second, _ = chunked(models.Language(layers=2), SPEC, **told)
        said = ""
        try:
            trained(first, optimizer, range(1))
            trained_on(first, optimizer, batch.repeat(16, 1))
        except DoesNotFit as refused:
            said = str(refused)
        release(first), release(second)
        if said:
            asked = re.search(r'Budget\(device="?(\w+)"?, host="8MiB"\): .* more for all models that share it', said)
            assert asked is not None, said
            size = parse_bytes(asked[1])
    assert 2 < len(sizes) < 10


def trained_on(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
    next_token(model, batch).backward()
    finish(optimizer)


def test_a_model_makes_room_between_forward_and_backward_but_not_while_somebody_holds_its_memory() -> None:
    def run(*, joined: bool) -> list[Tensor]:
        torch.manual_seed(3)
        budget = Budget(device=400_000, host="2MiB")
        first, optimizer = chunked(models.Language(layers=2), SPEC, device="emulated", budget=budget, options=OPTIONS)
        loss = next_token(first, *tokens(0))
        if joined:
            held = first.head.weight[:1]
            with pytest.raises(InvalidInput, match=r"holds on to memory[\s\S]*let go of that first"):
                chunked(models.Language(layers=2), None, device="emulated", budget=budget, options=OPTIONS)
            assert statistics(first).tiers["device"].budget_bytes == 400_000
            del held
            joined_by = chunked(models.Language(layers=2), None, device="emulated", budget=budget, options=OPTIONS)[0]
            assert (
                statistics(first).tiers["device"].budget_bytes
                < 400_000
                > statistics(joined_by).tiers["device"].budget_bytes
            )
        loss.backward()
        finish(optimizer)
        logs = [loss.detach(), *trained(first, optimizer, range(1, 3))]
        release(first)
        return logs

    assert all(torch.equal(one, other) for one, other in zip(run(joined=True), run(joined=False), strict=True))


# An average of the weights


def averaged(model: nn.Module, optimizer: Any, weights: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train with an exponential moving average of the fp32 weights, kept on the CPU."""
    average: dict[str, Tensor] = {}
    logs = []
    for index in range(STEPS):
        loss = next_token(model, *tokens(index))
        loss.backward()
        finish(optimizer)
        logs.append(loss.detach())
        for name, value in weights(model, optimizer):
            average.setdefault(name, value.clone()).lerp_(value, 0.1)
    return logs, average


def masters(model: nn.Module, optimizer: Any) -> Any:
    state = optimizer.state_dict(masters=True)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    return ((names[index], value) for index, value in masters_of(state).items())


def of_plain(model: nn.Module, optimizer: Any) -> Any:
    return ((each.name, each.master.view(each.parameter.shape)) for each in optimizer.states)


def test_a_moving_average() -> None:
    """Of the masters, to the bit; then evaluated in the model's place, and the model is trained on as it was."""
    from _reference import resident

    torch.manual_seed(1)
    model, optimizer = resident(models.Language(layers=3), SPEC, precision="bf16", max_grad_norm=1.0)
    expected, expected_average = averaged(model, optimizer, of_plain)

    torch.manual_seed(1)
    budget = Budget(device=100_000, host=HOST)
    model, optimizer = chunked(
        models.Language(layers=3), SPEC, device="emulated", budget=budget, max_grad_norm=1.0, options=OPTIONS
    )
    logs, average = averaged(model, optimizer, masters)
    assert all(torch.equal(one, other) for one, other in zip(logs, expected, strict=True))
    assert average.keys() == expected_average.keys()
    for name, value in average.items():
        assert torch.equal(value, expected_average[name]), name

    own = {name: value.clone() for name, value in model.state_dict().items()}
    with materialized(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(average[name])
        loss = next_token(model, *tokens(9))
    assert statistics(model).evictions > 0
    with torch.no_grad():
        assert not torch.equal(next_token(model, *tokens(9)), loss)
    for name, value in model.state_dict().items():
        assert torch.equal(value, own[name]), name
    release(model)
