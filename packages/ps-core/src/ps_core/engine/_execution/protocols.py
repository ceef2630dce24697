"""What drives a pass, and what decides who does."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from ps_core._plan import Plan
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._parameters.state import ParamGroup, ParamState
from ps_core.engine._tracing.moments import PassRecording


class PassDriver(Protocol):
    """What brings groups to the compute tier during a pass."""

    tracked: bool
    """Whether the tide has to be watched meanwhile."""

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """The next moment needs these parameters, and brings gradients of these groups."""

    def place_gradient(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Put a gradient where the driver has room for it; False: it has none."""

    def finish(self) -> None:
        """The pass is over."""


class Hooks(Protocol):
    """What the engine hangs onto its model."""

    @property
    def name(self) -> str:
        """The class of the model, for messages."""

    @property
    def has_compiled_blocks(self) -> bool:
        """Whether ``torch.compile`` made a part of the model one piece."""

    def install(self) -> None:
        """Hang everything on the model."""

    def remove(self) -> None:
        """Take everything off the model, if anything is on."""


class Scheduler(Protocol):
    """Decides who drives a pass."""

    @property
    def training(self) -> bool:
        """Whether there is an optimizer."""

    @property
    def moments(self) -> int:
        """Moments of the planned pass; 0 without a plan."""

    @property
    def planned_step_s(self) -> float:
        """The predicted time of a step; 0 without a plan."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Hear that the root module is called with these arguments."""

    def driver_for_pass(self, training: bool) -> PassDriver:
        """Who drives the pass that begins now."""

    def plan_abandoned(self) -> None:
        """The plan that was followed was left amid the pass; homes may be elsewhere now."""

    def observe(self, recording: PassRecording) -> None:
        """A pass ran to its end."""

    def maybe_replan(self) -> None:
        """A step is asked for, and nothing is changed yet: time to plan."""

    def step(self, settings_of: SettingsOf, factor: float) -> bool:
        """Carry out a step by a plan, if there is one for it."""
