"""Several models that keep to one Budget: each has a part of every tier, by the bytes of its model data.

Parts are cut anew when a model joins; then those that are there already are made smaller, between their passes. A model
that was released or forgotten leaves its part to whoever joins next.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Self

from torch import nn

from ps_core._errors import DoesNotFit, InvalidInput
from ps_core._options import Budget
from ps_core._plan import Tier
from ps_core._program import Precision
from ps_core.engine._execution.engine import Engine
from ps_core.engine._resizing import resize


@dataclass(frozen=True, slots=True)
class Share:
    """One model's; keeps nothing alive."""

    name: str
    data_bytes: int
    engine: weakref.ref[Engine]

    def owner(self) -> Engine | None:
        """The engine, while it keeps to the budget."""
        found = self.engine()
        return None if found is None or found.released else found


_SHARES: dict[int, list[Share]] = {}
"""By the identity of a budget, for as long as that lives: copies of it, and equal ones, are others."""


def _shares(budget: Budget) -> list[Share]:
    if id(budget) not in _SHARES:
        _SHARES[id(budget)] = []
        weakref.finalize(budget, _SHARES.pop, id(budget), None).atexit = False
    return _SHARES[id(budget)]


class Sharing:
    """A model on its way into a budget."""

    def __init__(self, budget: Budget, name: str, data_bytes: int, whole: tuple[Tier, ...], *, alone: bool) -> None:
        """``alone``: one process has the model."""
        self._shares = _shares(budget)
        self._shares[:] = [share for share in self._shares if share.owner() is not None]
        self._others = [(share, engine) for share in self._shares if (engine := share.owner()) is not None]
        self._name, self._data_bytes, self._alone = name, data_bytes, alone
        sizes = {tier.name: tier.capacity_bytes for _, engine in self._others for tier in engine.store.whole}
        self.whole = tuple(Tier(tier.name, sizes.get(tier.name, tier.capacity_bytes)) for tier in whole)
        """What is free, where no size was given, was counted when the first model came."""
        self._before: list[tuple[Engine, tuple[Tier, ...]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Where the new model does not come after all, the others get back what they had."""
        if error is not None:
            while self._before:
                resize(*self._before.pop())

    def begin(self) -> tuple[Tier, ...]:
        """The new model's tiers; the others have theirs already when this returns."""
        if not self._others:
            return self.whole
        if not self._alone or any(engine.together is not None for _, engine in self._others):
            raise InvalidInput(
                f"{self._name} cannot share a Budget where several processes share a model: give each model a budget "
                "of its own, as in first, second = budget.split(3, 1)"
            )
        for share, engine in self._others:
            before = engine.store.tiers
            self._resize(engine, share)
            self._before.append((engine, before))
        return self._part(self.whole, self._data_bytes)

    def _resize(self, engine: Engine, share: Share) -> None:
        try:
            resize(engine, self._part(engine.store.whole, share.data_bytes))
        except DoesNotFit as error:
            error.add_note(
                f"{share.name} would share its Budget with {self._name}, by the bytes of their model data; to cut it "
                "otherwise, give each a budget of its own: first, second = budget.split(3, 1)"
            )
            raise

    def _part(self, whole: tuple[Tier, ...], data_bytes: int) -> tuple[Tier, ...]:
        return tuple(Tier(tier.name, tier.capacity_bytes * data_bytes // self._all(tier.name) & -128) for tier in whole)

    def _all(self, name: str) -> int:
        """Bytes of all that have a part of a tier."""
        sizes = [(share.data_bytes, engine.store.whole) for share, engine in self._others]
        return sum(size for size, whole in (*sizes, (self._data_bytes, self.whole)) if name in {t.name for t in whole})

    def join(self, engine: Engine) -> None:
        """It has come."""
        self._shares.append(Share(self._name, self._data_bytes, weakref.ref(engine)))


def data_bytes(model: nn.Module, precision: Precision, *, training: bool, accumulates: bool) -> int:
    """Of parameters and optimizer states."""
    weight = 4 if precision is Precision.FP32 else 2
    states = (8 if weight == 4 else 12) + (4 if accumulates or weight == 4 else 0)
    return sum(
        parameter.numel() * (weight + (states if training and parameter.requires_grad else 0))
        for parameter in model.parameters()
    )
