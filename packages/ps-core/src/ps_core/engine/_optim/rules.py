"""Define what the engine's optimizer knows of one kind of optimizer: states, param groups and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from ps_core._extents import Kind
from ps_core._options import Optimizer, TorchOptimizer
from ps_core.engine._optim.kernel_rule import KernelRule
from ps_core.engine._optim.settings import Progress, Scalars, StatePlace, StepSettings
from ps_core.engine._optim.torch_rule import TorchRule

Spec: TypeAlias = Optimizer | TorchOptimizer
"""An optimizer as users give it to `chunked`."""


class OptimizerRule(Protocol):
    """Protocol of one kind of optimizer. (Any: values of PyTorch's param groups.)"""

    @property
    def name(self) -> str:
        """Return the name of the class."""
        ...

    @property
    def spec(self) -> Spec:
        """Return the user's specification."""
        ...

    @property
    def kinds(self) -> int:
        """Return how many of `STATES` each parameter has."""
        ...

    @property
    def states(self) -> Mapping[str, Kind]:
        """Return what checkpoints call the contents of each slot: where groups agree, torch's name of the state."""
        ...

    @property
    def whole(self) -> bool:
        """Return True if parameters of some group are stepped whole, so that no process may have a part of one."""
        ...

    @property
    def starts_from_zeros(self) -> bool:
        """Return True if all states begin as zeros; each may then be set and saved by itself."""
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
        """Raise `InvalidInput` if a param group has settings that are not supported."""
        ...

    def add_group(self, group: Mapping[str, Any]) -> None:
        """Add a param group after `chunked`; raise `InvalidInput` if its settings imply other states."""
        ...

    def check_parameter(self, index: int, name: str, shape: Sequence[int]) -> None:
        """Raise `InvalidInput` if a parameter that is trained since `chunked` cannot be stepped."""
        ...

    def read(self, index: int, group: Mapping[str, Any]) -> StepSettings:
        """Return the settings of a param group."""
        ...

    def places(
        self, index: int, shape: Sequence[int], group: Mapping[str, Any] | None = None
    ) -> Mapping[str, StatePlace]:
        """Return where the states of a parameter of this shape are, by the names that torch's optimizer has for them.

        ``group`` None: whatever the settings of its param group are.
        """
        ...

    def scalar_names(self, index: int) -> tuple[str, ...]:
        """Name the single values that torch's optimizer keeps for a parameter of a param group."""
        ...

    def scalar(self, progress: Progress, name: str) -> Any:
        """Return a single value of a parameter, as PyTorch's optimizer has it."""
        ...

    def scalars(self, values: Mapping[str, float]) -> Scalars:
        """Return these values as `Progress` stores them."""
        ...

    def for_torch(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a param group with which PyTorch's optimizer continues as the engine would."""
        ...

    def __str__(self) -> str:
        """Describe the optimizer, in the same words on all ranks."""
        ...


def rule_of(spec: Spec, parameters: Iterable[tuple[str, torch.Tensor]] = ()) -> OptimizerRule:
    """Return the rule of an optimizer; raise `InvalidInput` if its class or settings cannot be used.

    ``parameters``: of the model, by name; those to be trained have to be ones that the optimizer can step.
    """
    return TorchRule(spec, parameters) if isinstance(spec, TorchOptimizer) else KernelRule(spec)
