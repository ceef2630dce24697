"""Define the engine's protocol for its optimizer, and the values that pass between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from ps_core._extents import STATES, Kind

if TYPE_CHECKING:
    from ps_core.engine._parameters.param_state import ParamState


Scalars: TypeAlias = tuple[tuple[str, float], ...]
"""The values that an optimizer keeps for a whole parameter, by name."""


class Progress(NamedTuple):
    """Count the steps of a parameter, and hold its single values."""

    steps: int
    """Number of steps so far."""
    scalars: Scalars = ()
    """The parameter's single values: empty before the first step, and with AdamW, Adam and SGD of `ps_core`."""


class StatePlace(NamedTuple):
    """Where one state of a parameter is, in memory order."""

    kind: Kind
    """One of `STATES`."""
    first: int
    """First element, of as many as the parameter has."""
    shape: tuple[int, ...]

    def of(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the state's part of a parameter's vectors, which are in the order of `STATES`."""
        return states[STATES.index(self.kind)][self.first : self.first + math.prod(self.shape)]


class StepSettings(Protocol):
    """The settings of one parameter's step. Neighbours with equal settings are stepped in one call."""

    @property
    def whole(self) -> bool:
        """Return True if each parameter is stepped alone, in its shape: neighbours are not put together."""
        ...

    def step(
        self,
        progress: Progress,
        rows: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        target: torch.Tensor | None,
        factor: float,
    ) -> None:
        """Make the step that follows ``progress``, in place.

        ``rows``: the master, and the states in the order of `STATES`. All are vectors; a master that is stepped whole
        has the parameter's shape. The gradient is multiplied by ``factor``. ``target``: the weight in 16 bits, which
        may be the same memory as ``gradient``.
        """
        ...

    def after(self, progress: Progress) -> Scalars:
        """Return the scalars after that step."""
        ...

    def values_by_name(self) -> dict[str, Any]:
        """Return the settings for comparison between ranks. (Any: some settings are no numbers.)"""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a step."""

    norm: float | None
    """The norm of all gradients as one vector, without the loss scale, before clipping; None: not known."""
    skipped: bool
    """True if a gradient held infinity or not-a-number, so nothing was changed."""


class OptimizerBackend(Protocol):
    """Protocol of the engine, as its optimizer uses it. Gradients still have the loss scale, as backward made them."""

    @property
    def processes(self) -> int:
        """Return how many processes share the model."""
        ...

    def check_usable(self) -> None:
        """Raise if the model may not be trained any more."""
        ...

    def has_gradient(self, record: ParamState) -> bool:
        """Return True if a gradient of the parameter waits for the step."""
        ...

    def has_gradients(self) -> bool:
        """Return True if any gradient waits for the step."""
        ...

    def discard_gradients(self, records: Iterable[ParamState] | None = None) -> None:
        """Forget the gradients of these, or of all."""
        ...

    def step(
        self, settings: Callable[[ParamState], StepSettings], max_norm: float | None, loss_scale: float
    ) -> Outcome:
        """Update every parameter that has a gradient, or none if one of them is not finite."""
        ...

    def read_state(self, record: ParamState, kind: Kind) -> torch.Tensor:
        """Return an fp32 copy on the CPU of a moment, or of the value that steps update (`Kind.P32`)."""
        ...

    def state_dict_value(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value, or a tensor without memory where another rank keeps the values of state dicts."""
        ...

    def loading(self, what: str) -> AbstractContextManager[None]:
        """Refuse to train after an error within the block, in which ``what`` replaces values."""
        ...

    def write_state(self, record: ParamState, kind: Kind, value: torch.Tensor) -> None:
        """Replace a moment or the value that steps update."""
        ...

    def load_master(self, record: ParamState, value: torch.Tensor) -> None:
        """Replace the parameter by a master of a state dict, unless other weights were loaded."""
        ...

    def states_loaded(self) -> None:
        """Note that a state dict was loaded whole."""
        ...

    def compare_writes(self) -> None:
        """Raise `RanksDiverged` unless all ranks wrote the same; one process compares nothing."""
        ...
