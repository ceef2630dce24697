"""What the trainer has to know of a model, whether it is built by name or read from a folder."""

from __future__ import annotations

from typing import Protocol


class ModelFacts(Protocol):
    """A `TransformerShape` has these facts, and so has a `TransformersModel`."""

    @property
    def name(self) -> str:
        """Return the name for messages and pictures."""

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens that the model knows."""

    @property
    def parameters(self) -> int:
        """Return the number of parameters, tied ones once."""
