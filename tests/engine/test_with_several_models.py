"""Several models that have parts of one Budget (distillation, preferences); and averages of weights."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import _models as models
from _cases import finish, next_token, tokens
from _reference import Settings
from _reference import plain as run_plain
from _runs import check_same, let_go
from _runs import managed as run_managed
from _states import masters_of
from ps_core import SGD, AdamW, Budget, DoesNotFit, InvalidInput, Options
from ps_core.engine import WeightAverage, chunked, is_managed, materialized, release, statistics

SPEC, STEPS, HOST = AdamW(lr=0.01), 5, "64MiB"
OPTIONS = Options(poison=True, group_bytes=2048)


class Parts:
    """Manages models, each within its part of a budget, and remembers them."""

    def __init__(self, budget: Budget, *parts: float) -> None:
        self.whole, self._parts = budget, iter(budget.split(*parts))
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
def test_two_models_with_a_part_of_a_budget_each(train: Any) -> None:
    settings = Settings(precision="bf16")
    make = Parts(Budget(device=180_000, host="2MiB"), 1, 2)
    torch.manual_seed(11)
    got = train(make)
    make.check()
    for model in make.made:
        release(model)
    expected = run_plain(train, settings).logs
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert got[-1] < got[0]


def managed(budget: Budget, model: nn.Module | None = None) -> nn.Module:
    return chunked(model or models.stack(), SPEC, device="emulated", budget=budget, options=OPTIONS)[0]


def test_a_budget_is_for_one_model_at_a_time() -> None:
    budget = Budget(device="128KiB", host="8MiB")
    first, optimizer = chunked(models.Language(), SPEC, device="emulated", budget=budget, options=OPTIONS)
    second = models.stack()
    values = [value.detach().clone() for value in second.parameters()]
    message = r"given to Sequential is in use by another model, Language, .* first, second = budget\.split\(3, 1\)"
    with pytest.raises(InvalidInput, match=message):
        managed(budget, second)
    assert all(type(value) is nn.Parameter for value in second.parameters())
    assert all(torch.equal(one, other) for one, other in zip(second.parameters(), values, strict=True))
    next_token(first, *tokens(0)).backward()  # the first is as it was
    finish(optimizer)
    assert statistics(first).tiers["device"].budget_bytes == 128 * 1024
    release(first)
    release(managed(budget, second))


def test_the_parts_of_a_budget_are_for_a_model_each_and_for_one() -> None:
    budget = Budget(device="256KiB", host="8MiB")
    whole, (one, other) = managed(budget), budget.split(3, 1)
    first, second = managed(one), managed(other)
    for part in (budget, one, other):
        with pytest.raises(InvalidInput, match="in use by another model"):
            managed(part)
    release(whole), release(first), release(second)


def test_a_model_that_nobody_has_any_more_uses_no_budget() -> None:
    budget = Budget(device="128KiB", host="8MiB")
    model, optimizer = chunked(models.stack(), SPEC, device="emulated", budget=budget, options=OPTIONS)
    del model  # its optimizer is still here
    model = managed(budget)
    model.itself = [model]  # a cycle, which only the garbage collector ends
    del model
    release(managed(budget))
    del optimizer


def test_a_model_that_could_not_be_managed_uses_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(device="128KiB", host="256KiB")
    with pytest.raises(DoesNotFit):
        managed(budget, models.Language(layers=40))
    with monkeypatch.context() as patch:
        patch.setattr("ps_core.engine._chunked.move_unmanaged", lambda *_: 1 / 0)  # when parameters are packed already
        with pytest.raises(ZeroDivisionError):
            managed(budget)
    release(managed(budget))


def test_copies_of_a_budget_are_others() -> None:
    budget, unused = Budget(device="128KiB", host="8MiB"), Budget(device="128KiB", host="8MiB")
    model = managed(budget)
    assert (budget, repr(budget), hash(budget), asdict(budget)) == (unused, repr(unused), hash(unused), asdict(unused))
    for other in (copy.copy(budget), copy.deepcopy(budget), pickle.loads(pickle.dumps(budget)), replace(budget)):
        assert (other, repr(other), hash(other)) == (budget, repr(budget), hash(budget))
        release(managed(other))
    release(model)


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


@pytest.mark.parametrize("student", ["plain", "managed"])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_frozen_teacher_called_with_gradients_enabled(needs_gradient: bool, student: str) -> None:
    """Without an input that needs a gradient its pass is an evaluation, and the student's tensors do not count."""
    torch.manual_seed(0)
    plain, teacher, learner = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))) for _ in range(3))
    plain.requires_grad_(False)
    teacher.load_state_dict(plain.state_dict())
    teacher.requires_grad_(False)
    size = "256KiB" if needs_gradient else "80KiB"
    teacher, _ = chunked(teacher, None, device="emulated", budget=Budget(device=size, host="8MiB"), precision="fp32")
    optimizer: Any = torch.optim.AdamW(learner.parameters(), fused=True)
    if student == "managed":
        budget = Budget(device="1MiB", host="8MiB")
        learner, optimizer = chunked(learner, AdamW(), device="emulated", budget=budget, precision="fp32")
    for index in range(5):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(index), requires_grad=needs_gradient)
        aim = teacher(x)
        (learner(x) - aim).square().mean().backward()
        expected = plain(x)
        assert torch.equal(aim, expected)
        if needs_gradient:
            assert torch.equal(*(torch.autograd.grad(each(x).square().sum(), x)[0] for each in (teacher, plain)))
        optimizer.step()
        optimizer.zero_grad()
    found = statistics(teacher)
    assert found.tiers["device"].peak_bytes <= found.tiers["device"].budget_bytes
    if not needs_gradient:
        assert (found.planned_passes, found.divergences) == (4, 0)
    for model in (teacher, learner):
        if is_managed(model):
            release(model)


