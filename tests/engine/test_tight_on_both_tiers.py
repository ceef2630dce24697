"""Train where both tiers are tight, so that plans lend home slots: training goes on after a pass broke off."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _runs import let_go
from _states import masters_of
from ps_core import Adam, Budget, DoesNotFit, UnsupportedParameter
from ps_core.engine import chunked, statistics
from ps_core.engine._execution.find_hooks import hooks_of

BUDGETS = [
    *((20480, host) for host in range(58000, 70000, 2000)),  # the plan lends home slots
    *((device, 58000) for device in (20736, 21000, 22000)),  # it has hardly a byte to spare on either tier
]


class Block(nn.Module):
    """Two layers in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.part = nn.Linear(32, 32), nn.Linear(4, 32, bias=False)
        self.clamps = False

    def forward(self, values: Tensor) -> Tensor:
        if self.clamps:
            self.whole.weight.data.clamp_(-0.01, 0.01)
        return values + torch.tanh(self.whole(values)) + self.part(values[..., :4])


class Training:
    """Steps of one model, all alike."""

    def __init__(self, device: int | str, host: int | str, precision: str = "bf16") -> None:
        self.precision = precision
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.blocks: Any = blocks
        self.model, self.optimizer = chunked(
            blocks, Adam(lr=1e-2), precision=precision, budget=Budget(device=device, host=host), device="emulated"
        )
        self.values = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
        self.steps = 0

    def step(self) -> None:
        self.model(self.values).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def break_off(self) -> BaseException:
        """The exception of a step whose last layer raises; it holds what the forward pass had."""

        def fail(*args: Any) -> None:
            raise ValueError("told to")

        hook = self.blocks[3].part.register_forward_hook(fail)
        try:
            self.step()
        except ValueError as error:
            return error
        finally:
            hook.remove()
        raise AssertionError("the hook raises")

    def check(self) -> None:
        """Masters are those of as many steps with room for everything."""
        roomy = Training("16MiB", "16MiB", self.precision)
        while roomy.steps < self.steps:
            roomy.step()
        for found, expected in zip(self.masters(), roomy.masters(), strict=True):
            assert torch.equal(found, expected)
        let_go(roomy.model)

    def masters(self) -> list[Tensor]:
        return list(masters_of(self.optimizer.state_dict(masters=True)).values())


def interrupted(device: int, host: int) -> tuple[Training, list[BaseException]]:
    """Train, keep the exception of a step, and try one more step, for which memory may be short then."""
    training = Training(device, host)
    for _ in range(3):
        training.step()
    kept = [training.break_off()]
    training.optimizer.zero_grad()
    with suppress(DoesNotFit):
        training.step()
    return training, kept


@pytest.mark.parametrize(("device", "host"), BUDGETS)
def test_training_goes_on_once_the_exception_is_dropped(device: int, host: int) -> None:
    training, kept = interrupted(device, host)
    kept.clear()
    gc.collect()
    training.optimizer.zero_grad()
    for _ in range(3):
        training.step()
    training.check()
    let_go(training.model)


@pytest.mark.parametrize(("device", "host"), BUDGETS)
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_model_dropped_then_gives_back_all_memory(device: int, host: int) -> None:
    training, kept = interrupted(device, host)
    store, gone = hooks_of(training.model).engine.store, weakref.ref(training.model)
    del training
    kept.clear()
    gc.collect()
    assert gone() is None
    assert store.ledger.used_bytes == [0, 0]


@pytest.mark.parametrize("block", [0, 3])
@pytest.mark.parametrize(("device", "host"), BUDGETS)
def test_a_weight_changed_in_forward_is_refused_and_restored(device: int, host: int, block: int) -> None:
    training = Training(device, host)
    for _ in range(2):
        training.step()
    training.blocks[block].clamps = True
    with pytest.raises(UnsupportedParameter, match=rf"'{block}\.whole\.weight' was changed in place"):
        training.step()
    training.blocks[block].clamps = False
    training.optimizer.zero_grad()
    training.step()
    training.check()
    let_go(training.model)


@pytest.mark.parametrize(
    ("device", "precision", "batch"), [(36000, "fp32", 16), (36000, "fp32", 32), (22000, "bf16", 32)]
)
def test_what_pytorch_keeps_of_a_backward_that_raised_is_freed(device: int, precision: str, batch: int) -> None:
    """PyTorch's queue keeps branches of the graph until the next backward pass; that pass must fit all the same."""
    training = Training(device, 70000, precision)
    for _ in range(3):
        training.step()
    with pytest.raises(DoesNotFit):
        training.model(torch.randn(batch, 32)).square().mean().backward()
    training.optimizer.zero_grad()
    left = statistics(training.model)
    for _ in range(2):
        training.step()
    assert statistics(training.model).planned_passes == left.planned_passes + 2
    training.check()
    let_go(training.model)
