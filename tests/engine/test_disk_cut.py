"""The disk tier's file is cut short while a model trains: `TierFailure` or the right bits, never zeros in silence."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import _models as models
from _cases import finish, next_token, tokens
from _reference import GROUP_BYTES, SEED
from checked_device.device import CheckedDevice
from ps_core import AdamW, Budget, Options, TierFailure
from ps_core.engine import chunked, release
from ps_core.engine._devices.cpu.device import CpuDevice

STEPS, TRIES = 5, 5
DEVICES: dict[str, tuple[int | None, int, dict[str, Any]]] = {
    "cpu": (None, 100_000, {}),
    "cpu, host thread": (None, 100_000, {"check": True, "seed": 3}),
    "emulated": (130_000, 40_000, {}),
    "emulated, host thread": (130_000, 40_000, {"check": True, "seed": 3}),
}
"""Budgets of the compute tier and the host; the disk's streams on threads of their own, or not."""


class Cutter:
    """Stands in for `os.preadv` and `os.pwritev`; at one call of all, the file is cut short.

    ``grown``: whoever cut the file made it as long again, so that it has a hole.
    """

    def __init__(self, patch: pytest.MonkeyPatch, at: int, part: float, *, grown: bool = False) -> None:
        self.at, self.part, self.grown = at, part, grown
        self.calls, self.done = 0, False
        self._real = {"preadv": os.preadv, "pwritev": os.pwritev}
        for name in self._real:
            patch.setattr(os, name, self._standing_in(name))

    def _standing_in(self, name: str) -> Any:
        def call(file: int, buffers: Any, offset: int) -> int:
            if buffers[0].__class__.__name__.startswith("c_char"):  # not a checkpoint's
                self.calls += 1
                if self.calls == self.at:
                    self.cut(file)
            return self._real[name](file, buffers, offset)

        return call

    def cut(self, file: int) -> None:
        size = os.fstat(file).st_size
        os.truncate(f"/proc/self/fd/{file}", int(size * self.part))
        if self.grown:
            os.truncate(f"/proc/self/fd/{file}", size)
        self.done = True


def made(where: str, directory: Path) -> tuple[Any, Any]:
    device_bytes, host, checks = DEVICES[where]
    torch.manual_seed(SEED)
    return chunked(
        models.Language(),
        AdamW(lr=1e-2, weight_decay=0.1),
        device=(CheckedDevice if checks else CpuDevice)(name=where.partition(",")[0], **checks),
        budget=Budget(device=device_bytes, host=host, disk="64MiB", disk_dir=str(directory)),
        precision="bf16",
        options=Options(group_bytes=GROUP_BYTES),
    )


@contextmanager
def language(where: str, directory: Path) -> Iterator[tuple[Any, Any]]:
    model, optimizer = made(where, directory)
    try:
        yield model, optimizer
    finally:
        with suppress(TierFailure):  # weights may be lost with the file
            release(model)


def step(model: Any, optimizer: Any, index: int) -> Tensor:
    loss = next_token(model, *tokens(index))
    loss.backward()
    finish(optimizer)
    return loss.detach()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@dataclass
class Right:
    """What the same training gives if nobody cuts the file."""

    losses: list[Tensor]
    weights: list[dict[str, Tensor]]
    """Before the first step, and after each."""
    calls: int
    """How often the file was read or written."""


@pytest.fixture(scope="module")
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Right:
    directory = tmp_path_factory.mktemp("disk")
    with language(request.param, directory) as (model, optimizer), pytest.MonkeyPatch.context() as patch:
        cutter, found = Cutter(patch, 0, 0.0), Right([], [weights(model)], 0)
        for index in range(STEPS):
            found.losses.append(step(model, optimizer, index))
            found.weights.append(weights(model))
        found.calls = cutter.calls
    assert found.calls > 100
    return found


def outcome(where: str, right: Right, cut: Callable[[pytest.MonkeyPatch], Cutter], directory: Path) -> str:
    """Train while the file is cut; afterwards look at the weights, if they are still to be had."""
    with language(where, directory) as (model, optimizer), pytest.MonkeyPatch.context() as patch:
        cutter = cut(patch)
        for index in range(STEPS):
            try:
                loss = step(model, optimizer, index)
                found = weights(model)
            except TierFailure as error:
                told = str(error)
                break
            assert torch.equal(loss, right.losses[index]), f"a wrong loss in step {index}"
            assert same(found, right.weights[index + 1]), f"wrong weights after step {index}"
        else:
            return "right"
        assert cutter.done
        assert re.search(r"patrickstar-\w+\.tier: after .* bytes at byte [\d,]+ the file has", told), told
        with suppress(TierFailure):
            found = weights(model)
            for name, value in found.items():
                before, after = (each[name] for each in right.weights[index : index + 2])
                assert torch.equal(value, before) or torch.equal(value, after), f"{name} is wrong after the failure"
            return "failed, weights are there"
        return "failed"


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("grown", [False, True], ids=["cut", "cut and grown"])
@pytest.mark.parametrize(("where", "right"), [(each, each) for each in DEVICES], ids=DEVICES, indirect=["right"])
def test_never_zeros_in_silence(where: str, right: Right, grown: bool, tmp_path: Path) -> None:
    choice, outcomes = random.Random(f"{where} {grown}"), []
    for _ in range(TRIES):
        at, part = choice.randint(1, right.calls), choice.choice([0.0, choice.random(), choice.random(), 0.97])
        outcomes.append(outcome(where, right, partial(Cutter, at=at, part=part, grown=grown), tmp_path))
    assert any("failed" in each for each in outcomes)
