"""Read shapes from Hugging Face ``config.json`` files, without Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from ps_core._errors import InvalidInput
from ps_core._input_files import read_text
from ps_core._workloads.shapes import Family, TransformerShape

_Value = TypeVar("_Value", int, bool)


def shape_from_config(source: str | Path) -> TransformerShape:
    """Return the shape that a ``config.json`` describes: its text, the path to it, or its folder.

    A text begins with an opening brace; anything else is a path. The shape is that of the family's language-model
    class; for BERT, that of the class named in ``architectures``.
    """
    name, text = _read(source)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{name}: not JSON: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{name}: a model's configuration is a JSON object, found {type(data).__name__}")
    config = _Config(name, data)
    family = data.get("model_type")
    reader = _READERS.get(family) if isinstance(family, str) else None
    if reader is None:
        known = ", ".join(_READERS)
        raise InvalidInput(f"{name}: model_type {family!r} is not one of the known families: {known}")
    return reader(config)


def _read(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return "config", source
    path = Path(source)
    try:
        if path.is_dir():
            path /= "config.json"
        return str(path), read_text(path)
    except OSError as error:
        hint = "" if path.exists() else " (a local file or folder is expected: nothing is downloaded)"
        raise InvalidInput(f"cannot read {str(path)!r}: {error.strerror or error}{hint}") from error
    except ValueError as error:
        raise InvalidInput(f"{str(path)!r} is not a readable text file: {error}") from error


class _Config:
    """The entries of one file, checked as they are read. An absent or null entry is its default."""

    def __init__(self, name: str, data: dict[str, object]) -> None:
        self.name = name
        self.data = data

    def whole(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 1; without a default it must be there."""
        return self._get(key, default, int, "a whole number of at least 1")

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        return self._get(key, default, bool, "true or false")

    def _get(self, key: str, default: _Value | None, kind: type[_Value], what: str) -> _Value:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise InvalidInput(f"{self.name}: {key!r} is missing")
        if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value < 1)):
            raise InvalidInput(f"{self.name}: {key!r} must be {what}, found {value!r}")
        return value

    def head_dim(self, hidden: int, heads: int) -> int:
        """Return the width of a head: the given one, or the hidden size over the heads."""
        if self.data.get("head_dim") is None and hidden % heads:
            raise InvalidInput(f"{self.name}: the hidden size {hidden} cannot be cut into {heads} equal heads")
        return self.whole("head_dim", max(1, hidden // heads))

    def is_for(self, architecture: str) -> bool:
        """Return True if the file names this class, or none."""
        said = self.data.get("architectures")
        return not isinstance(said, list) or not said or architecture in said


def _gpt2(config: _Config) -> TransformerShape:
    hidden, heads = config.whole("n_embd"), config.whole("n_head")
    return TransformerShape(
        name=config.name,
        family=Family.GPT2,
        layers=config.whole("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=config.head_dim(hidden, heads),
        ffn=config.whole("n_inner", 4 * hidden),
        vocabulary=config.whole("vocab_size"),
        positions=config.whole("n_positions"),
        tied_head=config.flag("tie_word_embeddings", True),
    )


def _bert(config: _Config) -> TransformerShape:
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    if not config.flag("tie_word_embeddings", True):
        raise InvalidInput(f"{config.name}: a BERT whose head is not tied to its embedding is not known")
    return TransformerShape(
        name=config.name,
        family=Family.BERT,
        layers=config.whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=config.head_dim(hidden, heads),
        ffn=config.whole("intermediate_size"),
        vocabulary=config.whole("vocab_size"),
        positions=config.whole("max_position_embeddings"),
        token_types=config.whole("type_vocab_size", 2),
        next_sentence=config.is_for("BertForPreTraining"),
    )


def _rotary(family: Family) -> Callable[[_Config], TransformerShape]:
    def read(config: _Config) -> TransformerShape:
        hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
        # Qwen2 has biases on queries, keys and values whatever its file says; Mistral has none anywhere.
        bias = family in (Family.LLAMA, Family.QWEN3) and config.flag("attention_bias", False)
        return TransformerShape(
            name=config.name,
            family=family,
            layers=config.whole("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=config.whole("num_key_value_heads", heads if family is Family.LLAMA else None),
            # Qwen3's heads are 128 wide unless its file says otherwise, whatever its hidden size.
            head_dim=config.whole("head_dim", 128) if family is Family.QWEN3 else config.head_dim(hidden, heads),
            ffn=config.whole("intermediate_size"),
            vocabulary=config.whole("vocab_size"),
            positions=config.whole("max_position_embeddings"),
            tied_head=config.flag("tie_word_embeddings", False),
            qkv_bias=bias or family is Family.QWEN2,
            out_bias=bias,
            mlp_bias=family is Family.LLAMA and config.flag("mlp_bias", False),
        )

    return read


_READERS = MappingProxyType(
    {
        "gpt2": _gpt2,
        "bert": _bert,
        **{family.value: _rotary(family) for family in (Family.LLAMA, Family.QWEN2, Family.QWEN3, Family.MISTRAL)},
    }
)
