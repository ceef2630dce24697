"""Compiled functions around a model: with the optimizer's step in them, a backward pass, or gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import InternalTorchDynamoError
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import _models as models
from _cases import ADAMW, rows
from _runs import chunked_model
from ps_core import UnsupportedParameter
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of PyTorch's own making
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""``torch.compile``, or what leaves a function as it is."""
uncompiled = torch.compiler.disable


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def step(compiled: Compiler, model: Any, optimizer: Any) -> Callable[[Tensor], None]:
    made = compiled(optimizer.step)

    def train(output: Tensor) -> None:
        loss_of(output).backward()
        made()

    return train


def step_and_forget(compiled: Compiler, model: Any, optimizer: Any) -> Callable[[Tensor], None]:
    @compiled
    def end() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def train(output: Tensor) -> None:
        loss_of(output).backward()
        end()

    return train


def step_in_a_function_that_is_left_out(compiled: Compiler, model: Any, optimizer: Any) -> Callable[[Tensor], None]:
    end = uncompiled(optimizer.step)

    @compiled
    def train(output: Tensor) -> Tensor:
        loss_of(output).backward()
        end()
        return output.detach() + 1

    return train  # type: ignore[return-value]


def scheduled(compiled: Compiler, model: Any, optimizer: Any) -> Callable[[Tensor], None]:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    @compiled
    def end() -> None:
        optimizer.step()
        scheduler.step()

    def train(output: Tensor) -> None:
        loss_of(output).backward()
        end()

    return train


def backward(compiled: Compiler, model: Any, optimizer: Any) -> Callable[[Tensor], None]:
    made = compiled(lambda output: loss_of(output).backward())

    def train(output: Tensor) -> None:
        made(output)
        optimizer.step()

    return train


def gradients(compiled: Compiler, model: Any, optimizer: Any) -> Callable[[Tensor], None]:
    """Given to functions: one changes them in place, one returns others, one their norm."""

    @compiled
    def halve(gradients: list[Tensor]) -> None:
        for gradient in gradients:
            gradient.mul_(0.5)

    @compiled
    def doubled(gradients: list[Tensor]) -> list[Tensor]:
        return [gradient * 2 for gradient in gradients]

    norm = compiled(torch.nn.utils.get_total_norm)

    def train(output: Tensor) -> None:
        loss_of(output).backward()
        halve([parameter.grad for parameter in model.parameters()])
        found = doubled([parameter.grad for parameter in model.parameters()])
        factor = 1 / (1 + norm([parameter.grad for parameter in model.parameters()]))
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient * factor
        optimizer.step()

    return train


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "loop", [step, step_and_forget, step_in_a_function_that_is_left_out, scheduled, backward, gradients]
)
def test_loops_with_compiled_functions_train_to_the_same_bits(
    loop: Callable[..., Callable[[Tensor], None]], backend: str
) -> None:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=backend)

    def trained(compiler: Compiler) -> list[Tensor]:
        torch.manual_seed(0)
        with chunked_model(models.stack(2), spec=ADAMW) as (model, optimizer):
            train = loop(compiler, model, optimizer)
            for index in range(4):
                train(model(*rows(index)))
                optimizer.zero_grad()
            return [value.clone() for value in model.state_dict().values()]

    expected = trained(lambda function: function)
    got = trained(compiled)
    assert all(map(torch.equal, got, expected))
    assert not _get_current_dispatch_mode_stack()


def test_a_step_in_one_graph_is_refused_in_plain_words() -> None:
    with chunked_model(models.stack(2)) as (model, optimizer):
        loss_of(model(*rows(0))).backward()
        with pytest.raises(Exception, match="step of the engine, whose kernels are compiled already: leave fullgraph"):
            torch.compile(optimizer.step, backend="eager", fullgraph=True)()
        optimizer.step()


@pytest.mark.parametrize("how", ["clip_grad_norm_", "one gradient"])
def test_a_function_that_reads_gradients_itself_is_refused_with_a_remedy_that_works(how: str) -> None:
    """Clipping outside of the function, or gradients that are given to it; see `gradients`."""
    clip = torch.nn.utils.clip_grad_norm_
    with chunked_model(models.stack(2)) as (model, optimizer):
        first = next(model.parameters())
        function: Any = clip if how == "clip_grad_norm_" else lambda *_: first.grad.norm()
        loss_of(model(*rows(0))).backward()
        told: tuple[type[Exception], str] = (
            UnsupportedParameter,
            "clip gradients outside of compiled functions, or give",
        )
        if how == "one gradient" and torch.__version__ < "2.12":  # whose compiler asks for the gradient's memory
            told = InternalTorchDynamoError, "has no memory of its own"
        with pytest.raises(told[0], match=told[1]):
            torch.compile(function, backend="eager")(model.parameters(), 1.0)
        clip(model.parameters(), 1.0)
        optimizer.step()


def test_a_count_that_ends_in_a_compiled_function_lets_it_restore_the_stack() -> None:
    """PyTorch restores whether operators look for modes, when the function returns."""
    tracker = TensorBytesTracker()
    tracker.start()
    torch.compile(lambda x: uncompiled(tracker.stop)() or x + 1, backend="eager")(torch.ones(3))
    torch.ones(3)
    tracker.stop()
    assert not _get_current_dispatch_mode_stack()
    torch.ones(3)
