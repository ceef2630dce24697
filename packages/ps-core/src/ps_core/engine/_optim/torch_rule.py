"""Steps of ``torch.optim`` optimizers: the classes of a `TorchOptimizer`, their states and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ps_core._errors import InvalidInput
from ps_core._extents import STATES, Kind
from ps_core._options import TorchOptimizer
from ps_core.engine._optim.settings import Progress, Scalars, StatePlace
from ps_core.engine._optim.torch_stepper import FREE, TorchSettings, TorchStepper, kept, plain_value


class TorchRule:
    """Implement the rule of one `TorchOptimizer`; see `OptimizerRule`."""

    starts_from_zeros = False

    def __init__(self, spec: TorchOptimizer, parameters: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        """``parameters``: of the model, by name; those that are trained must be ones that the classes can step."""
        self.spec = spec
        kinds = [spec.kind, *(group.kind or spec.kind for group in spec.groups)]
        self.name = " and ".join(dict.fromkeys(map(_name, kinds)))
        given = [dict(spec.settings)]
        given += [{**({} if group.kind else spec.settings), **group.overrides} for group in spec.groups]
        for kind in kinds:
            if not issubclass(kind, torch.optim.Optimizer):
                raise InvalidInput(f"TorchOptimizer expects a subclass of torch.optim.Optimizer, found {_name(kind)}")
        self._steppers = [TorchStepper(kind, each, _name(kind)) for kind, each in zip(kinds, given, strict=True)]
        self.whole = any(stepper.whole for stepper in self._steppers)
        self.states: dict[str, Kind] = {}
        if self.whole or len(set(kinds)) > 1:
            rows = max([len(stepper.slots) for stepper in self._steppers if not stepper.whole], default=0)
            self.kinds = max(rows, self._rows_of(parameters))
            self.states = {f"states_{row}": kind for row, kind in enumerate(STATES[: self.kinds], 1)}
        else:
            self._share_slots()

    def _share_slots(self) -> None:
        """Give a state the same slot in all groups, and checkpoints its name."""
        names = dict.fromkeys(name for stepper in self._steppers for name in stepper.slots)
        if len(names) > len(STATES):
            raise InvalidInput(f"{self.name} keeps {', '.join(names)}: at most {len(STATES)} states can be managed")
        self.kinds, self.states = len(names), dict(zip(names, STATES, strict=False))
        for stepper in self._steppers:
            stepper.use_slots(self.states)

    def _rows_of(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Return how many slots the states of these parameters take; raise `InvalidInput` if one cannot be trained."""
        rows = 0
        for name, parameter in parameters:
            matches = (i for i, group in enumerate(self.spec.groups, 1) if group.match(name, parameter))
            index = next(matches, 0)
            try:
                places = self._places(index, name, parameter.shape)
            except InvalidInput:
                if parameter.requires_grad and parameter.is_floating_point():
                    raise
                continue
            rows = max([rows, *(STATES.index(place.kind) + 1 for place in places.values())])
        return rows

    def _places(self, index: int, name: str, shape: Sequence[int]) -> Mapping[str, StatePlace]:
        try:
            return self._steppers[index].places(shape)
        except InvalidInput as error:
            raise InvalidInput(
                f"{name!r} has shape {tuple(shape)}: {error}. Give such parameters another class, as in "
                "Group(match=lambda name, parameter: parameter.dim() != 2, kind=torch.optim.AdamW, lr=1e-3), or freeze "
                "them by requires_grad_(False)"
            ) from None

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the settings of the class, all of them."""
        return self._steppers[0].defaults

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the settings of each param group at the start."""
        return [stepper.defaults for stepper in self._steppers]

    def check(self, where: str, group: Mapping[str, Any]) -> None:
        """Do nothing: PyTorch implements every setting."""

    def add_group(self, group: Mapping[str, Any]) -> None:
        """Add a param group, whose settings may not imply other states; it has the class of the first one."""
        self._steppers.append(self._steppers[0])
        try:
            self.read(len(self._steppers) - 1, group)
        except InvalidInput:
            self._steppers.pop()
            raise

    def check_parameter(self, index: int, name: str, shape: Sequence[int]) -> None:
        """Raise `InvalidInput` if a parameter that is trained since cannot be stepped, or has no room for states."""
        for state, place in self._places(index, name, shape).items():
            if place.kind not in STATES[: self.kinds]:
                raise InvalidInput(
                    f"{name!r} of shape {tuple(shape)} has no room for its {state!r}: memory was laid out before it "
                    "was added. release(model) and call chunked again, which lays it out anew"
                )

    def read(self, index: int, group: Mapping[str, Any]) -> TorchSettings:
        """Read a param group; raise `InvalidInput` if its settings imply other states."""
        stepper = self._steppers[index]
        values = tuple((name, plain_value(name, group[name])) for name in stepper.defaults if name not in FREE)
        found = kept(stepper, values)
        if set(found) != set(stepper.names):
            raise InvalidInput(
                f"param_groups[{index}] was changed so that {stepper.name} keeps {', '.join(found) or 'nothing'} for "
                f"each parameter; memory was laid out for {', '.join(stepper.names) or 'no state'}: give such settings "
                "to TorchOptimizer(...), and leave them"
            )
        return stepper.settings(values)

    def places(
        self, index: int, shape: Sequence[int], group: Mapping[str, Any] | None = None
    ) -> Mapping[str, StatePlace]:
        """Return where the states of a parameter of this shape are, by torch's names."""
        return self._steppers[index].places(shape)

    def scalar_names(self, index: int) -> tuple[str, ...]:
        """Name the single values that torch's optimizer keeps for a parameter of a param group."""
        return tuple(self._steppers[index].scalars)

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


def _name(kind: type) -> str:
    own = kind is getattr(torch.optim, kind.__name__, None)
    return f"torch.optim.{kind.__name__}" if own else f"{kind.__module__}.{kind.__qualname__}"
