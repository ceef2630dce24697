"""Drive passes without a plan: on demand, or without any move where everything fits on one tier."""

from __future__ import annotations

import torch

from ps_core.engine._parameters.param_state import ParamGroup, ParamState


class ResidentDriver:
    """Drive the passes of an engine with one tier: only the first pass's peak is measured."""

    follows_plan = True
    for_rest = None

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
