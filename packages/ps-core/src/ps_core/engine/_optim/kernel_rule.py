"""Implement the AdamW, Adam and SGD of `ps_core`: their states and settings, and their steps by `ps_kernels`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, ClassVar

import torch

import ps_kernels
from ps_core._errors import InvalidInput
from ps_core._extents import Kind
from ps_core._options import SGD, Adam, AdamW, Optimizer
from ps_core.engine._optim.settings import Progress, Scalars, StatePlace, StepSettings
from ps_core.engine._optim.torch_stepper import FREE


class StepRule(StrEnum):
    """Name the arithmetic of a step."""

    ADAM = "adam"
    SGD = "sgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The numbers of one parameter's step. Neighbours with equal settings are stepped in one call.

    Numbers that a rule does not use stay at their defaults, so that equal steps have equal settings.
    """

    whole: ClassVar[bool] = False
    kind: StepRule
    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    decoupled: bool = False
    momentum: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "eps"):
            _within(name, getattr(self, name), math.inf, "a finite number of at least 0")
        for name, share in (("momentum", self.momentum), *(("betas", beta) for beta in self.betas)):
            _within(name, share, 1, "a number of at least 0 and less than 1")
        if not isinstance(self.decoupled, bool):
            raise InvalidInput(f"decoupled must be True or False, found {self.decoupled!r}")

    def step(
        self,
        progress: Progress,
        rows: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        target: torch.Tensor | None,
        factor: float,
    ) -> None:
        """Make the step in one call of a kernel; see `StepSettings`."""
        master, momentum = rows[:2]
        if self.kind is StepRule.SGD:
            ps_kernels.sgd_step(
                master,
                momentum if self.momentum else None,
                gradient,
                target,
                lr=self.lr,
                momentum_decay=self.momentum,
                weight_decay=self.weight_decay,
                grad_scale=factor,
            )
            return
        ps_kernels.adam_step(
            master,
            momentum,
            rows[2],
            gradient,
            target,
            step=progress.steps + 1,
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=self.weight_decay,
            decoupled=self.decoupled,
            grad_scale=factor,
        )

    def after(self, progress: Progress) -> Scalars:
        """Return no scalars: there is only the count of steps."""
        return ()

    def values_by_name(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


# What torch's own optimizers keep in a group besides the numbers, as it is when they do what the engine does.
SHARED = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
FIXED: dict[type, dict[str, Any]] = {
    AdamW: {**SHARED, "amsgrad": False, "capturable": False, "decoupled_weight_decay": True},
    Adam: {**SHARED, "amsgrad": False, "capturable": False, "decoupled_weight_decay": False},
    SGD: {**SHARED, "dampening": 0, "nesterov": False},
}
NUMBERS = ("lr", "betas", "eps", "momentum", "weight_decay")
STATE_KINDS = {StepRule.ADAM: {"exp_avg": Kind.M, "exp_avg_sq": Kind.V}, StepRule.SGD: {"momentum_buffer": Kind.M}}


class KernelRule:
    """AdamW, Adam and SGD of `ps_core`, whose steps are kernels of `ps_kernels`."""

    whole = False
    starts_from_zeros = True

    def __init__(self, spec: Optimizer) -> None:
        self.spec = spec
        self.name = type(spec).__name__
        self.step_rule = StepRule.SGD if isinstance(spec, SGD) else StepRule.ADAM
        self.states = STATE_KINDS[self.step_rule]
        self.kinds = len(self.states)  # SGD's also without momentum, which a schedule may set at any step
        self._fixed = FIXED[type(spec)]
        self.groups = [_numbers(spec), *({**_numbers(spec), **_numbers(each)} for each in spec.groups)]
        self.defaults = {**_numbers(spec), **self._fixed}

    def check(self, where: str, group: Mapping[str, Any]) -> None:
        """Raise `InvalidInput` if a fixed property of the kernels was set to another value."""
        for key, value in self._fixed.items():
            if key not in FREE and group.get(key, value) != value:
                raise InvalidInput(
                    f"{where}[{key!r}] is {group[key]!r}; the engine's {self.name} has only {value!r}. PyTorch's own "
                    f"code has it: {self._of_torch(group)}"
                )

    def _of_torch(self, group: Mapping[str, Any]) -> str:
        """Return the `TorchOptimizer` that has a param group's settings, as users write it."""
        others = {key: group[key] for key, value in self._fixed.items() if group.get(key, value) != value}
        kept = {key: value for key, value in others.items() if key not in FREE}
        kind = "Adam" if "decoupled_weight_decay" in kept else self.name  # PyTorch's AdamW takes no such argument
        shown = "".join(f", {name}={group[name]!r}" for name in (*NUMBERS, *kept) if name in group)
        return f"TorchOptimizer(torch.optim.{kind}{shown})"

    def add_group(self, group: Mapping[str, Any]) -> None:
        """Add a param group with these settings."""
        self.groups.append({name: group[name] for name in self.groups[0]})

    def read(self, index: int, group: Mapping[str, Any]) -> StepSettings:
        """Read a param group. Values may be tensors, such as a learning rate that a compiled loop changes."""
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

    def check_parameter(self, index: int, name: str, shape: Sequence[int]) -> None:
        """Do nothing: every parameter can be stepped."""

    def places(
        self, index: int, shape: Sequence[int], group: Mapping[str, Any] | None = None
    ) -> Mapping[str, StatePlace]:
        """Return where the states are; SGD keeps none without momentum."""
        if self.step_rule is StepRule.SGD and group is not None and not group.get("momentum"):
            return {}
        return {name: StatePlace(kind, 0, tuple(shape)) for name, kind in self.states.items()}

    def scalar_names(self, index: int) -> tuple[str, ...]:
        """Name Adam's count of steps."""
        return ("step",) if self.step_rule is StepRule.ADAM else ()

    def scalar(self, progress: Progress, name: str) -> torch.Tensor:
        """Return the count of steps."""
        return torch.tensor(float(progress.steps), dtype=torch.float32, device="cpu")

    def scalars(self, values: Mapping[str, float]) -> Scalars:
        """Return nothing: the count of steps is not among the scalars."""
        return ()

    def for_torch(self, group: dict[str, Any]) -> dict[str, Any]:
        """Set ``fused`` unless the user did: the kernels do the operations of PyTorch's fused optimizers."""
        return {**group, "fused": True} if group["fused"] is None and group["foreach"] is None else group

    def __str__(self) -> str:
        return f"{replace(self.spec, groups=())} and {len(self.spec.groups)} groups"


def _numbers(source: object) -> dict[str, Any]:
    """Return the settings that the optimizer or a `Group` sets itself, by name."""
    return {name: value for name in NUMBERS if (value := getattr(source, name, None)) is not None}


def _floats(names: Sequence[str], values: Sequence[Any]) -> list[float]:
    """Convert the values of a param group to floats (any: numbers, or tensors of one element)."""
    found = []
    for name, value in zip(names, values, strict=True):
        try:
            found.append(float(value))
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise InvalidInput(f"{name} must be a number when the optimizer steps, found {value!r}") from None
    return found


_settings: Callable[..., Settings] = lru_cache(maxsize=64)(Settings)
"""Make settings; results are cached, since most steps have those of the step before."""


def _within(name: str, value: float, end: float, meant: str) -> None:
    if not 0 <= value < end:
        raise InvalidInput(f"{name} must be {meant} when the optimizer steps, found {value!r}")
