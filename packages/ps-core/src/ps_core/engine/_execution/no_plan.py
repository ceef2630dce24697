"""Where one process has a pilot."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ps_core.engine._sharding.residency import ShardResidency
from ps_core.engine._support.interrupts import alone
from ps_core.engine._tracing.batch_shape import Largest, batch_of


class Unplanned:
    """Passes of a shared model follow no plan; but what rose, or is gathered early, makes way for a larger batch."""

    moments = 0
    planned_step_s = 0.0

    def __init__(self, residency: ShardResidency, *, training: bool) -> None:
        self._residency = residency
        self._largest = {trains: Largest() for trains in (True, False)}
        self._most_forwards = 0
        self.training = training

    def prepare(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The root module is called with these."""
        residency, trains = self._residency, torch.is_grad_enabled()
        residency.forwards += trains
        grows = self._largest[trains].grows(batch_of(args, kwargs)) or residency.forwards > self._most_forwards
        self._most_forwards = max(self._most_forwards, residency.forwards)
        missing_bytes = residency.store.device.short_bytes()
        if grows or missing_bytes:
            self._make_way(missing_bytes)
            residency.unknown = True

    @alone
    def _make_way(self, missing_bytes: int) -> None:
        self._residency.settle()
        self._residency.risers.sink_all(missing_bytes)
