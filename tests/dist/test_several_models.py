"""Several models of one class on the same ranks: ranks that use different ones at a time are told so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _share_cases as cases
from _crew import Crew
from _threads import Together, run
from ps_core import SGD, Budget, RanksDiverged
from ps_core.engine import chunked, materialized, release, save_checkpoint, save_weights

Managed = tuple[nn.Module, Any]
"""A model, and its optimizer."""


def made(together: Any, seed: int, device: str) -> Managed:
    model, seeded = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=seeded)
    sizes = {} if device == "cpu" else {"device": "64KiB"}
    return chunked(
        model, SGD(lr=0.1, momentum=0.9), device=device, precision="fp32", budget=Budget(host="8MiB", **sizes),
        collectives=together, accumulation_steps=1 if together else 2, max_grad_norm=0.5,
    )  # fmt: skip


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(pair: list[Managed], order: tuple[int, ...], step: int, ranks: tuple[int, ...]) -> None:
    for index in order:
        model, optimizer = pair[index]
        for rank in ranks:
            model(inputs(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train(managed: Managed, folder: Path) -> None:
    managed[0](inputs(7, 0)).square().mean().backward()


def evaluate(managed: Managed, folder: Path) -> None:
    with torch.no_grad():
        managed[0](inputs(7, 0))


def look(managed: Managed, folder: Path) -> None:
    with materialized(managed[0]):
        pass


class Wrapped:
    """A user's collectives, which cannot be weakly referenced, nor be keys of a dictionary."""

    __slots__ = ("_of",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, of: Together) -> None:
        self._of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wrapped)

    # Any: whatever the other object has.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class Referenced(Wrapped):
    """A user's collectives, which can be weakly referenced, but are no keys of a dictionary."""

    __slots__ = ("__weakref__",)


WAYS: dict[str, Callable[[Managed, Path], object]] = {
    "trains": train,
    "evaluates": evaluate,
    "state dict": lambda managed, folder: managed[0].state_dict(),
    "optimizer's state dict": lambda managed, folder: managed[1].state_dict(),
    "materialized": look,
    "weights": lambda managed, folder: save_weights(folder / "weights.safetensors", managed[0]),
    "checkpoint": lambda managed, folder: save_checkpoint(folder / "checkpoint", *managed),
}


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_take_another_one_are_told(way: str, device: str, tmp_path: Path) -> None:
    def case(each: Together) -> None:
        pair = [made(each, seed, device) for seed in (0, 1)]
        for step in range(2):
            trained(pair, (0, 1), step, (each.rank,))
        WAYS[way](pair[each.rank], tmp_path)

    with pytest.raises(RanksDiverged, match="model 2"):
        run(2, case)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("device", "wrap"),
    [("cpu", None), ("emulated", None), ("cpu", Wrapped), ("cpu", Referenced)],
)
def test_taken_alike_each_trains_as_on_one_process(device: str, wrap: Callable[[Together], Any] | None) -> None:
    def case(each: Together) -> list[dict[str, Tensor]]:
        together = each if wrap is None else wrap(each)
        pair = [made(together, seed, device) for seed in (0, 1)]
        for step in range(4):
            trained(pair, (0, 1) if step % 2 else (1, 0), step, (each.rank,))
        found = [{name: value.clone() for name, value in model.state_dict().items()} for model, _ in pair]
        for model, _ in pair:
            release(model)
        return found

    single = [made(None, seed, "cpu") for seed in (0, 1)]
    for step in range(4):
        trained(single, (0, 1), step, (0, 1))
    for found in run(2, case)[0]:
        for (model, _), values in zip(single, found, strict=True):
            assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    for model, _ in single:
        release(model)


def test_collectives_that_are_no_keys_are_told_apart() -> None:
    def case(each: Together) -> None:
        together = Referenced(each)
        pair = [made(together, seed, "cpu") for seed in (0, 1)]
        train(pair[each.rank], Path())
        pair[each.rank][1].step()

    with pytest.raises(RanksDiverged, match="model 2"):
        run(2, case)


def test_processes_that_train_in_another_order_are_told(two: Crew) -> None:
    two.run(cases.twins_in_another_order)
