"""What an optimizer's state dict holds of masters."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def masters_of(state: dict[str, Any]) -> dict[int, Tensor]:
    """By the parameter's index, as they are in each one's entry."""
    return {index: entry["master"] for index, entry in state["state"].items() if "master" in entry}
