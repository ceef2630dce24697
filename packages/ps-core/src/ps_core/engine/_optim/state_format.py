"""The state that the optimizer keeps for each parameter, read and written in the format of torch's optimizers.

[Note: one format]
``param_groups[0]`` holds the parameters that no `Group` matches, ``param_groups[i]`` those of ``groups[i - 1]``, empty
ones too; with no groups that is ``torch.optim.AdamW(model.parameters())``, frozen parameters included (they never have
a state). ``state_dict()`` is what ``torch.optim.AdamW``, ``Adam`` or ``SGD`` with the same groups would give, and each
loads the other's. Two things are added, which torch's optimizers never read:

    state[index]["master"]      the fp32 parameter, where the model's own ``state_dict`` rounds it to 16 bits
    "loss_scale"                ``torch.amp.GradScaler``'s state, in fp16; in ``param_groups[0]`` too, for of what is
                                beside the groups ``torch.distributed.checkpoint.state_dict`` keeps nothing

torch's Adam takes any entry that is not empty for one with moments. So a parameter that has a master, but was never
stepped, has ``step`` 0 and moments of zeros: what torch itself begins with. torch's SGD needs no such filling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ps_core._errors import InvalidInput
from ps_core._program import Kind
from ps_core.engine._optim.settings import OptimizerBackend, StepRule

if TYPE_CHECKING:
    from ps_core.engine._parameters.param_state import ParamState

MOMENTS = {StepRule.ADAM: {"exp_avg": Kind.M, "exp_avg_sq": Kind.V}, StepRule.SGD: {"momentum_buffer": Kind.M}}
STEP, MASTER = "step", "master"


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One parameter's state, checked."""

    steps: int
    moments: dict[Kind, torch.Tensor]
    """Empty: as before the first step."""
    master: torch.Tensor | None
    """None: the parameter keeps the one it has."""


class StateFormat:
    """Read, check and write the state of single parameters; see [Note: one format]."""

    def __init__(self, gradients: OptimizerBackend, rule: StepRule, optimizer_name: str) -> None:
        self._gradients, self._rule, self._name = gradients, rule, optimizer_name
        self.moments = MOMENTS[rule]

    def keys(self, record: ParamState, *, momentum: bool, master: bool) -> tuple[str, ...]:
        """Name the values in a parameter's entry; ``momentum``: its group has one; ``master``: it holds the master."""
        if not record.trainable:
            return ()
        last = (MASTER,) if master else ()
        if self._rule is StepRule.ADAM:
            return (STEP, *self.moments, *last) if record.steps or master else ()
        return (*self.moments, *last) if record.steps and momentum else last

    def read(self, record: ParamState, key: str) -> torch.Tensor:
        """Copy one value into CPU memory."""
        if key == STEP:
            return torch.tensor(float(record.steps))
        return self._gradients.read_state(record, Kind.P32 if key == MASTER else self.moments[key])

    def check(self, record: ParamState, given: Mapping[str, Any]) -> StateEntry:
        """Refuse an entry that is not this optimizer's, or does not fit the parameter."""
        entry = {key: value for key, value in given.items() if not _absent(value)}
        master = entry.pop(MASTER, None)
        if not record.trainable:
            if self.moments.keys() & entry.keys():
                raise InvalidInput(
                    f"there is a state for {record.name!r}, which is frozen; unfreeze it before chunked()"
                )
            return StateEntry(0, {}, None)
        if master is not None:
            master = shaped(f"the master of {record.name!r}", master, record)
            if master.dtype.itemsize < 4:
                master = None  # torch's optimizers cast what they load to a parameter's 16 bits: no better than weights
        if not entry or (self._rule is StepRule.SGD and not self.moments.keys() & entry.keys()):
            return StateEntry(0, {}, master)
        absent = sorted({*self.moments, *((STEP,) if self._rule is StepRule.ADAM else ())} - entry.keys())
        if absent:
            raise InvalidInput(
                f"the state of {record.name!r} has no {absent[0]!r}, found {sorted(entry)}: is it {self._name}'s?"
            )
        moments = {kind: shaped(f"{key} of {record.name!r}", entry[key], record) for key, kind in self.moments.items()}
        return StateEntry(step_of(record, entry[STEP]) if self._rule is StepRule.ADAM else 1, moments, master)

    def write(self, record: ParamState, entry: StateEntry) -> None:
        """Replace a parameter's moments and count of steps; masters are the caller's."""
        moments = entry.moments
        if record.steps and not moments:
            moments = {kind: torch.zeros(record.shape) for kind in self.moments.values()}
        for kind, value in moments.items():
            self._gradients.write_state(record, kind, on_cpu(value))
        record.steps = entry.steps

    def set(self, record: ParamState, key: str, value: Any) -> None:
        """Replace one value of a parameter."""
        if not record.trainable:
            raise InvalidInput(f"{record.name!r} is frozen and has no state: unfreeze it before chunked()")
        if key == STEP and self._rule is StepRule.ADAM:
            record.steps = step_of(record, value)
        elif key == MASTER:
            self._gradients.write_state(record, Kind.P32, on_cpu(shaped(f"{key} of {record.name!r}", value, record)))
        elif key in self.moments:
            shaped(f"{key} of {record.name!r}", value, record)
            self._gradients.write_state(record, self.moments[key], on_cpu(value))
            if self._rule is StepRule.SGD:
                record.steps = max(1, record.steps)
        else:
            known = [*((STEP,) if self._rule is StepRule.ADAM else ()), *self.moments, MASTER]
            raise InvalidInput(
                f"optimizer.state has no place for {key!r} of {record.name!r}, only for {known}: keep it in a "
                "dictionary of your own, by the parameter"
            )


def _absent(value: Any) -> bool:
    """True for None, and for what torch's `_unflatten_optim_state_dict` puts where a value is missing: ``{}``."""
    return value is None or (isinstance(value, dict) and not value)


def step_of(record: ParamState, value: Any) -> int:
    """Read a count of steps from a number, or a tensor of one."""
    try:
        count = float(value)
    except (TypeError, ValueError, RuntimeError):
        count = -1.0
    if not count >= 0 or count != int(count):
        raise InvalidInput(f"step of {record.name!r} must be a whole number of at least 0, found {value!r}")
    return int(count)


def shaped(what: str, value: Any, record: ParamState) -> torch.Tensor:
    """Refuse a value that is no tensor of the parameter's shape."""
    if not isinstance(value, torch.Tensor) or value.shape != record.shape:
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
        raise InvalidInput(f"{what} must be a tensor of shape {tuple(record.shape)}, found {found}")
    return value


def on_cpu(value: torch.Tensor) -> torch.Tensor:
    """Convert a value to fp32 in CPU memory."""
    return value.detach().to("cpu", torch.float32)
