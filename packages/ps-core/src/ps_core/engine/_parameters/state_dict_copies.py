"""Copies of parameters that state dicts hold; in plain PyTorch these would be the parameters themselves.

A value that is written into such a copy would change the model in plain PyTorch, and changes nothing here. PyTorch
counts changes in place for all tensors that share memory, and goes on counting where one of them gets other memory: so
an empty tensor, kept for each copy, tells of changes even after the copy is gone.
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
        """For the state dict that is being made; tied parameters share theirs, as plain ones would."""
        self.given: list[tuple[ParamState, weakref.ref[torch.Tensor], torch.Tensor, int]] = []
        """Tensors given to state dicts that `check` has to compare."""

    def get(self, record: ParamState) -> torch.Tensor | None:
        """Return the copy that the state dict that is being made has already."""
        return self.made.get(record.first)

    def add(self, record: ParamState, copy: torch.Tensor) -> torch.Tensor:
        """Note a copy, and return it."""
        counter = copy.detach()
        counter.data = copy.new_empty(0)
        self.given.append((record.first, weakref.ref(copy), counter, counter._version))
        self.made[record.first] = copy
        return copy

    def finish(self) -> None:
        """Note that no state dict is being made any more."""
        self.made.clear()

    def drop(self, record: ParamState) -> None:
        """Do without the copy of a parameter that changes."""
        self.made.pop(record.first, None)

    def forget(self) -> None:
        """Note that a state dict is loaded: what was written into copies reaches the model."""
        self.given.clear()

    def check(self) -> None:
        """Raise if a copy was changed in place since it was given out."""
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
