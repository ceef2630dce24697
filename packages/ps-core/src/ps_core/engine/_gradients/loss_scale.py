"""Manage the loss scale of fp16 training, with the interface of ``torch.amp.GradScaler``.

No pass over gradients is added: the norm is measured anyway, and the step divides by the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ps_core._errors import InvalidInput

LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


@dataclass(slots=True, kw_only=True)
class LossScale:
    """A scale that is halved after a skipped step, and doubled after ``growth_interval`` steps without a skip."""

    value: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    clean_steps: int = 0

    def update(self, *, skipped: bool) -> None:
        """Adapt the scale after a step."""
        if skipped:
            # PyTorch's scale may reach zero here, and then divide by it.
            self.value = max(self.value * self.backoff_factor, SMALLEST)
            self.clean_steps = 0
            return
        self.clean_steps += 1
        if self.clean_steps == self.growth_interval:
            grown = self.value * self.growth_factor
            self.value = grown if grown <= LARGEST else self.value
            self.clean_steps = 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale, in fp32 for a scalar loss: fp16 might overflow."""
        return loss * torch.tensor(self.value, dtype=torch.float32, device=loss.device)

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and its settings in ``GradScaler``'s format."""
        return {
            "scale": self.value,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.clean_steps,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Load what `state_dict`, or that of a ``GradScaler``, returned."""
        if not isinstance(state, Mapping):
            raise InvalidInput(f"a loss scale's state must be a mapping, found {state!r}")
        absent = self.state_dict().keys() - state.keys()
        if absent:
            raise InvalidInput(f"a loss scale's state needs {sorted(absent)[0]!r}, found only {sorted(state)}")
        for key, least in (("growth_interval", 1), ("_growth_tracker", 0)):
            if type(state[key]) is not int or state[key] < least:
                raise InvalidInput(
                    f"a loss scale's {key!r} must be a whole number from {least} on, found {state[key]!r}"
                )
        for key in ("scale", "growth_factor", "backoff_factor"):
            if type(state[key]) not in (int, float) or not SMALLEST <= state[key] <= LARGEST:
                raise InvalidInput(
                    f"a loss scale's {key!r} must be a positive number within fp32, found {state[key]!r}"
                )
        self.value = float(state["scale"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self.clean_steps = int(state["_growth_tracker"])


class Scaled(Protocol):
    """Protocol of the optimizer, as `Scaler` uses it."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward on."""

    def step(self) -> Any:
        """Update parameters, or skip the step if a gradient is not finite."""


class Scaler:
    """Give code that expects a ``GradScaler`` its methods; without a loss scale they change nothing."""

    def __init__(self, optimizer: Scaled, loss_scale: LossScale | None) -> None:
        self._optimizer, self._loss_scale = optimizer, loss_scale

    def is_enabled(self) -> bool:
        """Return True if the loss is scaled."""
        return self._loss_scale is not None

    def get_scale(self) -> float:
        """Return the factor of the loss; 1 where nothing is scaled."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward on, times the scale."""
        return self._optimizer.scale(outputs)

    def unscale_(self, optimizer: object) -> None:
        """Do nothing: gradients are read without the scale."""
        self._check(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's step, which skips itself if a gradient is not finite."""
        self._check(optimizer)
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: object = None) -> None:
        """Do nothing: the step has adapted the scale."""
        if new_scale is not None:
            raise InvalidInput(
                "update(new_scale=...): expected None, as each step adapts the scale; to set it, call "
                "scaler.load_state_dict({**scaler.state_dict(), 'scale': new_scale})"
            )

    def state_dict(self) -> dict[str, float | int]:
        """Return the state in ``GradScaler``'s format; the optimizer's state dict has it too."""
        return {} if self._loss_scale is None else self._loss_scale.state_dict()

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Load what `state_dict` returned."""
        if self._loss_scale is not None:
            self._loss_scale.load_state_dict(state)

    def _check(self, optimizer: object) -> None:
        if optimizer is not self._optimizer:
            raise InvalidInput(
                f"this scaler is that of the optimizer that chunked(...) returned, found a {type(optimizer).__name__}; "
                "scale other losses by a scaler of their own"
            )
