"""Try a class of ``torch.optim``, and make its steps: PyTorch's own code, over views of a group's master and states.

[Note: piece by piece]
An element-wise optimizer gives an element the same bits wherever its vector is cut. So neighbouring parameters are one
vector here, and a shard is stepped like a whole. A step goes through its vector piece by piece, so what PyTorch
allocates meanwhile has the size of a few pieces. Whether a class is element-wise is tried on a small matrix, and not
listed. The trial also tells the states. Tensors of the parameter's shape have slots; single values are kept for each
parameter.

[Note: whole tensors]
A class that is not element-wise, as Adafactor and Muon, is tried again on the whole matrix. Then it gets each parameter
in its shape. Its states may have other shapes. Those of a parameter are packed one after the other into the
parameter's elements of the first slots: Adafactor's sums of rows and columns take one slot together. A state's shape
follows from the parameter's. A step of a small tensor, whose sizes all differ, tells the size of each dimension.

[Note: first steps]
PyTorch makes states within the first step, some from the gradient. So in the first step of a parameter each piece is
given none, and what PyTorch made is copied into the slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from ps_core._errors import InvalidInput
from ps_core._extents import STATES, Kind
from ps_core.engine._optim.settings import Progress, Scalars, StatePlace

FREE = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""The settings that change how torch computes a step, and not the result."""
PIECE_NUMEL, PIECE_NUMEL_ON_CARD = 2**18, 2**22
"""Elements of a piece. On the CPU they stay in its cache; on a card each piece costs a few launches."""
_SIDE, _TRIALS, _TRIAL_PIECE = 16, 3, 64
"""Rows and columns of the matrix, steps, and elements of a piece, that a class is tried with."""
_SIZES = (3, 5, 2, 7, 11, 13)
"""Sizes of the tensor that tells the shapes of states; a parameter has at most so many dimensions."""
_RESERVED = ("masters", "weights", "buffers", "extra", "master")
"""Names that a state must not have: checkpoints and state dicts use them for something else."""
_Steps: TypeAlias = list[tuple[torch.Tensor, dict[str, Any]]]
"""A parameter after each step, and its state (any: tensors and numbers)."""


