"""What a reader who tried to break the engine found, each kept as a test."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import _models as models
from _cases import ADAMW, finish, next_token, rows, square, tokens
from _reference import Make, Settings
from _runs import HOST, check_same, chunked_model, stand_in
from _runs import managed as managed_loop
from _states import masters_of
from ps_core import SGD, AdamW, Budget, DoesNotFit, InvalidInput, Options
from ps_core.engine import chunked, load_checkpoint, materialized, release, save_checkpoint, statistics
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._gradients import gradient_store as _gradients
from ps_core.engine._optim import group_step as _stepping

DEVICES = ["cpu", "emulated"]


def managed(device: str, precision: str = "bf16", **more: Any) -> Any:
    where: dict[str, Any] = {"device": "cpu", "budget": Budget(host=HOST)}
    if device == "emulated":
        where = {"device": stand_in(), "budget": Budget(device="256KiB", host=HOST)}
    return chunked_model(models.stack(), precision=precision, options=Options(group_bytes=4096), **where, **more)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_forgotten_one_by_one_stay_forgotten(device: str) -> None:
    def train(*, forget: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with managed(device) as (model, optimizer):
            if forget:
                square(model, *rows(5)).backward()
                for parameter in model.parameters():
                    parameter.grad = None
                assert all(parameter.grad is None for parameter in model.parameters())
                square(model, *rows(6)).backward()
                model.zero_grad()
            square(model, *rows(0)).backward()
            optimizer.step()
            return state(model)

    plain, forgot = train(forget=False), train(forget=True)
    for name, value in plain.items():
        assert torch.equal(value, forgot[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_factor_is_for_the_gradient_that_was_there(device: str) -> None:
    def train(*, early: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with managed(device, "fp32", accumulation_steps=2) as (model, optimizer):
            square(model, *rows(0)).backward()
            if early:
                for parameter in model.parameters():
                    parameter.grad.mul_(0.0)
            square(model, *rows(1)).backward()
            optimizer.step()
            return state(model)

    def alone() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with managed(device, "fp32", accumulation_steps=2) as (model, optimizer):
            square(model, *rows(1)).backward()
            optimizer.step()
            return state(model)

    wiped, second = train(early=True), alone()
    for name, value in second.items():
        assert torch.equal(value, wiped[name]), name
    both = train(early=False)
    assert any(not torch.equal(value, both[name]) for name, value in second.items())


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_in_inference_mode_comes_first(device: str) -> None:
    with managed(device) as (model, optimizer):
        with torch.inference_mode():
            model(*rows(0))
        square(model, *rows(0)).backward()
        optimizer.step()


@pytest.mark.parametrize("amid", ["before backward", "before the step", "after a failure"])
@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_in_inference_mode_comes_amid_a_step(device: str, amid: str) -> None:
    def train(evaluate: Callable[[], Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        with managed(device) as (model, optimizer):
            for index in range(3):
                loss = square(model, *rows(index))
                if amid == "before backward":
                    with evaluate():
                        model(*rows(7))
                loss.backward()
                if amid == "after a failure":
                    with pytest.raises(RuntimeError):
                        model(*(each[..., :1] for each in rows(index)))
                if amid != "before backward":
                    with evaluate():
                        model(*rows(7))
                optimizer.step()
                optimizer.zero_grad()
            return state(model)

    expected = train(torch.no_grad)
    for name, value in train(torch.inference_mode).items():
        assert torch.equal(value, expected[name]), name


def test_a_second_gradient_comes_after_an_evaluation_in_inference_mode() -> None:
    def train(evaluate: Callable[[], Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        with managed("cpu") as (model, optimizer):
            for index in range(2):
                square(model, *rows(index)).backward()
                with evaluate():
                    model(*rows(7))
            optimizer.step()
            return state(model)

    expected = train(torch.no_grad)
    for name, value in train(torch.inference_mode).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_management_begins_and_ends_in_inference_mode(device: str, precision: str) -> None:
    place: Any = {"device": device, "budget": Budget(device="256KiB" if device == "emulated" else None, host=HOST)}

    def train(mode: Callable[[], Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = models.stack()
        with mode():
            _, optimizer = chunked(model, ADAMW, precision=precision, **place)
        square(model, *rows(0)).backward()
        optimizer.step()
        with mode():
            release(model)
        dtype = next(model.parameters()).dtype
        square(model, *(each.to(dtype) for each in rows(1))).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)
        return state(model)

    expected = train(torch.no_grad)
    for name, value in train(torch.inference_mode).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_nobody_wants_is_freed(device: str) -> None:
    torch.manual_seed(0)
    budget = Budget(host=HOST) if device == "cpu" else Budget(device="256KiB", host=HOST)
    model, optimizer = chunked(models.stack(), ADAMW, device=device, budget=budget)
    square(model, *rows(0)).backward()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("device", DEVICES)
def test_a_parametrized_model_nobody_wants_is_freed(device: str) -> None:
    """PyTorch gives a parametrized module a class of its own, which refers to the module."""
    torch.manual_seed(0)
    budget = Budget(host=HOST) if device == "cpu" else Budget(device="256KiB", host=HOST)
    model, optimizer = chunked(models.weight_normed("new"), ADAMW, device=device, budget=budget)
    square(model, *rows(0)).backward()
    store = hooks_of(model).engine.store
    del model, optimizer
    gc.collect()
    assert not any(store.ledger.used_bytes)


def test_the_size_of_groups_changes_nothing_for_one_row() -> None:
    """A product of a matrix and one row is rounded by where the matrix begins in memory."""

    def train(group_bytes: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(257, 257) for _ in range(3)))
        options = Options(group_bytes=group_bytes)
        model, optimizer = chunked(net, ADAMW, precision="fp32", budget=Budget(host=HOST), options=options)
        for seed in range(3):
            x = torch.randn(1, 257, generator=torch.Generator().manual_seed(seed))
            square(model, x).backward()
            finish(optimizer)
        return list(state(model).values())

    assert all(map(torch.equal, train("4KiB"), train("4MiB")))


def test_zero_grad_between_forward_and_backward_leaves_the_plan_alone() -> None:
    with managed("emulated") as (model, optimizer):
        for index in range(4):
            loss = square(model, *rows(index))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = statistics(model)
    assert (found.divergences, found.passes, found.planned_passes) == (
        0,
        4,
        3,
    )  # the first runs on demand: its loss is made outside


def test_a_plan_does_not_serve_another_shape_of_the_same_size() -> None:
    with managed("emulated") as (model, optimizer):
        x = rows(0)[0]
        for each in (x, x, x.reshape(2, -1, x.shape[-1]) if x.dim() == 2 else x.flatten(0, 1)):
            square(model, each).backward()
            optimizer.step()
        assert statistics(model).divergences == 1


def test_without_an_optimizer_no_gradients_pile_up() -> None:
    with chunked_model(models.stack(), spec=None) as (model, _):
        x = rows(0)[0].requires_grad_()
        square(model, x).backward()
        assert x.grad is not None
        with torch._C.DisableTorchFunctionSubclass():
            assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_inside_materialized_nothing_trains(device: str) -> None:
    with managed(device) as (model, optimizer):
        square(model, *rows(0)).backward()
        with materialized(model), pytest.raises(InvalidInput, match="train after the block"):
            optimizer.step()
        with pytest.raises(InvalidInput, match=r"'1\.wide\.weight' now has shape"), materialized(model, write=True):
            model[1].wide.weight.data = torch.zeros(3)
        square(model, *rows(0)).backward()
        optimizer.step()


def test_after_release_the_optimizer_changes_nothing() -> None:
    model, optimizer = chunked(models.stack(), AdamW(), device="cpu", budget=Budget(host=HOST))
    square(model, *rows(0)).backward()
    release(model)
    before = state(model)
    square(model.float(), *rows(0)).backward()
    assert optimizer is not None
    with pytest.raises(InvalidInput, match="this model was released"):
        optimizer.step()  # it has no gradient any more, and these parameters are none of its
    assert all(torch.equal(value.float(), before[name].float()) for name, value in model.state_dict().items())
    assert all(type(parameter) is nn.Parameter and parameter.grad is not None for parameter in model.parameters())


def test_an_error_in_chunked_leaves_the_model_as_it_was() -> None:
    model = models.stack()
    with pytest.raises(InvalidInput):
        chunked(model, AdamW(), device="cpu", budget=Budget(host=HOST), max_grad_norm=-1.0)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    release(chunked(model, AdamW(), device="cpu", budget=Budget(host=HOST))[0])


def test_gradients_of_all_parameters_need_no_parameter() -> None:
    """``torch.autograd.grad`` with respect to them brings nothing in but what backward reads."""

    def gradients(device: str) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        with managed(device, "fp32") as (model, _):
            return torch.autograd.grad(square(model, *rows(0)), list(model.parameters()))

    for one, other in zip(gradients("cpu"), gradients("emulated"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_pair_of_hooks_that_keeps_parameters_themselves(frozen: bool) -> None:
    """A layer norm's weight is saved as it is; by the time backward reads it, it was elsewhere, and read as nothing."""

    def train(make: Make) -> list[Tensor]:
        model: nn.Module = models.Language()
        if frozen:
            model.blocks[1].requires_grad_(False)
            model.table.requires_grad_(False)
        model, optimizer = make(model, SGD(lr=0.2, momentum=0.9))
        logs = []
        for index in range(3):
            with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                loss = next_token(model, *tokens(index))
            loss.backward()
            finish(optimizer)
            logs += [loss.detach(), torch.tensor(optimizer.last_norm, dtype=torch.float64)]
        return logs

    settings, fitting = Settings(precision="fp32"), 0
    for size in range(150_000, 180_000, 6_000):
        with suppress(DoesNotFit):
            check_same(train, settings, managed_loop(train, settings, stand_in, Budget(device=size, host=HOST)))
            fitting += 1
    assert fitting > 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_pass_without_backward_leaves_nothing(device: str) -> None:
    """Some operators keep their own results, which would keep the operators."""
    results: list[Any] = []

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x).tanh().softmax(1)
            results.append(weakref.ref(x.untyped_storage()))
            return x.exp().sum()

    where: dict[str, Any] = {"device": "cpu"} if device == "cpu" else {"device": stand_in()}
    budget = Budget(host=HOST, device=None if device == "cpu" else "256KiB")
    with chunked_model(Keeping(), budget=budget, precision="fp32", **where) as (model, optimizer):
        for _ in range(3):
            model(torch.ones(4, 32))
            model.linear.weight.norm()
        assert [each() for each in results] == [None] * 3
        model(torch.ones(4, 32)).backward()
        finish(optimizer)


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_changed_in_place_since_it_was_kept_is_not_used(device: str) -> None:
    class Within(models.stack().__class__):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).tanh()
            z = y * 2
            y.add_(1)
            return z

    inside = models.stack()
    inside.__class__ = Within
    where: dict[str, Any] = {"device": "cpu"} if device == "cpu" else {"device": stand_in()}
    budget = Budget(host=HOST, device=None if device == "cpu" else "256KiB")
    with chunked_model(inside, budget=budget, precision="fp32", **where) as (model, _):
        out = model(rows(0)[0])
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*expected version 0"):
            out.sum().backward()


