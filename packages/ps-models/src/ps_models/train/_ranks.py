"""Connect the ranks that train one model under ``torchrun``; without it, this process is the only one.

[Note: parts]
``--batch`` counts the sequences of all processes. Process i of p takes the i-th p-th of each micro-batch. It also
divides its losses by p, since gradients and losses are summed over processes. So p processes get the same result as one
process that takes the same parts one after the other. (That has ``--batch`` a p-th, ``--accumulate`` p times as much.)
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import fields, replace
from typing import Any

from ps_core._errors import InvalidInput
from ps_models.train._objectives import Batch, Objective
from ps_models.train._options import PLACE, TrainOptions, flag_of
from ps_models.train._stop_signal import StopSignal

_OWN = frozenset({"data", "eval_data", "log_every"})
"""Options that may differ between ranks, besides those that say where they run; the data's digest is compared."""


class TrainingRanks:
    """This rank among all. As a context manager it leaves the group at the end."""

    def __init__(self, together: Any = None) -> None:
        """Begin; ``together``: `ps_dist.TorchCollectives` (any: ps-dist may not be installed); None: a single
        process.
        """
        self.together = together
        self.rank: int = 0 if together is None else together.mesh.rank
        self.size: int = 1 if together is None else together.mesh.size

    def __enter__(self) -> TrainingRanks:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.together is not None:
            self.together.__exit__(*raised)

    @property
    def leads(self) -> bool:
        """Return True on the rank that writes files and reports."""
        return self.rank == 0

    def check(self, options: TrainOptions, digest: str) -> None:
        """Raise `InvalidInput` unless the ranks can share a batch, `RanksDiverged` unless all have the same options."""
        if options.batch % self.size:
            raise InvalidInput(
                f"--batch: found {options.batch}, which {self.size} processes share; allowed is a multiple of "
                f"{self.size}"
            )
        if options.step_speculative and self.size > 1:
            raise InvalidInput(f"--step-speculative: found with {self.size} processes; allowed with one")
        for row in fields(options):
            if row.metadata["section"] != PLACE and row.name not in _OWN:
                self.agree(flag_of(row), getattr(options, row.name))
        self.agree("--data (the digest of what is in it)", digest)

    def agree(self, name: str, value: object) -> None:
        """Raise `RanksDiverged` unless every rank has the same value."""
        if self.together is not None:
            self.together.agree(name, str(value))

    def own(self, options: TrainOptions) -> TrainOptions:
        """Return the options with this rank's part of a batch."""
        return replace(options, batch=options.batch // self.size)

    def total(self, value: float) -> float:
        """Return the sum over ranks, in rank order."""
        found: float = value if self.together is None else self.together.all_reduce_sum(value)
        return found

    def any(self, value: bool) -> bool:
        """Return True if ``value`` is true on any rank."""
        return self.total(float(value)) > 0

    def first(self, value: bool) -> bool:
        """Return the value of rank 0."""
        return self.any(value and self.leads)

    def share(self, objective: Objective) -> list[tuple[Batch, int]]:
        """Return this rank's part of each batch for validation, and its weight.

        Every rank has at least one sequence to run, whose weight may be zero.
        """
        found = []
        for batch in objective.validation:
            count = len(batch["input_ids"])
            start, end = (count * place // self.size for place in (self.rank, self.rank + 1))
            part = slice(start, end) if end > start else slice(0, 1)
            mine = {name: each[part] for name, each in batch.items()}
            found.append((mine, objective.counted_in(mine) if end > start else 0))
        return found


def join_ranks() -> TrainingRanks:
    """Join the ranks that ``torchrun`` started, if it did."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return TrainingRanks()
    if importlib.util.find_spec("ps_dist") is None:
        raise InvalidInput(
            "WORLD_SIZE: found several processes, and the package ps-dist is not installed; allowed without it is one"
        )
    return TrainingRanks(importlib.import_module("ps_dist").connect())


class StopCheck:
    """Tell all ranks alike whether to stop after this step; all call this at the same place."""

    def __init__(self, stop: StopSignal, ranks: TrainingRanks) -> None:
        self._stop, self._ranks = stop, ranks
        self.by: str | None = None
        """The signal's name."""

    def __call__(self) -> bool:
        if self.by is None and self._ranks.any(self._stop.asked is not None):
            self.by = self._stop.asked or "a signal to another process"
        return self.by is not None
