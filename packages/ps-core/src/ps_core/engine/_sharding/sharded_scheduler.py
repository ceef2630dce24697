"""Passes of a model that several ranks share: they follow a schedule of collectives, and no plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ps_core.engine._execution.passes_without_plan import NoPlanScheduler
from ps_core.engine._sharding.sharded_driver import ShardedDriver
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._support.interrupts import defer_interrupts_installing
from ps_core.engine._tracing.batch_shape import LargestBatch, batch_of


class ShardedScheduler(NoPlanScheduler):
    """Frees promoted shards, and gathers nothing early, before a larger batch."""

    def __init__(self, residency: ShardedResidency, driver: ShardedDriver, *, training: bool) -> None:
        super().__init__(driver, training=training)
        self._residency, self._driver = residency, driver
        self._largest = {trains: LargestBatch() for trains in (True, False)}
        self._most_forwards = 0

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the batch that the root module is called with, and make room if it is larger than before."""
        residency, trains = self._residency, torch.is_grad_enabled()
        forwards = residency.note_forward(trains=trains)
        grows = self._largest[trains].grows(batch_of(args, kwargs)) or forwards > self._most_forwards
        self._most_forwards = max(self._most_forwards, forwards)
        missing_bytes = residency.store.device.take_failed_bytes()
        if grows or missing_bytes:
            self._make_way(missing_bytes)
            residency.note_larger_batch()

    def forget_plan(self) -> None:
        """Forget the order of collectives: groups are about to change."""
        self._driver.forget_groups()

    @defer_interrupts_installing
    def _make_way(self, missing_bytes: int) -> None:
        self._driver.make_way(missing_bytes)
