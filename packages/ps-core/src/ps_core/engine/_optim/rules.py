"""What the engine's optimizer knows of one kind of optimizer: its states, its param groups, and their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ps_core._options import Optimizer, TorchOptimizer
from ps_core._program import Kind
from ps_core.engine._optim.kernel_rule import KernelRule
from ps_core.engine._optim.settings import Progress, Scalars, StepSettings
from ps_core.engine._optim.torch_rule import TorchRule

Spec: TypeAlias = Optimizer | TorchOptimizer
"""An optimizer as users give it to `chunked`."""


class OptimizerRule(Protocol):
    """One kind of optimizer. (Any: values of torch's param groups.)"""

    @property
    def name(self) -> str:
        """Name the class."""
        ...

    @property
    def spec(self) -> Spec:
        """Return what the user gave."""
        ...

    @property
    def kinds(self) -> int:
        """Return how many of `STATES` each parameter has."""
        ...

    @property
    def states(self) -> Mapping[str, Kind]:
        """Return where each state is, by the name that torch's optimizer has for it."""
        ...

    @property
    def starts_from_zeros(self) -> bool:
        """True if all states are zeros before the first step; then they may be set one by one, and be saved."""
        ...

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the settings that `torch.optim.Optimizer` is made with."""
        ...

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """Return the settings of each param group at the start, those of no `Group` first."""
        ...

    def check(self, where: str, group: Mapping[str, Any]) -> None:
        """Raise `InvalidInput` if a param group has settings that cannot be followed."""
        ...

    def read(self, index: int, group: Mapping[str, Any]) -> StepSettings:
        """Return the settings of a param group."""
        ...

    def state_names(self, index: int, group: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Name the values in the entry of a stepped parameter of a param group, as torch's optimizer does.

        ``group`` None: whatever its settings are.
        """
        ...

    def scalar(self, progress: Progress, name: str) -> Any:
        """Return a value that is one for a whole parameter, as torch's optimizer has it."""
        ...

    def scalars(self, values: Mapping[str, float]) -> Scalars:
        """Return these values in the form that `Progress` has."""
        ...

    def for_torch(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a param group with which torch's optimizer goes on as the engine does."""
        ...

    def __str__(self) -> str:
        """Describe the optimizer alike on all ranks."""
        ...


def rule_of(spec: Spec) -> OptimizerRule:
    """Return the rule of an optimizer; raise `InvalidInput` if its class or settings cannot be used."""
    return TorchRule(spec) if isinstance(spec, TorchOptimizer) else KernelRule(spec)
