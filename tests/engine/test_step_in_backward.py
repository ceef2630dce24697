"""Groups stepped while backward goes on: the same bits, earlier; and what is refused, or cannot be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import _models as models
from _cases import next_token, rows, square, tokens
from _early_steps import DEVICES, SIZES, check_bits, managed, stream_states
from _fake_cuda import FakeRuntime
from _runs import HOST, let_go
from ps_core import AdamW, Budget, InvalidInput, Options
from ps_core._plan import Held
from ps_core._simulate.engine_timing import Issuing, Priced
from ps_core._simulate.steps_in_backward import EarlySteps, early_steps
from ps_core.engine import chunked, load_checkpoint, save_checkpoint, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from test_host_worker import late_device
from test_late_parameters import Net, X, add_layer
from test_offload import Net as Offloading
from test_virtual_clock import NEAR, check_profile, train


@pytest.fixture(params=["by the processor", "also on the device"])
def stepping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test twice: the processor alone steps groups within backward, or the device steps some, too."""
    planned = stream_states(monkeypatch) if request.param == "also on the device" else []
    yield
    assert all(each.plan.stepped_in_backward for each in planned)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("precision", "size"), [(p, size) for p, sizes in SIZES.items() for size in sizes])
def test_the_same_bits(precision: str, size: str, device: str) -> None:
    assert check_bits(device, precision, size).steps == 6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", SIZES)