class TorchStepper:
    """A class with the settings of one param group, tried."""

    def __init__(self, kind: type, given: dict[str, Any], name: str) -> None:
        self._kind, self.name = kind, name
        self._given = {key: value for key, value in given.items() if key not in FREE}
        made = self._call("made", lambda: kind([_matrix(0)], **given))
        self.defaults = {key: value for key, value in made.param_groups[0].items() if key != "params"}
        self._values = tuple((key, plain_value(key, value)) for key, value in self.defaults.items() if key not in FREE)
        self.names: tuple[str, ...] = ()
        """Of all values that are kept for a matrix."""
        self.scalars: dict[str, torch.dtype | type] = {}
        """Of those that are one value, and its type."""
        self.whole = False
        """True if the class needs a parameter in its shape; see [Note: whole tensors]."""
        self._dimensions: dict[int, dict[str, tuple[int | None, ...]]] = {}
        self.slots: dict[str, Kind] = {}
        """Where the states of an element-wise class are."""
        self._try()

    def __repr__(self) -> str:
        return self.name

    def places(self, shape: Sequence[int]) -> dict[str, StatePlace]:
        """Return where the states of a parameter of this shape are; raise `InvalidInput` if it cannot be stepped."""
        if not self.whole:
            return {name: StatePlace(kind, 0, tuple(shape)) for name, kind in self.slots.items()}
        found, row, first, numel = {}, 0, 0, math.prod(shape)
        for name, dimensions in self._dimensions_of(len(shape)).items():
            own = tuple(1 if each is None else shape[each] for each in dimensions)
            size = math.prod(own)
            if first and first + size > numel:
                row, first = row + 1, 0
            if size > numel or row == len(STATES):
                raise InvalidInput(f"{self.name} keeps more than {len(STATES)} times a parameter of {tuple(shape)}")
            found[name] = StatePlace(STATES[row], first, own)
            first += size
        return found

    def use_slots(self, slots: Mapping[str, Kind]) -> None:
        """Keep each state of an element-wise class where all groups have it."""
        self.slots = {name: slots[name] for name in self.slots}

    def _dimensions_of(self, count: int) -> dict[str, tuple[int | None, ...]]:
        """Return which of a parameter's ``count`` dimensions each dimension of a state has; None: it is 1."""
        if count > len(_SIZES):
            raise InvalidInput(f"{self.name} is tried with at most {len(_SIZES)} dimensions, found {count}")
        if count not in self._dimensions:
            sizes = _SIZES[:count]
            tensor = torch.ones(sizes, dtype=torch.float32, device="cpu")
            what = f"stepped with a tensor of shape {sizes}"
            made = self._call(what, lambda: self.step(tensor, tensor.clone(), self._values, {}))
            found = {}
            for name, value in made.items():
                if name in self.scalars or value is None:
                    continue
                if not _is_state(value) or any(size != 1 and size not in sizes for size in value.shape):
                    raise self._refusal(f"the shape of its state {name!r} does not follow from the parameter's")
                found[name] = tuple(sizes.index(size) if size != 1 else None for size in value.shape)
            self._dimensions[count] = found
        return self._dimensions[count]

    def _try(self) -> None:
        """Step a matrix in pieces, or else whole; raise `InvalidInput` unless one is what the class itself does."""
        ending = "; use a class that needs only a dense gradient, as torch.optim.AdamW"
        steps = self._call("stepped with a dense gradient and no closure", lambda: list(self._steps()), ending)
        self._sort(steps[0][1])
        if self.whole or not self._same(steps):
            self.whole = True
            if not self._same(steps):
                raise self._refusal(
                    "a step that begins with its states differs from its own, so it counts or draws numbers elsewhere, "
                    "or keeps single values that depend on gradients"
                )

    def _steps(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Step a matrix by the class itself; yield the matrix and its state after each step."""
        parameter = _matrix(0)
        optimizer = self._optimizer(parameter, self._values)
        for number in range(_TRIALS):
            parameter.grad = _matrix(number + 1)
            _step(optimizer)
            state = optimizer.state[parameter]
            yield parameter.clone(), {key: _copied(value) for key, value in state.items()}

    def _same(self, expected: _Steps) -> bool:
        """Return True if steps that begin with the states are those of the class itself."""
        shape = (_SIDE, _SIDE)
        places = self.places(shape)
        rows = [_matrix(0) if self.whole else _matrix(0).flatten()]
        rows += [torch.empty(_SIDE**2, dtype=torch.float32, device="cpu") for _ in STATES]
        settings, progress = self.settings(self._values), Progress(0)
        for number, (parameter, state) in enumerate(expected):
            try:
                scalars = settings.after(progress)
                settings.step(progress, rows, _matrix(number + 1).flatten(), None, 1.0, piece_numel=_TRIAL_PIECE)
            except Exception:  # a class that is not ours may raise anything
                return False
            progress = Progress(number + 1, scalars)
            same = torch.equal(parameter.flatten(), rows[0].flatten()) and all(
                torch.equal(state[name].flatten(), place.of(rows[1:])) for name, place in places.items()
            )
            if not same or dict(scalars) != {name: float(state[name]) for name in self.scalars}:
                return False
        return True

    def _sort(self, state: Mapping[str, Any]) -> None:
        """Note which values of a matrix's state are single; ``whole`` if others have not its shape."""
        for name, value in state.items():
            single = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and not value.dim())
            if single:
                self.scalars[name] = value.dtype if isinstance(value, torch.Tensor) else type(value)
            elif value is not None and not _is_state(value):
                raise self._refusal(f"its state {name!r} is neither one value nor a tensor in fp32")
            elif value is not None and value.shape != (_SIDE, _SIDE):
                self.whole = True
            if name in _RESERVED or not name.isidentifier():
                raise InvalidInput(f"{self.name} has a state {name!r}, a name that checkpoints use otherwise")
            self.names += (name,) if value is not None else ()
        if len(self.names) - len(self.scalars) > len(STATES):
            raise self._refusal(f"it keeps {', '.join(self.names)}: at most {len(STATES)} states can be managed")
        self.slots = dict(zip((name for name in self.names if name not in self.scalars), STATES, strict=False))

    def _refusal(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"{self.name} cannot be managed: {why}. Use a class whose state of a parameter is all that it goes on "
            "from, as RMSprop's is, or keep this one for a model that fits without chunked()"
        )

    def _call(self, what: str, function: Any, ending: str = "") -> Any:
        try:
            return function()
        except InvalidInput:
            raise
        except Exception as error:  # a class that is not ours may raise anything
            raise InvalidInput(f"{self.name} could not be {what}: {error}{ending}") from error

    def _optimizer(self, parameter: torch.Tensor, values: Sequence[tuple[str, Any]]) -> torch.optim.Optimizer:
        """Make torch's optimizer of one tensor, with these settings."""
        optimizer: torch.optim.Optimizer = self._kind([parameter], **self._given)
        group = optimizer.param_groups[0]
        group.update((name, value.tensor() if isinstance(value, TensorSetting) else value) for name, value in values)
        if "foreach" in group:
            group["foreach"] = False
        return optimizer

    def settings(self, values: Any) -> TorchSettings:
        """Return the settings of a param group with these values."""
        return TorchSettings(self, values, self.whole)

    def restored(self, name: str, value: float) -> Any:
        """Return a single value as the class keeps it (any: a tensor, or a number)."""
        kind = self.scalars[name]
        return torch.tensor(value, dtype=kind, device="cpu") if isinstance(kind, torch.dtype) else kind(value)

    def step(self, parameter: torch.Tensor, gradient: torch.Tensor, values: Any, state: Mapping[str, Any]) -> Any:
        """Step one piece in place; return its state. An empty one: the first step."""
        optimizer = self._optimizer(parameter, values)
        parameter.grad = gradient
        if state:
            optimizer.state[parameter] = dict(state)
        _step(optimizer)
        parameter.grad = None
        return optimizer.state[parameter]

    def sample(self, value: float) -> torch.Tensor:
        """Return a small tensor that the class steps."""
        return torch.full((2, 2) if self.whole else (2,), value, dtype=torch.float32, device="cpu")


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """The settings of one param group at a step; see `StepSettings`."""

    stepper: TorchStepper
    values: tuple[tuple[str, Any], ...]
    whole: bool

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
        """Make the step; see [Note: piece by piece]. ``piece_numel`` 0: what suits the memory."""
        master, *states = rows
        if self.whole:
            self._step(progress, master, states, _like(gradient, master), target, factor)
            return
        numel = piece_numel or (PIECE_NUMEL_ON_CARD if master.is_cuda else PIECE_NUMEL)
        for start in range(0, master.numel(), numel):
            span = slice(start, start + numel)
            pieces = [state[span] for state in states]
            to = None if target is None else target[span]
            self._step(progress, master[span], pieces, gradient[span], to, factor)

    def _step(
        self,
        progress: Progress,
        master: torch.Tensor,
        states: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        target: torch.Tensor | None,
        factor: float,
    ) -> None:
        """Step one piece, or one parameter in its shape."""
        row = gradient.float()
        places = self.stepper.places(master.shape)
        kept = {name: _shaped(place.of(states), place, master) for name, place in places.items()}
        given: dict[str, Any] = {}
        if progress.steps:
            given = {**{name: self.stepper.restored(name, value) for name, value in progress.scalars}, **kept}
        made = self.stepper.step(master, row if factor == 1.0 else row * factor, self.values, given)
        for name, view in kept.items():
            if made[name] is not given.get(name):
                view.copy_(made[name])
        if target is not None:
            _like(target, master).copy_(master)

    def after(self, progress: Progress) -> Scalars:
        """Return the scalars after the step; see `_after`."""
        return _after(self.stepper, self.values, progress)

    def values_by_name(self) -> dict[str, Any]:
        """Return the settings by name."""
        return dict(self.values)


