"""Define what the trainer must know of a model, built by name or read from a folder."""

from __future__ import annotations

from typing import Protocol


class ModelFacts(Protocol):
    """Protocol of these facts; `TransformerShape` and `TransformersModel` have them."""

    @property
    def name(self) -> str:
        """Return the name for messages and pictures."""

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens that the model knows."""

    @property
    def parameters(self) -> int:
        """Return the number of parameters, tied ones once."""
