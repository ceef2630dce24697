"""Make the components of an engine for one process; `_sharding.sharded_step` makes those for several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ps_core.engine._execution.on_demand_driver import OnDemandDriver
from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._memory.transfer_observer import TransferObserver
from ps_core.engine._optim.on_demand_step import OnDemandStepper
from ps_core.engine._optim.speculative_steps import SpeculativeSteps
from ps_core.engine._optim.step_in_backward import StepInBackward
from ps_core.engine._parameters.param_state import ParamGroup
from ps_core.engine._parameters.residency import Residency


class Ranks(Protocol):
    """Protocol of the processes that share a model, as the whole engine uses them."""

    @property
    def rank(self) -> int:
        """Return this process's shard number."""

    @property
    def ranks(self) -> int:
        """Return the number of shards."""

    @property
    def copy(self) -> int:
        """Return the number of this process's copy of the model, from 0."""

    @property
    def process(self) -> int:
        """Return this process's number among all processes, copies of the model included."""

    @property
    def processes(self) -> int:
        """Return the number of all processes, copies of the model included."""

    def all_values(self, values: Sequence[float], what: str = "", *, shards_only: bool = False) -> list[list[float]]:
        """Return every process's values, a row each; ``shards_only``: of those that share one copy of the model."""

    def agree(self, name: str, value: str) -> None:
        """Raise unless every process gives the same value."""


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of an engine that work on groups."""

    residency: Residency
    gradients: GradientStore
    updater: OnDemandStepper
    demand: OnDemandDriver
    stepping: StepInBackward = field(default_factory=StepInBackward)
    speculation: SpeculativeSteps | None = None
    """Steps groups during backward before clipping is decided, and undoes it; None: without that option."""


def single_process_components(
    store: TierStore, groups: list[ParamGroup], watcher: TransferObserver, *, overwrites: bool
) -> Components:
    """Return the engine's components for a process that has all of the model."""
    residency = Residency(store, groups, watcher)
    gradients = GradientStore(residency, overwrites=overwrites)
    return Components(
        residency, gradients, OnDemandStepper(residency, gradients, groups), OnDemandDriver(residency, gradients)
    )
