"""Decides who drives a pass: a plan where there is one for it, demand otherwise."""

from __future__ import annotations

from typing import Any

from torch import nn

from ps_core._options import Options
from ps_core._program import Precision
from ps_core.engine._engine import Engine


class Pilot:
    def __init__(
        self,
        engine: Engine,
        *,
        model_name: str,
        precision: Precision,
        accumulate: int,
        training: bool,
        options: Options,
    ) -> None:
        self.engine = engine
        self.moments = 0
        self.planned_step_s = 0.0

    def prepare(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        pass
