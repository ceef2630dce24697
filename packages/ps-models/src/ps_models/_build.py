"""Build models by name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, TypeAlias

import torch

from ps_core._units import check_whole
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.shapes import Family, TransformerShape
from ps_models._config import check_names, option_names
from ps_models.bert import BERT
from ps_models.gpt import GPT
from ps_models.llama import Llama

Model: TypeAlias = GPT | BERT | Llama
_OF_SHAPE = frozenset(field.name for field in fields(TransformerShape)) - {"name", "family"}


def build(name: str, device: str | torch.device = "meta", **overrides: int | float | Collection[int] | None) -> Model:
    """Return the model of that name (`ps_core` knows the names), on ``device``; on ``meta`` it takes no memory.

    Overrides replace fields of its `TransformerShape` or of its configuration. A changed ``hidden`` or ``heads``
    changes head width and MLP width too.
    """
    found = shape(name)
    # Any: that the configuration is of the model's own type is not told from a name here; it checks its values.
    kind: Any = {Family.GPT2: GPT, Family.BERT: BERT}.get(found.family, Llama)
    of_config = option_names(kind.config_type)
    check_names(overrides, _OF_SHAPE | of_config)
    options = {key: value for key, value in overrides.items() if key in of_config}
    config = kind.config_type(shape=_changed(found, overrides), **options)
    with torch.device(device):
        model: Model = kind(config)
    return model


def _changed(found: TransformerShape, overrides: dict[str, Any]) -> TransformerShape:
    changes = {key: value for key, value in overrides.items() if key in _OF_SHAPE}
    if "hidden" in changes or "heads" in changes:
        hidden, heads = changes.get("hidden", found.hidden), changes.get("heads", found.heads)
        check_whole(f"{found.name}: hidden", hidden, 1)
        check_whole(f"{found.name}: heads", heads, 1)
        # As many queries to a key, and an MLP as wide beside the hidden size, as before.
        shared = found.heads // found.kv_heads
        kv_heads = heads // shared if heads % shared == 0 else heads
        follow = {"heads": heads, "kv_heads": max(1, kv_heads), "head_dim": hidden // heads}
        wide = {"ffn": found.ffn * hidden // found.hidden} if "hidden" in changes else {}
        changes = {**follow, **wide, **changes}
    return replace(found, **changes)
