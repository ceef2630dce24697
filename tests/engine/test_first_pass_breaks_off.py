"""An exception ends the very first pass: what trains without it trains after it, at the same budget, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from _cases import generator
from _models import WIDTH, Residual
from _runs import HOST, let_go, tightest
from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, load_checkpoint, save_checkpoint, statistics

ROWS, SMALL, STEPS = 128, 16, 2


class Boom(Exception):
    """What a hook raises."""


class Fuse:
    """A hook that raises once, when it is lit; also on fake tensors if told to."""

    def __init__(self, error: type[BaseException], *, also_fake: bool) -> None:
        self.error, self.also_fake, self.lit = error, also_fake, False

    def __deepcopy__(self, memo: Any) -> Fuse:
        return self  # there is one, also where a model that it hooks is copied for a fake pass

    def burn(self, module: Any, *values: Any) -> None:
        tensors = [each for value in (module, *values) for each in (value if isinstance(value, tuple) else (value,))]
        if self.lit and (self.also_fake or not any(isinstance(each, FakeTensor) for each in tensors)):
            self.lit = False
            raise self.error


class Blocks(nn.Module):
    """Residual blocks and a loss; every block is recomputed where told to."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.blocks, self.recomputed = nn.ModuleList(Residual() for _ in range(3)), recomputed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return x.float().square().mean()


Place = Callable[[Blocks, Fuse], Any]
PLACES: dict[str, Place] = {
    "forward of the first": lambda model, fuse: model.blocks[0].register_forward_hook(fuse.burn),
    "forward of the last": lambda model, fuse: model.blocks[-1].register_forward_hook(fuse.burn),
    "before the model": lambda model, fuse: model.register_forward_pre_hook(fuse.burn),
    "after the model": lambda model, fuse: model.register_forward_hook(fuse.burn),
    "backward of the last": lambda model, fuse: model.blocks[-1].register_full_backward_hook(fuse.burn),
    "backward of the first": lambda model, fuse: model.blocks[0].wide.register_full_backward_hook(fuse.burn),
    "a gradient of the last": lambda model, fuse: model.blocks[-1].wide.weight.register_hook(fuse.burn),
    "a gradient of the first": lambda model, fuse: model.blocks[0].wide.weight.register_hook(fuse.burn),
    "after a gradient": lambda model, fuse: model.blocks[1].wide.weight.register_post_accumulate_grad_hook(fuse.burn),
    "in the loss": lambda model, fuse: None,
}


def batch(index: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=generator(index))


@dataclass(frozen=True)
class Loop:
    """How a model is trained."""

    precision: str = "bf16"
    accumulate: int = 1
    recomputed: bool = False

    @contextmanager
    def made(self, size: int, place: str = "in the loss", fuse: Fuse | None = None) -> Iterator[tuple[nn.Module, Any]]:
        torch.manual_seed(0)
        model: Any = Blocks(self.recomputed)
        if fuse is not None:
            PLACES[place](model, fuse)
        told: dict[str, Any] = {"precision": self.precision, "accumulation_steps": self.accumulate}
        told |= {"budget": Budget(device=size, host=HOST), "options": Options(group_bytes=8192)}
        model, optimizer = chunked(model, AdamW(lr=1e-2), device="emulated", **told)
        try:
            yield model, optimizer
        finally:
            let_go(model)

    def train(self, model: nn.Module, optimizer: Any, rows: int = ROWS) -> list[float]:
        losses = []
        for index in range(STEPS):
            for number in range(self.accumulate):
                loss = model(batch(10 * index + number, rows))
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def undisturbed(self, size: int, rows: int = ROWS) -> list[float]:
        with self.made(size) as (model, optimizer):
            return self.train(model, optimizer, rows)

    def disturbed(self, size: int, place: str, fuse: Fuse) -> list[float]:
        with self.made(size, place, fuse) as (model, optimizer):
            break_off(model, place, fuse)
            optimizer.zero_grad()
            return self.train(model, optimizer)


def break_off(model: nn.Module, place: str, fuse: Fuse, rows: int = ROWS) -> None:
    """Begin a pass that raises, and keep nothing of it."""

    def begin() -> None:
        loss = model(batch(99, rows))
        if place == "in the loss":
            fuse.burn(None)
        loss.backward()

    fuse.lit = True
    with pytest.raises(fuse.error):
        begin()
    assert not fuse.lit


LOOPS = [
    Loop("fp32"),
    pytest.param(Loop("bf16"), marks=pytest.mark.soak),
    Loop("fp32", accumulate=2, recomputed=True),
    Loop("bf16", accumulate=2),
    pytest.param(Loop("bf16", recomputed=True), marks=pytest.mark.soak),
]


