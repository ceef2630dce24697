"""Step by ``torch.optim`` optimizers: PyTorch's own code, over views of a group's master and states.

[Note: piece by piece]
An element-wise optimizer gives an element the same bits wherever its vector is cut. So adjacent parameters are one
vector here, and a shard is stepped like a whole. A step goes through its vector piece by piece. So PyTorch's temporary
memory is as large as a few pieces. Whether a class is element-wise is tried on a small matrix, and not listed. The
trial also shows the states: tensors of the parameter's shape have slots, single values are kept with each parameter.

[Note: first steps]
PyTorch makes states within the first step, some from the gradient. So in a parameter's first step the pieces have no
states. Those that PyTorch made are copied into the slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ps_core._errors import InvalidInput
from ps_core._options import TorchOptimizer
from ps_core._program import STATES, Kind
from ps_core.engine._optim.settings import Progress, Scalars

FREE = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that change how PyTorch computes a step, and not the result."""
PIECE_NUMEL, PIECE_NUMEL_ON_CARD = 2**18, 2**22
"""Elements of a piece. On the CPU they stay in its cache; on CUDA each piece costs a few launches."""
_SIDE, _TRIALS = 16, 3
"""Rows and columns of the matrix, and steps, that a class is tried with."""
_RESERVED = ("masters", "weights", "buffers", "extra", "master")
"""Names that a state must not have: checkpoints and state dicts use them for something else."""