class Reader(nn.Module):
    """Weights that are multiplied by another model's; ``kept``: who keeps what is saved for backward."""

    def __init__(self, others: list[nn.Module], kept: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) / 4 for _ in others)
        self.others, self.kept = tuple(others), kept

    def forward(self, x: Tensor) -> Tensor:
        for weight, other in zip(self.weights, self.others, strict=True):
            if self.kept == "checkpoint":
                x = checkpoint(self._block, x, weight, other, use_reentrant=False)
            else:
                hooks = saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
                with hooks if self.kept == "hooks" else nullcontext():
                    x = self._block(x, weight, other)
        return x

    def _block(self, x: Tensor, weight: Tensor, other: nn.Linear) -> Tensor:
        return torch.tanh(x @ (other.weight @ weight)) + torch.cat([weight, other.weight])[10:26].sum(0)


def read_another(make: Any, kept: str, frozen: bool) -> list[Tensor]:
    first = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    first[1].requires_grad_(not frozen)
    second = Reader(list(first), kept)
    second.weights[1].requires_grad_(not frozen)
    made = [make(first, SPEC), make(second, SPEC)]
    logs = []
    for index in range(STEPS):
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(index))
        loss = made[1][0](made[0][0](x)).square().mean()
        loss.backward()
        for _, optimizer in made:
            finish(optimizer)
        logs.append(loss.detach())
    return logs


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kept", ["engine", "hooks", "checkpoint"])
def test_a_call_reads_weights_of_two_models(kept: str, frozen: bool, device: str) -> None:
    """Each engine fetches its own weights, and only then makes aliases of these."""
    settings = Settings(max_grad_norm=None, options=OPTIONS)
    budget = Budget(host=HOST) if device == "cpu" else Budget(device=18_432, host=HOST)
    got = run_managed(partial(read_another, kept=kept, frozen=frozen), settings, device, budget)
    check_same(partial(read_another, kept=kept, frozen=frozen), settings, got)
    assert device == "cpu" or got.evictions


# Between a model's forward and backward


def write_weights(model: nn.Module, optimizer: Any) -> None:
    with materialized(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


OTHERS_USE = {
    "materialized": write_weights,
    "state dict": lambda model, optimizer: model.state_dict(),
    "loads": lambda model, optimizer: model.load_state_dict(model.state_dict()),
    "average": lambda model, optimizer: WeightAverage(model).update(),
    "states": lambda model, optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("use", OTHERS_USE)
def test_what_another_models_engine_copies_is_no_activation_of_this_one(use: str) -> None:
    """As a momentum encoder is updated while the encoder's graph is alive."""
    peaks = []
    for used in (False, True):
        torch.manual_seed(0)
        model, other = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))) for _ in range(2))
        budget = Budget(device="96KiB", host="8MiB")
        model, optimizer = chunked(model, SGD(lr=0.1), device="emulated", budget=budget, precision="fp32")
        other, others = chunked(other, AdamW(lr=0.01), device="emulated", budget=Budget(device="1MiB", host="8MiB"))
        for index in range(4):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(index))
            other(x).float().square().mean().backward()
            others.step()
            other(x).float().square().mean().backward()
            found = model(x)
            if used:
                OTHERS_USE[use](other, others)
            others.zero_grad()
            found.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        counted = statistics(model)
        peaks.append(counted.tiers["device"].peak_bytes)
        assert counted.planned_passes == 3
        assert counted.evictions > 0
        let_go(model, other)
    assert peaks[1] < peaks[0] + 128, peaks  # a few scalars
