"""Values that no model can have are refused by name: in overrides, in calls, and in the files of a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ps_core import CheckpointDamaged, InvalidInput, shape
from ps_models import GPT, BERTClassifier, GPTClassifier, TiledLinear, build

SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 50, "positions": 16}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *(("gpt-10m", field, value) for field in ("hidden", "heads") for value in ("x", None, 1.5)),
        *(("gpt-10m", field, "0.1") for field in ("dropout", "attention_dropout")),
        *(("gpt-10m", "loss_chunk_tokens", value) for value in (1.5, True, "1")),
        *(("gpt-10m", field, value) for field in ("tiles", "head_tiles") for value in (1.5, None)),
        *(("gpt-10m", "checkpoint_blocks", value) for value in (1, None, "all", ["0"], [[0]])),
        *(("gpt-10m", "init_std", value) for value in (-1.0, float("nan"), "x")),
        *(("gpt-10m", field, -1.0) for field in ("position_std", "balance_weight")),
        *(("gpt-10m", field, "no") for field in ("tied_head", "qkv_bias", "next_sentence")),
        *(("gpt-10m", field, "yes") for field in ("cpu_embedding", "offload_checkpoints")),
        ("gpt-10m", "experts", 1.5),
        ("bert-base", "token_types", -1),
        *((name, "norm_epsilon", value) for name in ("gpt-10m", "bert-base", "llama-10m") for value in ("x", -1.0)),
        *(("llama-10m", "rope_theta", value) for value in (0, -1.0, float("nan"), "x")),
        ("llama-10m", "head_dim", 7),
    ],
)
def test_an_override_of_a_wrong_value_is_refused_by_name(name: str, field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=field):
        build(name, "cpu", **{**SMALL, field: value})


@pytest.mark.parametrize("value", [5, None])
def test_a_name_is_a_text(value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"a model's name is a text, as in 'gpt-1b'; found {value}"):
        shape(value)


@pytest.mark.parametrize("count", [0, -1, True, 2.5, None])
def test_a_classifier_has_classes(count: Any) -> None:
    for kind, name in ((GPTClassifier, "gpt-10m"), (BERTClassifier, "bert-base")):
        config: Any = build(name, **SMALL).config
        with pytest.raises(InvalidInput, match="classes must be a whole number of at least 1"):
            kind(config, count)


@pytest.mark.parametrize("count", [1.5, True, None, "2"])
def test_tiles_are_counted(count: Any) -> None:
    with pytest.raises(InvalidInput, match=f"6 outputs can be cut into 1 to 6 tiles, found {count!r}"):
        TiledLinear.from_linear(torch.nn.Linear(8, 6), count)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf"), "top_k": 2}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
    ],
)
def test_sampling_checks_its_settings(settings: dict[str, Any], message: str) -> None:
    model: Any = build("gpt-10m", "cpu", **SMALL)
    with pytest.raises(InvalidInput, match=message):
        model.generate(torch.zeros(1, 2, dtype=torch.int64), **{"max_new_tokens": 1, **settings})


# Directories.


def config_with(**entries: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | entries), "utf-8")

    return change


def weights_of(size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / "model.safetensors", size)


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 500)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pytest.importorskip("safetensors")
    build("gpt-10m", "cpu", **SMALL).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("damage", [weights_of(0), weights_of(100), weights_of(20_000), garbage])
def test_a_damaged_file_of_weights_is_named(damage: Callable[[Path], None], saved: Path) -> None:
    damage(saved)
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        GPT.from_pretrained(saved)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"resid_pdrop": "x", "embd_pdrop": "x"}, "dropout"),
        ({"attn_pdrop": None}, "attention_dropout"),
        ({"layer_norm_epsilon": "x"}, "norm_epsilon"),
        ({"layer_norm_epsilon": None}, "norm_epsilon"),
        ({"initializer_range": "x"}, "init_std"),
    ],
)
def test_a_configuration_of_wrong_values_is_refused(entries: dict[str, object], message: str, saved: Path) -> None:
    config_with(**entries)(saved)
    with pytest.raises(InvalidInput, match=message):
        GPT.from_pretrained(saved)


@pytest.mark.parametrize("labels", [5, "ab", [0]])
def test_labels_of_classes_are_an_object(labels: object, saved: Path) -> None:
    config_with(id2label=labels)(saved)
    with pytest.raises(InvalidInput, match="id2label"):
        GPTClassifier.from_pretrained(saved)


@pytest.mark.parametrize("option", ["frob", "shape"])
def test_an_option_that_is_not_there_is_refused(option: str, saved: Path) -> None:
    with pytest.raises(InvalidInput, match=f"cannot override '{option}'; known: .*tiles"):
        GPT.from_pretrained(saved, **{option: 1})


def test_a_model_without_memory_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="on meta"):
        build("gpt-10m", **SMALL).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("gpt-10m", {"qkv_bias": False}, "qkv_bias"),
        ("bert-base", {"mlp_bias": False}, "mlp_bias"),
        ("bert-base", {"token_types": 0}, "token_types"),
        ("llama-10m", {"qkv_bias": True}, "qkv_bias"),
        ("llama-10m", {"out_bias": True}, "qkv_bias"),
    ],
)
def test_what_the_format_cannot_say_is_not_saved(
    name: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """The file would describe another model. transformers would then leave weights out without a word."""
    with pytest.raises(InvalidInput, match=field):
        build(name, "cpu", **SMALL, **changes).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_biases_of_all_of_attention_are_saved(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model: Any = build("llama-10m", "cpu", **SMALL, qkv_bias=True, out_bias=True, mlp_bias=True)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