class TorchRule:
    """Implement the rule of one `TorchOptimizer`; see `OptimizerRule`."""

    starts_from_zeros = False

    def __init__(self, spec: TorchOptimizer) -> None:
        self.spec = spec
        kind = spec.kind
        own = kind is getattr(torch.optim, kind.__name__, None)
        self.name = f"torch.optim.{kind.__name__}" if own else f"{kind.__module__}.{kind.__qualname__}"
        if not issubclass(kind, torch.optim.Optimizer):
            raise InvalidInput(f"TorchOptimizer expects a subclass of torch.optim.Optimizer, found {self.name}")
        given = [dict(spec.settings), *({**spec.settings, **group.overrides} for group in spec.groups)]
        self._steppers = [TorchStepper(kind, each, self.name) for each in given]
        names = dict.fromkeys(name for stepper in self._steppers for name in stepper.states)
        if len(names) > len(STATES):
            raise InvalidInput(f"{self.name} keeps {', '.join(names)}: at most {len(STATES)} states can be managed")
        self.states: dict[str, Kind] = dict(zip(names, STATES, strict=False))
        self.kinds = len(names)
        self.defaults: dict[str, Any] = self._steppers[0].defaults
        self.groups = [stepper.defaults for stepper in self._steppers]

    def check(self, where: str, group: Mapping[str, Any]) -> None:
        """Do nothing: PyTorch implements every setting."""

    def read(self, index: int, group: Mapping[str, Any]) -> TorchSettings:
        """Read a param group; raise `InvalidInput` if its settings imply other states."""
        stepper = self._steppers[index]
        values = tuple((name, _value(name, group[name])) for name in stepper.defaults if name not in FREE)
        kept = _kept(stepper, values)
        if set(kept) != set(stepper.names):
            raise InvalidInput(
                f"param_groups[{index}] was changed so that {self.name} keeps {', '.join(kept) or 'nothing'} for each "
                f"parameter; memory was laid out for {', '.join(stepper.names) or 'nothing'}: give such settings to "
                "TorchOptimizer(...), and leave them"
            )
        places = tuple((name, list(self.states).index(name)) for name in stepper.states)
        return TorchSettings(stepper, values, places)

    def state_names(self, index: int, group: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Name the values that PyTorch's optimizer keeps for a parameter of a param group."""
        return self._steppers[index].names

    def scalar(self, progress: Progress, name: str) -> Any:
        """Return a single value as PyTorch's optimizer keeps it (any: a tensor, or a number)."""
        stepper = next(each for each in self._steppers if name in each.scalars)
        return stepper.restored(name, dict(progress.scalars)[name])

    def scalars(self, values: Mapping[str, float]) -> Scalars:
        """Return the values in the order in which a step returns them."""
        stepper = next(each for each in self._steppers if each.scalars.keys() == values.keys())
        return tuple((name, values[name]) for name in stepper.scalars)

    def for_torch(self, group: dict[str, Any]) -> dict[str, Any]:
        """Clear ``foreach`` unless the user set it: steps are those of PyTorch's loop over single tensors."""
        loops = "foreach" in group and group["foreach"] is None and not group.get("fused")
        return {**group, "foreach": False} if loops else group

    def __str__(self) -> str:
        return f"{self.spec!r} and {len(self.spec.groups)} groups"


class TorchStepper:
    """Step by a class with the settings of one param group, after a trial."""

    def __init__(self, kind: type, given: dict[str, Any], name: str) -> None:
        self._kind, self._name = kind, name
        self._given = {key: value for key, value in given.items() if key not in FREE}
        parameter = _matrix(0)
        whole = self._call("made", lambda: kind([parameter], **given))
        self.defaults = {key: value for key, value in whole.param_groups[0].items() if key != "params"}
        self.names: tuple[str, ...] = ()
        """Names of all values that are kept for a parameter."""
        self.states: tuple[str, ...] = ()
        """Names of those with the parameter's shape."""
        self.scalars: dict[str, torch.dtype | type] = {}
        """Names of single values, and their types."""
        self._try(parameter)

    def __repr__(self) -> str:
        return self._name

    def _try(self, parameter: torch.Tensor) -> None:
        """Step a matrix whole, and in pieces; raise `InvalidInput` unless the results are equal."""
        values = tuple((key, _value(key, value)) for key, value in self.defaults.items() if key not in FREE)
        whole, flat = self._optimizer(parameter, values), parameter.flatten().clone()
        rows, progress = [flat], Progress(0)
        for number in range(_TRIALS):
            parameter.grad = _matrix(number + 1)
            self._call("stepped with a dense gradient and no closure", lambda: _step(whole))
            state = whole.state[parameter]
            if not number:
                self._sort(state, parameter.shape)
                rows += [torch.empty_like(flat) for _ in self.states]
            settings = TorchSettings(self, values, tuple((name, place) for place, name in enumerate(self.states)))
            try:
                scalars = settings.after(progress)
                settings.step(progress, rows, _matrix(number + 1).flatten(), None, 1.0, piece_numel=64)
            except Exception as error:  # any exception of a class that needs matrices
                raise self._not_element_wise(f"parts of a matrix cannot be stepped ({error})") from error
            progress = Progress(number + 1, scalars)
            expected = [parameter, *(state[name] for name in self.states)]
            same = all(torch.equal(one.flatten(), row) for one, row in zip(expected, rows, strict=True))
            if not same or dict(scalars) != {name: float(state[name]) for name in self.scalars}:
                raise self._not_element_wise("it steps a matrix otherwise than parts of it")

    def _sort(self, state: Mapping[str, Any], shape: torch.Size) -> None:
        """Note which values of a parameter's state have its shape, and which are single."""
        for name, value in state.items():
            single = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and not value.dim())
            if single:
                self.scalars[name] = value.dtype if isinstance(value, torch.Tensor) else type(value)
            elif isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (shape, torch.float32):
                self.states += (name,)
            elif value is not None:
                raise self._not_element_wise(f"its state {name!r} has neither the parameter's shape nor one value")
            if name in _RESERVED or not name.isidentifier():
                raise InvalidInput(f"{self._name} has a state {name!r}, a name that checkpoints use otherwise")
            self.names += (name,) if value is not None else ()

    def _not_element_wise(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"{self._name} cannot be managed: {why}. A group's parameters are stepped as one vector, and with several "
            "processes each has a part of it, so an optimizer must treat each element alone, as RMSprop does; use one "
            "that does, or keep this one for a model that fits without chunked()"
        )

    def _call(self, what: str, function: Any) -> Any:
        try:
            return function()
        except Exception as error:  # whatever a class of somebody else's raises
            raise InvalidInput(f"{self._name} could not be {what}: {error}") from error

    def _optimizer(self, parameter: torch.Tensor, values: Scalars) -> torch.optim.Optimizer:
        """Make PyTorch's optimizer of one tensor, with these settings."""
        optimizer: torch.optim.Optimizer = self._kind([parameter], **self._given)
        group = optimizer.param_groups[0]
        group.update(values)
        if "foreach" in group:
            group["foreach"] = False
        return optimizer

    def restored(self, name: str, value: float) -> Any:
        """Return a single value as the class keeps it (any: a tensor, or a number)."""
        kind = self.scalars[name]
        return torch.tensor(value, dtype=kind, device="cpu") if isinstance(kind, torch.dtype) else kind(value)

    def step(self, parameter: torch.Tensor, gradient: torch.Tensor, values: Any, state: Mapping[str, Any]) -> Any:
        """Step one piece in place; return its state. An empty ``state``: the first step."""
        optimizer = self._optimizer(parameter, values)
        parameter.grad = gradient
        if state:
            optimizer.state[parameter] = dict(state)
        _step(optimizer)
        parameter.grad = None
        return optimizer.state[parameter]


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """The settings of one param group at a step; see `StepSettings`."""

    stepper: TorchStepper
    values: tuple[tuple[str, Any], ...]
    places: tuple[tuple[str, int], ...]
    """The row of each state, counted after the master."""

    def step(
        self,
        progress: Progress,
        rows: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        target: torch.Tensor | None,
        factor: float,
        *,
        piece_numel: int = 0,
    ) -> None:
        """Make the step; see [Note: piece by piece]. ``piece_numel`` 0: choose by the memory's kind."""
        master, *states = rows
        numel = piece_numel or (PIECE_NUMEL_ON_CARD if master.is_cuda else PIECE_NUMEL)
        for start in range(0, master.numel(), numel):
            span = slice(start, start + numel)
            piece, row = master[span], gradient[span].float()
            given = self._state(progress, {name: states[place][span] for name, place in self.places})
            made = self.stepper.step(piece, row if factor == 1.0 else row * factor, self.values, given)
            for name, place in self.places:
                if made[name] is not given.get(name):
                    states[place][span].copy_(made[name])
            if target is not None:
                target[span].copy_(piece)

    def after(self, progress: Progress) -> Scalars:
        """Return the scalars after the step; see `_after`."""
        return _after(self.stepper, self.values, self.places, progress)

    def values_by_name(self) -> dict[str, Any]:
        """Return the settings by name."""
        return dict(self.values)

    def _state(self, progress: Progress, states: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return the state for PyTorch's optimizer; empty for a first step."""
        if not progress.steps:
            return {}
        return {**{name: self.stepper.restored(name, value) for name, value in progress.scalars}, **states}


@lru_cache(maxsize=256)
def _after(stepper: TorchStepper, values: Any, places: tuple[tuple[str, int], ...], progress: Progress) -> Scalars:
    """Return the single values after a step: they depend on settings alone, so two elements suffice."""
    state = {}
    if progress.steps:
        state = {name: stepper.restored(name, value) for name, value in progress.scalars}
        state |= {name: _pair(0.0) for name, _ in places}
    made = stepper.step(_pair(0.0), _pair(1.0), values, state)
    return tuple((name, float(made[name])) for name in stepper.scalars)


@lru_cache(maxsize=64)
def _kept(stepper: TorchStepper, values: Any) -> tuple[str, ...]:
    """Name the values that a first step with these settings keeps."""
    made = stepper.step(_pair(0.0), _pair(1.0), values, {})
    return tuple(name for name, value in made.items() if value is not None)


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Step without the hooks that users register for all optimizers: those are for the user's own."""
    function: Any = type(optimizer).step
    if getattr(function, "hooked", False):
        function = function.__wrapped__
    function(optimizer)


# Not of the default type and on the default device, which are the user's.


def _matrix(seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(_SIDE, _SIDE, generator=generator, dtype=torch.float32, device="cpu")


def _pair(value: float) -> torch.Tensor:
    return torch.full((2,), value, dtype=torch.float32, device="cpu")


def _value(name: str, value: Any) -> Any:
    """Convert a setting of a param group for comparison (any: settings of any class)."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise InvalidInput(f"{name} must be one number when the optimizer steps, found {value!r}")
        return value.item()
    return tuple(value) if isinstance(value, list) else value
