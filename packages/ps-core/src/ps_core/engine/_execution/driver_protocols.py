"""Define the protocols of pass drivers and of the scheduler that chooses among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from ps_core._plan import Plan
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._tracing.pass_recording import PassRecording

DriverForRest: TypeAlias = "Callable[[bool, bool], PassDriver]"
"""A function that chooses the driver for the rest of a pass: is it with gradients, and does backward begin?"""


class PassDriver(Protocol):
    """Fetch groups to the compute tier during a pass."""

    tracked: bool
    """True if non-model bytes have to be counted meanwhile."""
    follows_plan: bool
    """True if the pass began by a plan, or takes part in a plan's collectives."""

    @property
    def for_rest(self) -> DriverForRest | None:
        """Return what to call when the root module's forward, or backward, begins in the pass; None: nothing."""

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """Begin a moment that reads these parameters, and receives gradients of these groups."""

    def place_gradient(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Put a gradient where the driver has reserved memory for it; return False if it has none."""

    def free_optional_bytes(self, needed_bytes: int) -> int:
        """Free so many bytes of the compute tier that no moment needs; return how many were freed."""

    def finish(self) -> None:
        """End the pass."""


class Hooks(Protocol):
    """Install the engine's hooks on its model."""

    @property
    def name(self) -> str:
        """Return the name of the model's class, for messages."""

    @property
    def has_compiled_blocks(self) -> bool:
        """Return True if ``torch.compile`` compiled a part of the model."""

    @property
    def shared(self) -> tuple[object, ...]:
        """Return the objects that a fake copy of the model shares with it."""

    def train_unfrozen(self) -> None:
        """Begin to train the parameters that were unfrozen since the last pass."""

    def install(self) -> None:
        """Install every hook on the model."""

    def remove(self) -> None:
        """Remove every hook from the model, if there is any."""


class Scheduler(Protocol):
    """Choose the driver of each pass, and make plans."""

    @property
    def training(self) -> bool:
        """Return True if there is an optimizer."""

    @property
    def moments(self) -> int:
        """Return how many moments the planned pass has; 0 without a plan."""

    @property
    def planned_step_s(self) -> float:
        """Return the predicted seconds of a step; 0 without a plan."""

    @property
    def plan(self) -> Plan | None:
        """Return the plan in force."""

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at the root module's arguments before its call."""

    def before_part(self) -> None:
        """Look at the present call of a part of the model, which the root module did not make."""

    def driver_for_pass(self, training: bool, *, backward: bool) -> PassDriver:
        """Choose the driver of the pass that begins now; ``backward``: it begins with a backward pass."""

    def forget_plan(self) -> None:
        """Drop the plan, because the model's groups change; called between passes."""

    def plan_abandoned(self, *, needs_more: bool) -> None:
        """Note that the pass left its plan: home slots may be elsewhere now.

        ``needs_more``: the rest of the pass takes more memory than was planned.
        """

    def observe(self, recording: PassRecording) -> None:
        """Record a pass that was observed, or that broke off."""

    def maybe_replan(self) -> None:
        """Make a plan if a recorded pass needs one; called before a step changes anything."""

    def step(self, settings_of: SettingsOf, factor: float) -> bool:
        """Carry out a step by the plan; return False, with nothing done, if the plan does not fit it."""