@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_what_fits_without_an_exception_fits_after_it(loop: Loop) -> None:
    """Wherever it comes from, whether fake tensors met it too, and whatever it is, at the tightest budget and above."""
    size, expected = tightest(loop.undisturbed, rounds=5)
    larger = size + size // 8
    assert loop.undisturbed(larger) == expected
    for index, place in enumerate(PLACES):
        assert loop.disturbed(size, place, Fuse(Boom, also_fake=False)) == expected, place
        fuse = Fuse(KeyboardInterrupt, also_fake=index % 2 == 0)
        assert loop.disturbed(larger if index % 3 else size, place, fuse) == expected, place


@pytest.mark.parametrize("place", ["forward of the last", "a gradient of the last"])
def test_after_what_was_loaded_too(place: str, tmp_path: Path) -> None:
    loop = Loop()
    with loop.made(2**24) as (model, optimizer):
        loop.train(model, optimizer)
        save_checkpoint(tmp_path / "saved", model, optimizer)

    def attempt(size: int, fuse: Fuse | None = None) -> list[float]:
        with loop.made(size, place, fuse) as (model, optimizer):
            load_checkpoint(tmp_path / "saved", model, optimizer)
            if fuse is not None:
                break_off(model, place, fuse)
                optimizer.zero_grad()
            return loop.train(model, optimizer)

    size, expected = tightest(attempt, rounds=5)
    assert attempt(size, Fuse(Boom, also_fake=False)) == expected


def test_after_the_first_evaluation_and_after_a_larger_batch() -> None:
    """Evaluation needs no more than training; the larger batch breaks off where it does not fit at all."""
    loop, place = Loop(), "forward of the last"
    size, expected = tightest(loop.undisturbed, rounds=5)
    fuse = Fuse(Boom, also_fake=False)
    with loop.made(size, place, fuse) as (model, optimizer):
        with torch.no_grad():
            break_off(model, place, fuse)
        assert loop.train(model, optimizer) == expected
    with loop.made(size) as (model, optimizer):
        assert loop.train(model, optimizer) == expected
        with pytest.raises(DoesNotFit):
            model(batch(0, 4 * ROWS)).backward()
        optimizer.zero_grad()
        again = loop.train(model, optimizer)
    with loop.made(2**24) as (model, optimizer):
        assert loop.train(model, optimizer) == expected
        assert loop.train(model, optimizer) == again


def test_a_smaller_batch_fits_where_it_would_have_as_the_first() -> None:
    """Also in words: what a refusal says is of the batch that it refuses."""
    loop = Loop()
    size, expected = tightest(lambda size: loop.undisturbed(size, SMALL), rounds=5)
    with loop.made(size) as (model, optimizer):
        with pytest.raises(DoesNotFit):
            model(batch(0)).backward()
        optimizer.zero_grad()
        assert loop.train(model, optimizer, SMALL) == expected
    with loop.made(size - 4096) as (model, optimizer):
        with pytest.raises(DoesNotFit):
            model(batch(0)).backward()
        optimizer.zero_grad()
        with pytest.raises(DoesNotFit) as later:
            loop.train(model, optimizer, SMALL)
    with pytest.raises(DoesNotFit) as alone:
        loop.undisturbed(size - 4096, SMALL)
    assert str(later.value) == str(alone.value)


def test_an_exception_that_is_kept_is_named_where_it_takes_the_room() -> None:
    loop, place = Loop(), "forward of the last"
    size, expected = tightest(loop.undisturbed, rounds=5)
    fuse = Fuse(Boom, also_fake=False)
    with loop.made(size, place, fuse) as (model, optimizer):
        fuse.lit = True
        with pytest.raises(Boom) as kept:
            model(batch(99))
        with pytest.raises(DoesNotFit, match="drop the exception that ended the pass before"):
            model(batch(0)).backward()
        del kept
        optimizer.zero_grad()
        assert loop.train(model, optimizer) == expected


def test_a_plan_is_made_of_the_first_evaluation_that_does_not_break_off() -> None:
    """A part of one was planned, and every evaluation after it left that plan."""
    budget, options = Budget(device=2**15, host=HOST), Options(group_bytes=2**13)
    model, fuse = Blocks(recomputed=False), Fuse(Boom, also_fake=False)
    PLACES["forward of the last"](model, fuse)
    model, _ = chunked(model, None, device="emulated", budget=budget, precision="bf16", options=options)
    fuse.lit = True
    with torch.no_grad():
        with pytest.raises(Boom):
            model(batch(0, SMALL))
        for _ in range(3):
            model(batch(0, SMALL))
    told = statistics(model)
    assert (told.planned_passes, told.divergences) == (2, 0), told.last_divergence
