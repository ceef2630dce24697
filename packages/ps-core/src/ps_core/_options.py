"""Define what a user chooses: the optimizer, its parameter groups, the budget, and other options."""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, ClassVar, Self, TypeAlias

from ps_core._errors import InvalidInput
from ps_core._units import check_flag, check_whole, is_finite, parse_bytes, shown

Match: TypeAlias = Callable[[str, Any], bool]
"""A function of a parameter's name and the parameter. (`Any`: whatever the executor uses for parameters.)"""

POLICIES = ("belady", "lru", "fifo", "static")
AFTER_BACKWARD, IN_BACKWARD, SPECULATIVE = "after_backward", "in_backward", "speculative"
STEPS = (AFTER_BACKWARD, IN_BACKWARD, SPECULATIVE)
_HOW_TORCH_STEPS = ("foreach", "fused")
"""Settings of PyTorch's optimizers that choose among implementations of one step."""


class _ByName:
    """A class whose values are given by name."""

    __slots__ = ()
    _as_in: ClassVar[str]
    """An example of how one is written, for errors."""
    _only_in_torch: ClassVar[tuple[str, ...]] = ()
    """Settings that PyTorch's optimizer of the same name has, and this one does not."""

    def __new__(cls, *given: object, **named: object) -> Self:
        """Raise `InvalidInput` for arguments that the constructor does not know."""
        if given:
            raise InvalidInput(
                f"{cls.__name__} takes values by name, as in {cls._as_in}; found {_kind(given[0])} without one"
            )
        known = [row.name for row in fields(cls)]  # type: ignore[arg-type]  # one of the dataclasses below
        for name in named:
            if name not in known:
                more = _instead(cls.__name__, name, named) if name in cls._only_in_torch else ""
                raise InvalidInput(f"{cls.__name__} has no {name!r}; it has {', '.join(known)}{more}")
        return object.__new__(cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(_ByName):
    """Set other values for the parameters for which ``match(name, parameter)`` is true; None: as for all others."""

    _as_in = "Group(match=lambda name, _: name.endswith('bias'), weight_decay=0.0)"

    match: Match
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    settings: Mapping[str, Any] | None = None
    """Of a `TorchOptimizer`: other settings, by the names that its class has for them."""
    kind: type | None = None
    """Of a `TorchOptimizer`: another class of PyTorch's; it starts from its own settings, not from the common ones."""

    @property
    def overrides(self) -> dict[str, Any]:
        """Return the values that this group sets."""
        names = (row.name for row in fields(self) if row.name not in ("match", "settings", "kind"))
        return {name: value for name in names if (value := getattr(self, name)) is not None} | dict(self.settings or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(_ByName):
    """The Adam optimizer; weight decay, if any, is added to the gradient."""

    _as_in = "Adam(lr=1e-3), for the parameters of the model that chunked is given"
    _only_in_torch = ("amsgrad", "maximize", *_HOW_TORCH_STEPS)

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        _check(self, self.lr, self.weight_decay, self.groups)
        _check_adam(self.betas, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(_ByName):
    """The Adam optimizer with decoupled weight decay."""

    _as_in = "AdamW(lr=1e-3), for the parameters of the model that chunked is given"
    _only_in_torch = ("amsgrad", "maximize", *_HOW_TORCH_STEPS)

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        _check(self, self.lr, self.weight_decay, self.groups)
        _check_adam(self.betas, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(_ByName):
    """Gradient descent with momentum; weight decay is added to the gradient."""

    _as_in = "SGD(lr=1e-3), for the parameters of the model that chunked is given"
    _only_in_torch = ("nesterov", "dampening", "maximize", *_HOW_TORCH_STEPS)

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        _check(self, self.lr, self.weight_decay, self.groups)
        _number("momentum", self.momentum, below=1.0)


class TorchOptimizer:
    """An optimizer class of PyTorch, with its settings: ``TorchOptimizer(torch.optim.RMSprop, lr=1e-3)``.

    A `Group` may give some parameters other settings, ``Group(match=..., lr=1e-4, settings={"alpha": 0.9})``, or
    another class, ``Group(match=..., kind=torch.optim.AdamW, lr=1e-4)``.
    """

    __slots__ = ("groups", "kind", "settings")
    groups: tuple[Group, ...]
    kind: type
    settings: Mapping[str, Any]
    """The arguments of the class besides the parameters. (Any: each class has settings of its own.)"""

    def __init__(self, kind: type, /, *, groups: tuple[Group, ...] = (), **settings: Any) -> None:
        if not isinstance(kind, type):
            raise InvalidInput(
                "TorchOptimizer expects an optimizer class and its settings, as in TorchOptimizer(torch.optim.RMSprop, "
                f"lr=1e-3); found {_kind(kind)}"
            )
        _check_groups(groups)
        self.kind, self.settings, self.groups = kind, settings, groups

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"TorchOptimizer({self.kind.__qualname__}{settings})"


Optimizer: TypeAlias = Adam | AdamW | SGD
"""The optimizers whose arithmetic is `ps_kernels`' and the reference's."""


def for_parameter(optimizer: Optimizer, name: str, parameter: object = None) -> Optimizer:
    """Return the optimizer of one parameter: the first matching group's values over the common ones."""
    for group in optimizer.groups:
        if group.match(name, parameter):
            return replace(optimizer, groups=(), **group.overrides)
    return replace(optimizer, groups=())


class _UsedByOneModel(_ByName):
    """Remember which model uses this object. Copies and pickles forget it: it is no field."""

    __slots__ = ("_user",)
    _user: tuple[str, Callable[[], bool]]
    """The model's name, and a function that returns True while the model is managed; unset before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(_UsedByOneModel):
    """Say how much memory may be used on each tier: bytes, or a text like ``"20GiB"``.

    ``device`` None: what is free, less a tenth. ``host`` None: what is available to the node, less a tenth; the node's
    processes share it. ``disk`` None: no disk tier. One object is for one managed model at a time: for several, divide
    it by `split`.
    """

    _as_in = "Budget(device='8GiB')"

    device: int | str | None = None
    host: int | str | None = None
    disk: int | str | None = None
    disk_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("device", "host", "disk"):
            _bytes(f"Budget.{name}", getattr(self, name))
        if self.disk_dir is not None and not (isinstance(self.disk_dir, str) and self.disk_dir):
            raise InvalidInput(f"Budget.disk_dir must be the path of a directory, found {self.disk_dir!r}")
        if (self.disk is None) != (self.disk_dir is None):
            raise InvalidInput("Budget.disk and Budget.disk_dir go together: give both or neither")

    def split(self, *parts: float) -> tuple[Budget, ...]:
        """Return budgets that together are this one: ``student, teacher = budget.split(3, 1)``. None stays None."""
        numbers = [part for part in parts if is_finite(part) and part > 0]
        if len(numbers) < 2 or len(numbers) < len(parts):
            raise InvalidInput(
                f"Budget.split expects two parts or more, as in split(3, 1), each above 0; found {parts!r}"
            )
        shares = [Fraction(part) / sum(map(Fraction, parts)) for part in parts]
        sizes = {"device": self.device_bytes, "host": self.host_bytes, "disk": self.disk_bytes}

        def sized(share: Fraction) -> dict[str, Any]:
            return {name: int(size * share) for name, size in sizes.items() if size is not None}

        return tuple(replace(self, **sized(share)) for share in shares)

    @property
    def device_bytes(self) -> int | None:
        """Return ``device`` in bytes."""
        return None if self.device is None else parse_bytes(self.device)

    @property
    def host_bytes(self) -> int | None:
        """Return ``host`` in bytes."""
        return None if self.host is None else parse_bytes(self.host)

    @property
    def disk_bytes(self) -> int | None:
        """Return ``disk`` in bytes."""
        return None if self.disk is None else parse_bytes(self.disk)


def check_unused(budget: Budget, model_name: str) -> None:
    """Raise `InvalidInput` if another model that is still managed uses this object."""
    user = getattr(budget, "_user", None)
    if user is None:
        return
    other, is_managed = user
    if is_managed():
        gc.collect()  # a reference cycle, as of a stored exception, may keep the other model alive
    if is_managed():
        raise InvalidInput(
            f"the Budget given to {model_name} is in use by another model, {other}, that is still managed: give each a "
            "part, as in first, second = budget.split(3, 1), or release(model) the other one first"
        )


def mark_used(budget: Budget, model_name: str, is_managed: Callable[[], bool]) -> None:
    """Note that a model uses this object for as long as ``is_managed()`` is true."""
    object.__setattr__(budget, "_user", (model_name, is_managed))  # dataclasses that are frozen refuse to be written


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(_ByName):
    """Set all other choices; the defaults suit most models."""

    _as_in = "Options(prefetch=2)"

    group_bytes: int | str | None = None
    """Size of a group's 16-bit parameters; None: searched."""
    policy: str = "belady"
    """Which copy is evicted first when memory is short: belady, lru, fifo or static."""
    prefetch: int | None = None
    """The most moments that a fetch may be ahead of its use; None: as many as memory allows."""
    poison: bool = False
    """Fill every freed slot with not-a-number (for debugging; slow)."""
    pin: bool = True
    """Use page-locked host memory where the platform has it."""
    cap_allocator: bool = True
    """On CUDA, cap what PyTorch's allocator takes from the device at the budgets of the models there."""
    keep_fp32: tuple[str, ...] = ()
    """Patterns of parameter names that are computed in fp32 whatever the precision."""
    cast_inputs: bool = True
    """Cast floating-point inputs of the model to the compute precision."""
    plan_cache: str | None = None
    """Folder that keeps the choices behind plans from run to run; None: not kept."""
    machine: str | None = None
    """The machine to plan for: a built-in name or a TOML file; None: the one most like this one."""
    step: str = AFTER_BACKWARD
    """When groups are stepped: after_backward; in_backward: as soon as a group's gradient is complete; speculative: as
    in_backward, and undone if gradients must be clipped.
    """

    def __post_init__(self) -> None:
        _bytes("Options.group_bytes", self.group_bytes, least=1)
        if self.step not in STEPS:
            raise InvalidInput(f"Options.step must be one of {', '.join(STEPS)}; found {self.step!r}")
        if self.policy not in POLICIES:
            raise InvalidInput(f"Options.policy must be one of {', '.join(POLICIES)}; found {self.policy!r}")
        if self.prefetch is not None:
            check_whole("Options.prefetch", self.prefetch)
        for name in ("poison", "pin", "cap_allocator", "cast_inputs"):
            check_flag(f"Options.{name}", getattr(self, name))
        if not isinstance(self.keep_fp32, tuple) or not all(isinstance(name, str) for name in self.keep_fp32):
            raise InvalidInput(f"Options.keep_fp32 must be a tuple of name patterns, found {self.keep_fp32!r}")
        if self.plan_cache is not None and not isinstance(self.plan_cache, str):
            raise InvalidInput(f"Options.plan_cache must be the path of a directory, found {self.plan_cache!r}")
        if self.machine is not None and not isinstance(self.machine, str):
            raise InvalidInput(f"Options.machine must be a machine's name or a TOML file, found {self.machine!r}")


def _instead(optimizer: str, name: str, given: Mapping[str, object]) -> str:
    """Say what to write in place of a setting that only PyTorch's optimizer of the same name has."""
    if name in _HOW_TORCH_STEPS or not given[name]:
        why = "steps are those of PyTorch's fused optimizer" if name in _HOW_TORCH_STEPS else "it is off"
        return f". Leave {name} out: {why}"
    shown = {each: "..." if each == "groups" else repr(value) for each, value in given.items()}
    settings = "".join(f", {each}={value}" for each, value in shown.items() if each not in _HOW_TORCH_STEPS)
    return f". PyTorch's own code has it: TorchOptimizer(torch.optim.{optimizer}{settings})"


def _bytes(what: str, size: int | str | None, least: int = 0) -> None:
    try:
        count = least if size is None else parse_bytes(size)
    except InvalidInput as error:
        raise InvalidInput(f"{what}: {error}") from None
    if count < least:
        raise InvalidInput(f"{what} must be at least {least}, found {shown(size)}")


def _kind(value: object) -> str:
    return repr(value) if isinstance(value, int | float | str) else f"a {type(value).__name__}"


def _number(what: str, value: object, *, below: float = math.inf) -> None:
    if not is_finite(value) or not 0 <= value < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise InvalidInput(f"{what} must be a finite number of at least 0{limit}, found {shown(value)}")


def _check(optimizer: object, lr: object, weight_decay: object, groups: object) -> None:
    _number("lr", lr)
    _number("weight_decay", weight_decay)
    known = {row.name for row in fields(optimizer)}  # type: ignore[arg-type]  # one of the dataclasses above
    for group in _check_groups(groups):
        if group.kind is not None:
            raise InvalidInput(
                f"Group.kind is for a TorchOptimizer; {type(optimizer).__name__} has one class for all parameters"
            )
        for name in group.overrides:
            if name not in known:
                raise InvalidInput(f"{type(optimizer).__name__} has no {name!r} for a Group to set")
        replace(optimizer, groups=(), **group.overrides)  # type: ignore[type-var]  # checks the values


def _check_groups(groups: object) -> tuple[Group, ...]:
    if not isinstance(groups, tuple) or not all(isinstance(group, Group) for group in groups):
        raise InvalidInput(f"groups must be a tuple of Group(match=..., ...), found {groups!r}")
    for group in groups:
        if not callable(group.match):
            raise InvalidInput(f"Group.match must be a function of name and parameter, found {group.match!r}")
        _check_takes_two(group.match)
        if not isinstance(group.settings, Mapping | None):
            raise InvalidInput(f"Group.settings must be a dictionary of settings by name, found {group.settings!r}")
        if not isinstance(group.kind, type | None):
            raise InvalidInput(f"Group.kind must be an optimizer class, found {group.kind!r}")
    return groups


def _check_takes_two(match: Match) -> None:
    try:
        signature = inspect.signature(match)
    except ValueError:  # some functions in C have no signature
        return
    try:
        signature.bind("name", None)
    except TypeError:
        raise InvalidInput(
            f"Group.match is called with a parameter's name and the parameter, as lambda name, parameter: ...; found "
            f"one of {signature}"
        ) from None


def _check_adam(betas: object, eps: object) -> None:
    if not isinstance(betas, tuple) or len(betas) != 2:
        raise InvalidInput(f"betas must be a pair of numbers, found {betas!r}")
    for beta in betas:
        _number("betas", beta, below=1.0)
    _number("eps", eps)
