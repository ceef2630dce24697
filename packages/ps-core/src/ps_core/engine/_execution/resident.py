"""Where everything fits on one tier nothing moves: no moments, only a look at the tide of the first pass."""

from __future__ import annotations

import torch

from ps_core.engine._parameters.state import ParamGroup, ParamState


class ResidentDriver:
    """The driver of an engine with one tier."""

    def __init__(self, *, tracked: bool) -> None:
        self.tracked = tracked

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """Everything is there already."""

    def take(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Gradients go where they go by themselves."""
        return False

    def finish(self) -> None:
        """Everything stays."""
