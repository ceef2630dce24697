"""Read and write each parameter's state in the format of PyTorch's optimizers.

[Note: one format]
``param_groups[0]`` holds the parameters that no `Group` matches, ``param_groups[i]`` those of ``groups[i - 1]``. Empty
groups are kept. Without groups that is ``torch.optim.AdamW(model.parameters())``. Frozen parameters are included, and
never have a state. ``state_dict()`` is what ``torch.optim.AdamW``, ``Adam`` or ``SGD`` with the same groups would
return, and each loads the other's. With a `TorchOptimizer` it is what its class would return. Two things are added,
which PyTorch's optimizers never read:

    state[index]["master"]      the fp32 parameter, where the model's own ``state_dict`` rounds it to 16 bits
    "loss_scale"                ``torch.amp.GradScaler``'s state, in fp16; also in ``param_groups[0]``, because
                                ``torch.distributed.checkpoint.state_dict`` keeps nothing beside the groups

PyTorch's Adam expects its states in any entry that is not empty. So a parameter that has a master, but was never
stepped, has ``step`` 0 and states of zeros: PyTorch's own initial values. PyTorch's SGD needs no such values. The
initial states of other classes are not known. There the masters of parameters that were never stepped are beside the
groups, as ``"masters"``, by the parameters' numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ps_core._errors import InvalidInput
from ps_core._extents import STATES, Kind
from ps_core.engine._optim.rules import OptimizerRule
from ps_core.engine._optim.settings import OptimizerBackend, Progress, Scalars, StatePlace

if TYPE_CHECKING:
    from ps_core.engine._parameters.param_state import ParamState

STEP, MASTER = "step", "master"
_UNFREEZE = "unfreeze it before chunked(), or call the model once, with gradients enabled, after requires_grad_(True)"


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One parameter's state, checked."""

    steps: int
    states: dict[str, torch.Tensor]
    """Empty: as before the first step."""
    master: torch.Tensor | None
    """The master; None: the parameter keeps its own."""
    scalars: Scalars = ()


class StateFormat:
    """Read, check and write the state of single parameters; see [Note: one format]."""

    def __init__(
        self,
        gradients: OptimizerBackend,
        rule: OptimizerRule,
        kept: Callable[[ParamState], tuple[str, ...]],
        places: Callable[[ParamState], tuple[tuple[str, ...], Mapping[str, StatePlace]]],
    ) -> None:
        """``kept``: names what a stepped parameter's entry holds.

        ``places``: names single values, and says where tensors are; both of whatever it may hold by other settings.
        """
        self._gradients, self._rule = gradients, rule
        self._kept, self._places = kept, places

    def keys(self, record: ParamState, *, master: bool) -> tuple[str, ...]:
        """Name the values in a parameter's entry; ``master``: it holds the master."""
        if not record.trainable:
            return ()
        kept, last = self._kept(record), (MASTER,) if master else ()
        begun = record.steps or (master and self._rule.starts_from_zeros and STEP in kept)
        return (*kept, *last) if begun else last

    def read(self, record: ParamState, key: str) -> Any:
        """Copy one value into CPU memory (any: a tensor, or a number where torch's optimizer has one)."""
        if key == MASTER:
            return self._gradients.read_state(record, Kind.P32)
        place = self._places(record)[1].get(key)
        if place is None:
            return self._rule.scalar(Progress(record.steps, record.scalars), key)
        return _cut(self._gradients.read_state(record, place.kind), place)

    def check(self, record: ParamState, given: Mapping[str, Any]) -> StateEntry:
        """Refuse an entry that is not this optimizer's, or does not fit the parameter."""
        entry = {key: value for key, value in given.items() if not _absent(value)}
        master = entry.pop(MASTER, None)
        if not record.trainable:
            stepped = STEP not in entry or step_of(record, entry[STEP])  # some classes begin with states of all
            if entry.keys() - {STEP} and stepped:
                raise InvalidInput(f"there is a state for {record.name!r}, which is frozen: {_UNFREEZE}")
            return StateEntry(0, {}, None)
        if master is not None:
            master = shaped(f"the master of {record.name!r}", master, record.shape)
            if master.dtype.itemsize < 4:
                master = None  # torch's optimizers cast what they load to a parameter's 16 bits: no better than weights
        numbers, places = self._places(record)
        if not entry or (STEP not in numbers and not places.keys() & entry.keys()):
            return StateEntry(0, {}, master)
        absent = sorted({*numbers, *places} - entry.keys())
        if absent:
            raise InvalidInput(
                f"the state of {record.name!r} has no {absent[0]!r}, found {sorted(entry)}: is it {self._rule.name}'s?"
            )
        found = {key: shaped(f"{key} of {record.name!r}", entry[key], places[key].shape) for key in places}
        steps = step_of(record, entry[STEP]) if STEP in numbers else 1
        single = {key: _number(record, key, entry[key]) for key in numbers}
        return StateEntry(steps, found, master, self._rule.scalars(single) if steps else ())

    def write(self, record: ParamState, entry: StateEntry) -> None:
        """Replace a parameter's states and count of steps; masters are the caller's."""
        if record.steps and not entry.states:
            for kind in STATES[: self._rule.kinds]:
                zeros = torch.zeros(record.shape, dtype=torch.float32, device="cpu")
                self._gradients.write_state(record, kind, zeros)
        for key, value in entry.states.items():
            self._write(record, key, value)
        record.set_progress(entry.steps, entry.scalars)

    def clear(self, record: ParamState) -> None:
        """Make a parameter's states as before its first step."""
        self.write(record, StateEntry(0, {}, None))
        self._gradients.compare_writes()

    def _write(self, record: ParamState, key: str, value: Any) -> None:
        """Write one state, which was checked."""
        place, given = self._places(record)[1][key], on_cpu(value)
        if place.shape != tuple(record.shape):
            whole = self._gradients.read_state(record, place.kind)
            _flat(whole, place).copy_(given.flatten())
            given = whole
        self._gradients.write_state(record, place.kind, given)

    def set(self, record: ParamState, key: str, value: Any) -> None:
        """Replace one value of a parameter."""
        if not record.trainable:
            raise InvalidInput(f"{record.name!r} is frozen and has no state: {_UNFREEZE}")
        numbers, places = self._places(record)
        possible = (*numbers, *places)
        if key == MASTER:
            value = shaped(f"{key} of {record.name!r}", value, record.shape)
            self._gradients.write_state(record, Kind.P32, on_cpu(value))
        elif key not in possible:
            raise InvalidInput(
                f"optimizer.state has no place for {key!r} of {record.name!r}, only for {[*possible, MASTER]}: keep it "
                "in a dictionary of your own, by the parameter"
            )
        elif not (record.steps or self._rule.starts_from_zeros):
            raise InvalidInput(
                f"{record.name!r} has no state before its first step, so {key!r} cannot be set alone: assign all of "
                f"{list(possible)}, as in optimizer.state[p] = {{...}}"
            )
        elif key in places:
            self._write(record, key, shaped(f"{key} of {record.name!r}", value, places[key].shape))
            if STEP not in numbers:
                record.set_progress(max(1, record.steps), record.scalars)
        else:
            steps = step_of(record, value) if key == STEP else record.steps
            single = {**dict(record.scalars), key: _number(record, key, value)}
            record.set_progress(steps, self._rule.scalars(single))
        self._gradients.compare_writes()


