"""Models by name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

import torch

from ps_core._errors import InvalidInput
from ps_core._workloads.shapes import TransformerShape, shape
from ps_models._config import ModelConfig, option_names
from ps_models.gpt import GPT, GPTConfig

_OF_SHAPE = frozenset(field.name for field in fields(TransformerShape)) - {"name", "family"}


def build(name: str, device: str | torch.device = "meta", **overrides: int | float | Collection[int] | None) -> GPT:
    """The model of that name (`ps_core` knows the names), on ``device``; on ``meta`` it takes no memory.

    Overrides replace fields of its `TransformerShape` or of its configuration; a changed ``hidden`` or ``heads``
    brings head width and MLP width along.
    """
    config = configure(shape(name), GPTConfig, overrides)
    with torch.device(device):
        return GPT(config)


def configure(found: TransformerShape, kind: type[Any], overrides: dict[str, Any]) -> Any:
    """A configuration of that kind (any: of its type) with these fields replaced."""
    assert issubclass(kind, ModelConfig), "a configuration"
    of_config = option_names(kind)
    unknown = sorted(set(overrides) - _OF_SHAPE - of_config)
    if unknown:
        raise InvalidInput(f"cannot override {unknown[0]!r}; known: {', '.join(sorted(_OF_SHAPE | of_config))}")
    changes = {key: value for key, value in overrides.items() if key in _OF_SHAPE}
    if "hidden" in changes or "heads" in changes:
        hidden, heads = int(changes.get("hidden", found.hidden)), int(changes.get("heads", found.heads))
        follow = {"heads": heads, "kv_heads": heads, "head_dim": hidden // max(1, heads)}
        changes = {**follow, **({"ffn": 4 * hidden} if "hidden" in changes else {}), **changes}
    options = {key: value for key, value in overrides.items() if key in of_config}
    return kind(shape=replace(found, **changes), **options)