@pytest.mark.parametrize("between", ["a step", "materialized", "a checkpoint's values"])
def test_a_state_dict_through_a_wrapper_after_one_that_broke_off(between: str) -> None:
    class Breaks(nn.Module):
        broken = True

        def get_extra_state(self) -> str:
            if self.broken:
                raise ValueError("not now")
            return ""

        def set_extra_state(self, state: Any) -> None:
            """Nothing to keep."""

    with managed("emulated", "fp32") as (model, optimizer):
        model[1].add_module("breaks", Breaks())
        wrapper = nn.ModuleDict({"inner": model})
        with pytest.raises(ValueError, match="not now"):
            wrapper.state_dict()
        if between == "a step":
            square(model, *rows(0)).backward()
            finish(optimizer)
        elif between == "materialized":
            with materialized(model, write=True):
                for value in model.parameters():
                    value.data.add_(1)
        else:
            states = optimizer.state_dict(masters=True)
            for master in masters_of(states).values():
                master += 1  # in place
            optimizer.load_state_dict(states)
        Breaks.broken = False
        found = wrapper.state_dict()
        with materialized(model):
            assert all(torch.equal(found[f"inner.{name}"], value) for name, value in model.named_parameters())


@pytest.mark.parametrize("room", [20_000, 60_000, 1_000_000])
def test_two_forwards_two_backwards_with_several_tensors_in_a_group(room: int) -> None:
    def twice(make: Make) -> list[Tensor]:
        model, optimizer = make(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), SGD(lr=0.1))
        logs = []
        for index in range(4):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(index))
            losses = [model(x).float().square().mean(), model(x + 1).float().square().mean()]
            for loss in reversed(losses):
                optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            logs += [loss.detach() for loss in losses]
        return logs

    told = Settings(precision="bf16", options=Options(group_bytes=40_000))
    check_same(twice, told, managed_loop(twice, told, stand_in, Budget(device=room, host=HOST)))


