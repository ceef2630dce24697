"""Drive passes without a plan: on demand, or without any move where everything fits on one tier."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ps_core.engine._execution.driver_protocols import PassDriver
from ps_core.engine._execution.on_demand_driver import OnDemandDriver
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._tracing.pass_recording import PassRecording


class ResidentDriver:
    """Drive the passes of an engine with one tier: only the first pass's peak is measured."""

    follows_plan = True

    def __init__(self, *, tracked: bool) -> None:
        self.tracked = tracked

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """Do nothing: everything is there already."""

    def place_gradient(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Return False: the caller stores the gradient."""
        return False

    def free_optional_bytes(self, needed_bytes: int) -> int:
        """Return 0: everything stays."""
        return 0

    def finish(self) -> None:
        """Do nothing: everything stays."""


class NoPlanScheduler:
    """Choose the same driver for every pass, and make no plan."""

    moments = 0
    planned_step_s = 0.0
    plan = None

    def __init__(self, demand: OnDemandDriver, *, training: bool) -> None:
        self._demand = demand
        self.training = training

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Do nothing: there is nothing to prepare."""

    def driver_for_pass(self, training: bool, *, backward: bool) -> PassDriver:
        """Return the on-demand driver."""
        if not backward:
            self._demand.begin_pass(training=training)
        return self._demand

    def forget_plan(self) -> None:
        """Do nothing: there is no plan."""

    def plan_abandoned(self) -> None:
        """Do nothing: there is no plan to leave."""

    def observe(self, recording: PassRecording) -> None:
        """Do nothing: nothing is learned."""

    def maybe_replan(self) -> None:
        """Do nothing: there is nothing to plan."""

    def step(self, settings_of: SettingsOf, factor: float) -> bool:
        """Return False: no step follows a plan."""
        return False
