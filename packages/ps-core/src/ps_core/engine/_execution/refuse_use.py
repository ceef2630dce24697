"""Refuse uses that a managed model does not permit now: after its release, or with substituted values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from ps_core._errors import InvalidInput
from ps_core.engine._memory.tier_store import TierStore


class Usability:
    """Track what one model may not be used for now, and why."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self.released = False
        """True after `release`: the engine may not be used any more."""
        self.materializing = False
        """True while parameters are ordinary ones (`materialized`); nothing may be trained."""
        self.averaged = False
        """True while averages are in the weights' place (`WeightAverage.applied`); no step may be taken."""
        self.half_loaded = ""
        """The load that failed after replacing some values; nothing may be trained until a load succeeds."""
        self.refuses = False
        """True if `check` raises; read at every use of a parameter."""
        if store.stays_with_process:
            _REFUSED_IN_FORKS.add(self)

    def mark_materialized(self, *, on: bool) -> None:
        """Refuse to train while parameters are ordinary ones, or allow it again."""
        self.materializing = on
        self._update()

    def mark_averaged(self, *, on: bool) -> None:
        """Refuse steps while averages are in the weights' place, or allow steps again."""
        self.averaged = on

    def mark_half_loaded(self, what: str) -> None:
        """Refuse to train while ``what`` replaces values, or after it failed; an empty text: it is done."""
        self.half_loaded = what
        self._update()

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Mark the model as half loaded by ``what`` within the block; after an error it stays so.

        Within another load, or after another one failed, the model is as before when the block ends.
        """
        self.check_kept()
        self.check_not_averaged("load")
        before = self.half_loaded
        self.mark_half_loaded(what)
        yield
        self.mark_half_loaded("" if before == what else before)

    def mark_released(self) -> None:
        """Refuse every use from now on."""
        self.released = True
        self._update()

    def _update(self) -> None:
        self.refuses = self.released or self.materializing or bool(self.half_loaded) or self._store.forked

    @staticmethod
    def refuse_in_fork() -> None:
        """Refuse, in a forked process, the models whose tiers have no copy of their own there."""
        for each in _REFUSED_IN_FORKS:
            each._update()

    def check(self, *, loading: bool = False) -> None:
        """Raise if training is not allowed; ``loading``: all values are about to be replaced."""
        self._store.check_process()
        self.check_kept()
        if self.materializing:
            raise InvalidInput("inside materialized(model) parameters are copies: train after the block")
        if self.half_loaded and not loading:
            raise InvalidInput(
                f"{self.half_loaded} failed half way, so that parameters are a mixture of old and new: load a sound one"
            )

    def check_not_materialized(self, what: str) -> None:
        """Raise inside a block of `materialized`, at whose end parameters are managed again."""
        if self.materializing:
            raise InvalidInput(
                f"{what} inside a block of materialized(...): call it after the block; for more parameters, or for "
                "changes that are to be kept, give names= and write=True to the one block"
            )

    def check_kept(self) -> None:
        """Raise if the model was released."""
        if self.released:
            raise InvalidInput("this model was released: call chunked(...) again, and use the optimizer it returns")

    def check_not_averaged(self, what: str) -> None:
        """Raise inside the block of `WeightAverage.applied`, at whose end masters and averages are exchanged again."""
        if self.averaged:
            raise InvalidInput(f"inside applied() the model has averages for weights: {what} after the block")


_REFUSED_IN_FORKS: WeakSet[Usability] = WeakSet()
os.register_at_fork(after_in_child=Usability.refuse_in_fork)