def _number(record: ParamState, key: str, value: Any) -> float:
    """Read a single value from a number, or a tensor of one."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInput(f"{key} of {record.name!r} must be one number, found {value!r}") from None


def _absent(value: Any) -> bool:
    """Return True for None and ``{}``, which PyTorch's `_unflatten_optim_state_dict` writes for a missing value."""
    return value is None or (isinstance(value, dict) and not value)


def step_of(record: ParamState, value: Any) -> int:
    """Read a count of steps from a number, or a tensor of one."""
    try:
        count = float(value)
    except (TypeError, ValueError, RuntimeError):
        count = -1.0
    if not (count >= 0 and count.is_integer()):
        raise InvalidInput(f"step of {record.name!r} must be a whole number of at least 0, found {value!r}")
    return int(count)


def shaped(what: str, value: Any, shape: Sequence[int]) -> torch.Tensor:
    """Refuse a value that is no tensor of this shape, or that cannot be converted to dense fp32."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape):
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
        raise InvalidInput(f"{what} must be a tensor of shape {tuple(shape)}, found {found}")
    if value.layout is not torch.strided or value.is_meta or value.is_quantized or value.is_complex():
        raise InvalidInput(
            f"{what} must be a dense tensor of real numbers, found {value.dtype}, {value.layout}, on {value.device}"
        )
    return value


def _flat(whole: torch.Tensor, place: StatePlace) -> torch.Tensor:
    """Return the part of a place in a dense tensor of the parameter's shape, as a vector."""
    return whole.as_strided((math.prod(place.shape),), (1,), place.first)


def _cut(whole: torch.Tensor, place: StatePlace) -> torch.Tensor:
    """Return one state out of a copy of all that its slot holds of a parameter."""
    if tuple(whole.shape) == place.shape:
        return whole
    return _flat(whole, place).clone().view(place.shape)


def on_cpu(value: torch.Tensor) -> torch.Tensor:
    """Convert a value to fp32 in CPU memory."""
    return value.detach().to("cpu", torch.float32)
