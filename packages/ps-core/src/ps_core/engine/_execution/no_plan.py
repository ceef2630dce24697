"""Passes that follow no plan."""

from __future__ import annotations

from typing import Any

from torch import nn

from ps_core.engine._execution.on_demand import OnDemandDriver
from ps_core.engine._execution.protocols import PassDriver
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._tracing.moments import PassRecording


class NoPlanScheduler:
    """Serves every pass on demand."""

    moments = 0
    planned_step_s = 0.0
    plan = None

    def __init__(self, demand: OnDemandDriver, *, training: bool) -> None:
        self._demand = demand
        self.training = training

    def prepare(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """There is nothing to prepare."""

    def choose(self, training: bool) -> PassDriver:
        """Always the same."""
        self._demand.begin_pass(training=training)
        return self._demand

    def left(self) -> None:
        """There is no plan to leave."""

    def observe(self, recording: PassRecording) -> None:
        """Nothing is learned."""

    def consider(self) -> None:
        """There is nothing to plan."""

    def step(self, settings_of: SettingsOf, factor: float) -> bool:
        """By no plan."""
        return False
