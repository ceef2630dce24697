"""What the engine's optimizer knows of one kind of optimizer: its states, its param groups, and their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import torch

from ps_core._errors import InvalidInput
from ps_core._options import SGD, Adam, AdamW, Optimizer, TorchOptimizer
from ps_core._program import Kind
from ps_core.engine._optim.settings import Progress, Scalars, Settings, StepRule, StepSettings
from ps_core.engine._optim.torch_rule import FREE, TorchRule

# What torch's own optimizers keep in a group besides the numbers, as it is when they do what the engine does.
SHARED = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
FIXED: dict[type, dict[str, Any]] = {
    AdamW: {**SHARED, "amsgrad": False, "capturable": False, "decoupled_weight_decay": True},
    Adam: {**SHARED, "amsgrad": False, "capturable": False, "decoupled_weight_decay": False},
    SGD: {**SHARED, "dampening": 0, "nesterov": False},
}
NUMBERS = ("lr", "betas", "eps", "momentum", "weight_decay")
MOMENTS = {StepRule.ADAM: {"exp_avg": Kind.M, "exp_avg_sq": Kind.V}, StepRule.SGD: {"momentum_buffer": Kind.M}}
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


class KernelRule:
    """AdamW, Adam and SGD of `ps_core`, whose steps are kernels of `ps_kernels`."""

    kinds = 2
    starts_from_zeros = True

    def __init__(self, spec: Optimizer) -> None:
        self.spec = spec
        self.name = type(spec).__name__
        self.step_rule = StepRule.SGD if isinstance(spec, SGD) else StepRule.ADAM
        self.states = MOMENTS[self.step_rule]
        self._fixed = FIXED[type(spec)]
        self.groups = [_numbers(each) for each in (spec, *spec.groups)]
        self.defaults = {**_numbers(spec), **self._fixed}

    def check(self, where: str, group: Mapping[str, Any]) -> None:
        """Raise `InvalidInput` if what the kernels always do was set to something else."""
        for key, value in self._fixed.items():
            if key not in FREE and group.get(key, value) != value:
                raise InvalidInput(f"{where}[{key!r}] is {group[key]!r}; the engine's {self.name} has only {value!r}")

    def read(self, index: int, group: Mapping[str, Any]) -> StepSettings:
        """Read a param group. Values may be tensors (a learning rate that a compiled loop changes)."""
        names = ("lr", "weight_decay", "momentum" if self.step_rule is StepRule.SGD else "eps")
        lr, decay, last = _floats(names, [group[name] for name in names])
        if self.step_rule is StepRule.SGD:
            return _settings(kind=StepRule.SGD, lr=lr, weight_decay=decay, momentum=last)
        if not isinstance(group["betas"], Sequence) or len(group["betas"]) != 2:
            raise InvalidInput(f"betas must be two numbers when the optimizer steps, found {group['betas']!r}")
        return _settings(
            kind=StepRule.ADAM,
            lr=lr,
            weight_decay=decay,
            betas=tuple(_floats(("betas", "betas"), group["betas"])),
            eps=last,
            decoupled=self._fixed["decoupled_weight_decay"],
        )

    def state_names(self, index: int, group: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Name the moments, and Adam's count of steps; SGD keeps none without momentum."""
        if self.step_rule is StepRule.ADAM:
            return ("step", *self.states)
        return tuple(self.states) if group is None or group.get("momentum") else ()

    def scalar(self, progress: Progress, name: str) -> torch.Tensor:
        """Return the count of steps."""
        return torch.tensor(float(progress.steps))

    def scalars(self, values: Mapping[str, float]) -> Scalars:
        """Return nothing: the count of steps is not among them."""
        return ()

    def for_torch(self, group: dict[str, Any]) -> dict[str, Any]:
        """Set ``fused`` where nothing else was chosen: the kernels do the operations of torch's fused optimizers."""
        return {**group, "fused": True} if group["fused"] is None and group["foreach"] is None else group

    def __str__(self) -> str:
        return f"{replace(self.spec, groups=())} and {len(self.spec.groups)} groups"


def rule_of(spec: Spec) -> OptimizerRule:
    """Return the rule of an optimizer; raise `InvalidInput` if its class or settings cannot be used."""
    return TorchRule(spec) if isinstance(spec, TorchOptimizer) else KernelRule(spec)


def _numbers(source: object) -> dict[str, Any]:
    """Return the settings that the optimizer or a `Group` sets itself, by name."""
    return {name: value for name in NUMBERS if (value := getattr(source, name, None)) is not None}


def _floats(names: Sequence[str], values: Sequence[Any]) -> list[float]:
    """Convert the values of a param group (any: numbers, or tensors of one element) to floats."""
    found = []
    for name, value in zip(names, values, strict=True):
        try:
            found.append(float(value))
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise InvalidInput(f"{name} must be a number when the optimizer steps, found {value!r}") from None
    return found


_settings: Callable[..., Settings] = lru_cache(maxsize=64)(Settings)
"""Checks numbers once: most steps have those of the step before."""
