"""Track the copies of parameters that state dicts hold; in plain PyTorch these would be the parameters themselves.

Writing into such a copy would change the model in plain PyTorch, and changes nothing here. So it is detected, by
PyTorch's counter of changes in place. Tensors that share memory share that counter, even after one of them gets other
memory. So an empty tensor is kept for each copy, and tells of changes even after the copy is gone.
"""

from __future__ import annotations

import weakref

import torch

from ps_core._errors import UnsupportedParameter
from ps_core.engine._parameters.param_state import ParamState


class StateCopies:
    """Track the copies that one model's state dicts hold."""

    def __init__(self) -> None:
        self.made: dict[ParamState, torch.Tensor] = {}
        """Copies for the state dict under construction; tied parameters share theirs, as plain ones would."""
        self.given: list[tuple[ParamState, weakref.ref[torch.Tensor], torch.Tensor, int]] = []
        """Tensors given to state dicts that `check` has to compare."""

    def get(self, record: ParamState) -> torch.Tensor | None:
        """Return the copy that the state dict under construction has already; None: it has none."""
        return self.made.get(record.first)

    def add(self, record: ParamState, copy: torch.Tensor) -> torch.Tensor:
        """Track a copy, and return it."""
        counter = copy.detach()
        counter.data = copy.new_empty(0)
        self.given.append((record.first, weakref.ref(copy), counter, counter._version))
        self.made[record.first] = copy
        return copy

    def finish(self) -> None:
        """Note that the state dict is complete."""
        self.made.clear()

    def drop(self, record: ParamState) -> None:
        """Stop tracking the copy of a parameter that changes."""
        self.made.pop(record.first, None)

    def forget(self) -> None:
        """Stop tracking all copies: a state dict is loaded, so what was written into copies reaches the model."""
        self.given.clear()

    def check(self) -> None:
        """Raise if a copy was changed in place since it was made."""
        given, self.given = self.given, []
        for record, copy, counter, version in given:
            if counter._version != version:
                raise UnsupportedParameter(
                    f"{record.name!r} was changed in place in what state_dict() returned, which is a copy, so the "
                    "model has not changed: load what you changed by model.load_state_dict(...), or change the "
                    "parameter inside `with materialized(model, write=True):`; to change a copy only, .clone() it first"
                )
            if copy() is not None:
                self.given.append((record, copy, counter, version))
