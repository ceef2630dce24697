"""Passes of a model that several ranks share: they follow a schedule of collectives, and no plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ps_core.engine._execution.no_plan import Unguided
from ps_core.engine._execution.on_demand import Demand
from ps_core.engine._sharding.residency import ShardResidency
from ps_core.engine._support.interrupts import alone
from ps_core.engine._tracing.batch_shape import Largest, batch_of


class Unplanned(Unguided):
    """Frees promoted shards, and gathers nothing early, before a larger batch."""

    def __init__(self, residency: ShardResidency, demand: Demand, *, training: bool) -> None:
        super().__init__(demand, training=training)
        self._residency = residency
        self._largest = {trains: Largest() for trains in (True, False)}
        self._most_forwards = 0

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
