"""The engine's rooms, as they are for one process; `_processes.driver` has those for several."""

from __future__ import annotations

from dataclasses import dataclass

from ps_core.engine._execution.on_demand import Demand
from ps_core.engine._gradients.store import GradientKeeper
from ps_core.engine._memory.store import Store
from ps_core.engine._optim.on_demand_step import Updater
from ps_core.engine._parameters.residency import Residency, Watcher
from ps_core.engine._parameters.state import GroupRecord


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
