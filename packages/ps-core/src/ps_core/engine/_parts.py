"""The engine's rooms, as they are for one process; `_processes.driver` has those for several."""

from __future__ import annotations

from dataclasses import dataclass

from ps_core.engine._demand import Demand
from ps_core.engine._gradients import GradientKeeper
from ps_core.engine._records import GroupRecord
from ps_core.engine._residency import Residency, Watcher
from ps_core.engine._store import Store
from ps_core.engine._update import Updater


@dataclass(frozen=True, slots=True)
class Parts:
    """What works on groups."""

    residency: Residency
    gradients: GradientKeeper
    updater: Updater
    demand: Demand


def whole(store: Store, groups: list[GroupRecord], watcher: Watcher, *, overwrites: bool) -> Parts:
    """For a process that has all of the model."""
    residency = Residency(store, groups, watcher)
    gradients = GradientKeeper(residency, overwrites=overwrites)
    return Parts(residency, gradients, Updater(residency, gradients, groups), Demand(residency, gradients))