def _like(flat: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return a vector in memory order in a master's shape and strides."""
    return flat.as_strided(master.shape, master.stride(), flat.storage_offset())


def _shaped(flat: torch.Tensor, place: StatePlace, master: torch.Tensor) -> torch.Tensor:
    """Return a state in its shape; one of the parameter's shape has its strides, too."""
    return _like(flat, master) if place.shape == master.shape else flat.view(place.shape)


@lru_cache(maxsize=256)
def _after(stepper: TorchStepper, values: Any, progress: Progress) -> Scalars:
    """Return what single values become in a step: they depend on settings alone, so that a few elements tell."""
    parameter, state = stepper.sample(0.0), {}
    if progress.steps:
        state = {name: stepper.restored(name, value) for name, value in progress.scalars}
        places = stepper.places(parameter.shape)
        state |= {name: torch.zeros(place.shape, dtype=torch.float32, device="cpu") for name, place in places.items()}
    made = stepper.step(parameter, stepper.sample(1.0), values, state)
    return tuple((name, float(made[name])) for name in stepper.scalars)


@lru_cache(maxsize=64)
def kept(stepper: TorchStepper, values: Any) -> tuple[str, ...]:
    """Name what a first step with these settings keeps."""
    made = stepper.step(stepper.sample(0.0), stepper.sample(1.0), values, {})
    return tuple(name for name, value in made.items() if value is not None)


@dataclass(frozen=True, slots=True)
class TensorSetting:
    """A setting that is a tensor of one number: PyTorch rounds what it computes from it to the tensor's type."""

    number: float
    dtype: torch.dtype
    shape: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """Return the setting as a new tensor."""
        return torch.full(self.shape, self.number, dtype=self.dtype, device="cpu")


def plain_value(name: str, value: Any) -> Any:
    """Return a setting of a param group as what can be compared (any: settings of any class)."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise InvalidInput(f"{name} must be one number when the optimizer steps, found {value!r}")
        return TensorSetting(value.item(), value.dtype, tuple(value.shape))
    return tuple(value) if isinstance(value, list) else value


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Step without the hooks that users register for all optimizers, which are for theirs, and not for these."""
    function: Any = type(optimizer).step
    if getattr(function, "hooked", False):
        function = function.__wrapped__
    function(optimizer)


def _is_state(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _matrix(seed: int) -> torch.Tensor:
    """Return random numbers, not of the default type and on the default device, which are the user's."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(_SIDE, _SIDE, generator=generator, dtype=torch.float32, device="cpu")
