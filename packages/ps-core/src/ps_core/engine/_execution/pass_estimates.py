"""Estimate a pass from fake tensors before it runs, where the model allows that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ps_core.engine._execution.engine import Engine
from ps_core.engine._support.log import say_if_debugging
from ps_core.engine._tracing.first_pass import NotForeseen, ReturnsNoLoss, estimate_first_pass
from ps_core.engine._tracing.pass_recording import PassRecording


class PassEstimates:
    """Estimate passes of one engine's model."""

    def __init__(self, engine: Engine, model_name: str, cast: torch.dtype | None, say: Callable[[str], None]) -> None:
        """Make the estimates; ``cast``: the type of inputs; ``say`` logs a line about the model."""
        self._engine, self._model_name, self._cast, self._say = engine, model_name, cast, say

    @property
    def possible(self) -> bool:
        """Return False if blocks are compiled: their moments are only known once they have run."""
        return not self._engine.management.has_compiled_blocks

    def estimate(self, module: nn.Module, args: Any, kwargs: Any) -> PassRecording | None:
        """Return the pass as fake tensors foresee it; None: they cannot."""
        engine = self._engine
        say_if_debugging(f"{self._model_name}: tracing the pass with fake tensors")
        try:
            return estimate_first_pass(
                module, args, kwargs, records=engine.records, cast=self._cast, shared=engine.management.shared
            )
        except NotForeseen as why:
            text = f"no trace was possible ({why}): this pass runs on demand and is recorded"
            if isinstance(why, ReturnsNoLoss):
                say_if_debugging(f"{self._model_name}: {text}")
            else:
                self._say(text)
        return None