def test_the_same_bits_where_the_processor_comes_back_to_older_gradients(
    precision: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At worst all wait until the last gradient is on the host, the newest first."""

    def latest(self: Issuing, home: tuple[Held, ...], step: Sequence[Priced]) -> EarlySteps:
        every = early_steps(len(home), step[-2].segment, step[-1].segment)
        queues = {step[-2].segment.instrs[behind].queue for behind in every}
        assert len(queues) == 1
        return {max(every): tuple(row for behind in sorted(every, reverse=True) for row in every[behind])}

    monkeypatch.setattr(Issuing, "early_steps", latest)
    check_bits(device, precision, SIZES[precision][0])


def test_gradients_of_inputs_step_nothing() -> None:
    """`torch.autograd.grad` makes no gradients of parameters, so that another pass may follow it.

    The machine is one on which steps within backward pay even for a model as small as this.
    """
    found = []
    for told in ({"device": "cpu"}, {"device": "emulated", "budget": Budget(device="110KiB", host="200KiB")}):
        torch.manual_seed(0)
        step = "after_backward" if told["device"] == "cpu" else "in_backward"
        options = Options(step=step, machine="cpu")
        model, optimizer = chunked(Offloading(), AdamW(lr=0.01), precision="fp32", options=options, **told)
        logs = []
        for index in range(4):
            x = torch.randn(65, 32, generator=torch.Generator().manual_seed(index))
            model(x).backward()
            within = len(stepped(model))
            optimizer.step()
            x.requires_grad_()
            logs += torch.autograd.grad(model(x), x)
            assert not stepped(model)
            optimizer.zero_grad()
        assert bool(within) is (step == "in_backward")
        found.append(logs + [value.clone() for value in model.state_dict().values()])
        let_go(model)
    assert all(map(torch.equal, *found))


class ReadAgain(nn.Module):
    """Layers whose weight is read in backward once more after its gradient was made, through an alias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = functional.linear(torch.sin(x), layer.weight.detach())
            x = torch.tanh(layer(torch.cos(y))) + x
        return x


def rows_trained(build: Callable[[], nn.Module], device: Any, precision: str, size: str | None, step: str) -> Any:
    torch.manual_seed(0)
    budget = Budget(host=HOST) if size is None else Budget(device=size, host=HOST)
    options = Options(group_bytes=2048, step=step)
    model, optimizer = chunked(
        build(), AdamW(lr=0.01), device=device, precision=precision, budget=budget, options=options
    )
    logs, within = [], 0
    for index in range(4):
        loss = square(model, *rows(index))
        loss.backward()
        within += len(stepped(model))
        logs.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    logs += [value.clone() for value in model.state_dict().values()]
    found = statistics(model)
    assert found.group_steps_in_backward == within
    let_go(model)
    return logs, within, found.divergences


def stepped(model: nn.Module) -> Any:
    return hooks_of(model).engine.stepping.groups


@pytest.mark.parametrize(("build", "precision", "size"), [(ReadAgain, "fp32", "100KiB"), (ReadAgain, "bf16", "64KiB")])
def test_a_group_is_not_stepped_before_its_weight_was_read_for_the_last_time(
    build: Callable[[], nn.Module], precision: str, size: str
) -> None:
    right, *_ = rows_trained(build, "cpu", precision, None, "after_backward")
    got, within, divergences = rows_trained(build, "emulated", precision, size, "in_backward")
    assert all(map(torch.equal, right, got))
    assert within > 0
    assert divergences == 0


def test_parameters_that_were_added_are_stepped_within_their_first_backward_pass() -> None:
    found = []
    for step in ("in_backward", "after_backward"):
        model, optimizer = chunked(
            Net(),
            AdamW(lr=0.01),
            device="emulated",
            budget=Budget(device="80KiB", host=HOST),
            options=Options(group_bytes=2**14, step=step),
        )
        within = []
        for index in range(4):
            if index == 2:
                add_layer(model, 1)
            model(X).backward()
            within.append(len(stepped(model)))
            optimizer.step()
            optimizer.zero_grad()
        found.append([value.clone() for value in model.state_dict().values()])
        assert bool(within[2]) == (step == "in_backward")
        let_go(model)
    assert all(map(torch.equal, *found))


def test_steps_begin_before_backward_has_ended() -> None:
    runtime = FakeRuntime(1)
    with runtime:
        device = late_device(runtime, 2)
        model, optimizer = managed(device, "bf16", "72KiB")
        worker: Any = device._worker
        for index in range(4):
            before = len(worker.launched)
            next_token(model, *tokens(index)).backward()
            within = [what for what in worker.launched[before:] if what.startswith("step of")]
            optimizer.step()
            behind = [what for what in worker.launched[before:] if what.startswith("step of")][len(within) :]
            assert optimizer.last_norm is None if within else optimizer.last_norm > 0
        assert len(within) > 2
        assert not behind, "what is left is stepped on the device"
        let_go(model)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm.* use step='speculative'"),
        ({"precision": "fp16"}, "fp16.* use step='speculative'"),
        ({"accumulation_steps": 2}, "accumulation_steps=2.* use step='after_backward'"),
        ({"accumulation_steps": 2, "max_grad_norm": 1.0}, "accumulation_steps=2.* use step='after_backward'"),
    ],
)
def test_what_needs_a_decision_first_is_refused(told: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        chunked(models.Language(), AdamW(), device="cpu", options=Options(step="in_backward"), **told)


def begun(device: Any = "emulated", steps: int = 3) -> tuple[Any, Any]:
    """A model with a plan, after a few steps."""
    model, optimizer = managed(device, "bf16", "72KiB")
    for index in range(steps):
        next_token(model, *tokens(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.usefixtures("stepping")
def test_a_second_pass_before_the_step_is_refused() -> None:
    model, optimizer = begun()
    next_token(model, *tokens(9)).backward()
    with pytest.raises(InvalidInput, match=r"before optimizer.step\(\) was called"):
        next_token(model, *tokens(10))
    with torch.no_grad():
        next_token(model, *tokens(10))  # an evaluation is none
    optimizer.step()
    optimizer.zero_grad()
    next_token(model, *tokens(10)).backward()
    optimizer.max_grad_norm = 1.0
    with pytest.raises(InvalidInput, match="max_grad_norm was set"):
        optimizer.step()
    let_go(model)


@pytest.mark.usefixtures("stepping")
def test_rates_that_change_between_backward_and_the_step_are_refused() -> None:
    (model, optimizer), (same, alone) = begun(), begun()
    for each in (model, same):
        next_token(each, *tokens(9)).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(InvalidInput, match=r"settings of '.*' were changed between backward and optimizer.step\(\)"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    alone.step()
    assert all(map(torch.equal, model.state_dict().values(), same.state_dict().values()))
    let_go(model)
    let_go(same)


@pytest.mark.usefixtures("stepping")
def test_a_part_that_was_stepped_is_not_trained_before_the_step() -> None:
    model, optimizer = begun()
    next_token(model, *tokens(9)).backward()
    x = rows(0, 4, models.WIDTH)[0].to(torch.bfloat16)
    with pytest.raises(InvalidInput, match=r"used after its group was stepped within backward"):
        model.blocks[2](x)
    with torch.no_grad():
        model.blocks[2](x)  # an evaluation is none
    optimizer.step()
    optimizer.zero_grad()
    model.blocks[2](x).sum().backward()
    let_go(model)


@pytest.mark.usefixtures("stepping")
def test_nothing_is_saved_before_the_step_and_loaded_states_end_it(tmp_path: Path) -> None:
    model, optimizer = begun()
    kept = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict(masters=True)
    next_token(model, *tokens(9)).backward()
    with pytest.raises(InvalidInput, match=r"nothing can be saved before the others: call optimizer.step\(\) first"):
        save_checkpoint(tmp_path / "amid", model, optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    optimizer.zero_grad()
    assert all(map(torch.equal, model.state_dict().values(), kept[0].values()))
    next_token(model, *tokens(9)).backward()
    optimizer.step()
    let_go(model)


@pytest.mark.usefixtures("stepping")
@pytest.mark.parametrize(
    "what",
    [
        lambda model, _: setattr(model.blocks[2].narrow.weight, "grad", None),
        lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model, _: model.blocks[0].narrow.weight.grad,
        lambda _, optimizer: optimizer.zero_grad(),
        lambda model, _: model.zero_grad(),
        lambda model, _: model.zero_grad(set_to_none=False),
        lambda model, _: setattr(
            model.blocks[0].narrow.weight, "grad", torch.ones_like(model.state_dict()["blocks.0.narrow.weight"])
        ),
    ],
    ids=["none", "clip", "grad", "optimizer.zero_grad", "model.zero_grad", "zeroed", "assign"],
)
def test_gradients_are_neither_read_nor_changed_between_backward_and_step(what: Callable[[Any, Any], Any]) -> None:
    (model, optimizer), (same, alone) = begun(), begun()
    for each in (model, same):
        next_token(each, *tokens(9)).backward()
    with pytest.raises(InvalidInput, match="stepped"):
        what(model, optimizer)
    for each in (optimizer, alone):
        each.step()
        each.zero_grad()
    assert model.blocks[0].narrow.weight.grad is None
    assert all(map(torch.equal, model.state_dict().values(), same.state_dict().values()))
    let_go(model)
    let_go(same)


@pytest.mark.usefixtures("stepping")
def test_a_pass_that_breaks_off_is_ended_by_the_step_or_by_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = begun()
    save_checkpoint(tmp_path / "before", model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fail(_: Tensor) -> None:
        raise ValueError("mine")

    for end in (optimizer.step, lambda: load_checkpoint(tmp_path / "before", model, optimizer)):
        handle = model.table.weight.register_hook(fail)
        with pytest.raises(ValueError, match="mine"):
            next_token(model, *tokens(9)).backward()
        handle.remove()
        with pytest.raises(InvalidInput, match=r"call optimizer.step\(\)"):
            next_token(model, *tokens(10))
        end()
        optimizer.zero_grad()
        changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
        assert bool(changed) == (end == optimizer.step)
        next_token(model, *tokens(10)).backward()
        optimizer.step()
    let_go(model)


@pytest.mark.usefixtures("stepping")
def test_a_gradient_that_is_not_finite_raises_before_its_group_is_changed() -> None:
    model, optimizer = begun()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss = next_token(model, *tokens(9))
    parameter = model.blocks[0].narrow.weight
    parameter.register_hook(lambda grad: grad * float("nan"))

    def step() -> None:
        loss.backward()
        optimizer.step()

    with pytest.raises(FloatingPointError, match=r"so the group was not stepped.* load a checkpoint to go on"):
        step()
    after = model.state_dict()
    assert torch.equal(after["blocks.0.narrow.weight"], before["blocks.0.narrow.weight"])
    assert any(not torch.equal(after[name], before[name]) for name in before), "later layers were stepped"
    let_go(model)


@pytest.mark.usefixtures("stepping")
def test_the_workers_thread_reports_it_too() -> None:
    runtime = FakeRuntime(1)
    with runtime:
        model, optimizer = begun(late_device(runtime, 2))
        model.blocks[0].narrow.weight.register_hook(lambda grad: grad * float("nan"))

        def steps() -> None:
            for index in range(2):
                next_token(model, *tokens(index)).backward()
                optimizer.step()
                model.state_dict()

        with pytest.raises((FloatingPointError, RuntimeError), match="is not finite"):
            steps()


@pytest.mark.parametrize("budget_kib", [64, 160])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_step_takes_what_was_predicted(budget_kib: int, precision: str, tmp_path: Path) -> None:
    kib = budget_kib * (2 if precision == "fp32" else 1)
    got = train(tmp_path, f"{kib}KiB", precision=precision, clip=None, step="in_backward")
    after = train(tmp_path, f"{kib}KiB", precision=precision, clip=None)
    assert got.step_s == pytest.approx(got.predicted.step_time_s, rel=2 * NEAR)
    check_profile(got, 2 * NEAR)
    assert got.step_s <= after.step_s * 1.02
    if precision == "bf16":
        assert got.step_s < 0.9 * after.step_s