def test_parameters_read_between_steps_do_not_end_planning() -> None:
    """As a moving average reads them: a pass of its own, which no batch began."""
    budget = Budget(device="4MiB", host=HOST)
    with chunked_model(models.stack(), device=stand_in(), budget=budget) as (model, optimizer):
        for index in range(6):
            square(model, *rows(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert all(parameter.norm() > 0 for parameter in model.parameters() if parameter.dim() > 1)
        assert statistics(model).planned_passes >= 5


class ManySmall(nn.Module):
    """Forty vectors, each too small for a call of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((2**13,), 1.0 + index)) for index in range(40))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x * weight).square().mean() for weight in self.weights]).sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_small_gradients_are_put_together_in_pieces(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is in no budget, so it is never more than a few hundred kibibytes."""

    def train() -> tuple[int, dict[str, Tensor]]:
        where: dict[str, Any] = {"device": "cpu", "budget": Budget(host=HOST)}
        options = Options(group_bytes="4MiB", keep_fp32=("*",))
        with chunked_model(ManySmall(), precision=precision, options=options, **where) as (model, optimizer):
            for index in range(2):
                model(torch.full((2**13,), 1.0 + index)).backward()
                tracker = TensorBytesTracker("cpu")
                tracker.start()
                try:
                    optimizer.step()
                finally:
                    tracker.stop()
            return tracker.take_peak(), state(model)

    peak, pieces = train()
    for module in (_gradients, _stepping):
        monkeypatch.setattr(module, "CONCATENATED_NUMEL", 2**30)
    whole_peak, whole = train()
    assert peak <= 2 * 2**16 * 4 + 2**15 < 40 * 2**13 * 4 <= whole_peak
    assert all(torch.equal(value, whole[name]) for name, value in pieces.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_of_no_elements_in_states_and_checkpoints(device: str, precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    where: dict[str, Any] = {"device": "cpu", "budget": Budget(host=HOST)}
    if device == "emulated":
        where = {"device": stand_in(), "budget": Budget(device="64KiB", host=HOST)}
    with chunked_model(models.Empty(), precision=precision, options=Options(group_bytes=4096), **where) as made:
        model, optimizer = made

        def train(index: int) -> Tensor:
            loss = square(model, *rows(index))
            loss.backward()
            assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]) > 0
            optimizer.step()
            return loss.detach()

        train(0)
        save_checkpoint(tmp_path / "one", model, optimizer)
        weights, states = model.state_dict(), optimizer.state_dict(masters=True)
        assert weights["prompt"].shape == masters_of(states)[0].shape == (0, 32)
        losses = [train(1), train(2)]
        load_checkpoint(tmp_path / "one", model, optimizer)
        assert losses == [train(1), train(2)]
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        assert losses == [train(1), train(2)]
