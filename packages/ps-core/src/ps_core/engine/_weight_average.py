"""Average a managed model's weights over training steps, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec

import torch
from torch import nn

from ps_core._errors import InvalidInput
from ps_core._extents import Kind
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._support.interrupts import defer_interrupts_installing

P = ParamSpec("P")


def _outside_of_inference_mode(function: Callable[P, None]) -> Callable[P, None]:
    """Leave inference mode for a call: later updates write to the averages that it makes."""
    return torch.inference_mode(mode=False)(torch.no_grad()(function))


class WeightAverage:
    """The moving average of a model's trained weights, taken from their fp32 masters.

    It takes 4 bytes a trained parameter on the CPU, which no budget counts, and nothing on the accelerator.
    """

    def __init__(self, model: nn.Module, decay: float | Callable[[int], float] = 0.999) -> None:
        """Make the average; ``decay``: the share that an update keeps, or a function of the earlier updates' count."""
        self._hooks = hooks_of(model)
        self._decay = decay
        self._averages: dict[ParamState, torch.Tensor] = {}
        self.updates = 0
        """How often `update` was called."""
        if not self._records():
            raise InvalidInput(
                f"this {self._hooks.name} has no trained parameters to average: call chunked(model, AdamW(...))"
            )

    def _records(self) -> list[ParamState]:
        """Return the trained parameters; of those that share memory only one: writing it writes all."""
        trained = [record for record in self._engine.records if record.trainable]
        return list({record.first: record for record in reversed(trained)}.values())[::-1]

    @property
    def _engine(self) -> Engine:
        return self._hooks.engine

    @defer_interrupts_installing
    @_outside_of_inference_mode
    def update(self) -> None:
        """Move every average towards its master by ``1 - decay``; a parameter's first update copies its master."""
        self._check_not_applied()
        kept = self._decay(self.updates) if callable(self._decay) else self._decay
        if not 0 <= kept <= 1:
            raise InvalidInput(f"decay must be between 0 and 1, found {kept!r} at update {self.updates}")
        for record in self._records():
            master = self._engine.read_state(record, Kind.P32)
            if record in self._averages:
                self._averages[record].lerp_(master, 1 - kept)
            else:
                self._averages[record] = master
        self.updates += 1

    def applied(self) -> AbstractContextManager[None]:
        """Give the model the averages for the block, to evaluate or save them; a step inside raises.

        Averages and masters are exchanged, so that no second copy of the model is made.
        """
        return _Applied(self)

    @defer_interrupts_installing
    @_outside_of_inference_mode
    def _exchange(self, *, on: bool) -> None:
        if on:
            self._check_not_applied()
            if not self.updates:
                raise InvalidInput("there is no average yet: call update() after each optimizer step")
        if not on:
            self._engine.usability.mark_averaged(on=False)
        for record in self._averages:
            master = self._engine.read_state(record, Kind.P32)
            self._engine.write_state(record, Kind.P32, self._averages[record])
            self._averages[record] = master
        self._engine.updater.compare()
        if on:
            self._engine.usability.mark_averaged(on=True)

    def _check_not_applied(self) -> None:
        if self._engine.usability.averaged:
            raise InvalidInput("inside applied() the model has averages for weights: do this after the block")

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by parameter name, not copied, and the number of updates."""
        self._check_not_applied()
        self._hooks.name_records()
        averages = {record.name: average for record, average in self._averages.items()}
        return {"updates": self.updates, "averages": averages}

    @defer_interrupts_installing
    @_outside_of_inference_mode
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._check_not_applied()
        self._hooks.name_records()
        found = state["averages"]
        wanted = {record.name: record for record in self._records()} if state["updates"] else {}
        if found.keys() != wanted.keys():
            name = min(found.keys() ^ wanted.keys())
            raise InvalidInput(f"the averages are of other parameters than this {self._hooks.name}'s: {name!r}")
        for name, record in wanted.items():
            if found[name].shape != record.shape:
                shapes = f"{tuple(found[name].shape)}, expected {tuple(record.shape)}"
                raise InvalidInput(f"the average of {name!r} has shape {shapes}")
        self._averages = {
            record: found[name].detach().to("cpu", torch.float32, copy=True) for name, record in wanted.items()
        }
        self.updates = state["updates"]


class _Applied(AbstractContextManager[None]):
    """Implement `applied` as a class: an interrupt may come between a generator and its caller."""

    def __init__(self, average: WeightAverage) -> None:
        self._average = average

    def __enter__(self) -> None:
        self._average._exchange(on=True)

    def __exit__(self, *_: object) -> None:
        self._average._exchange(on=False)
