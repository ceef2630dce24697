"""Shapes read from Hugging Face configuration files, against counts the models are known to have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ps_core._errors import InvalidInput
from ps_core._input_files import stays_inside
from ps_core._simulate.machine import machine
from ps_core._workloads.hf import shape_from_config
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload
from ps_core.cli import main

CONFIGS = Path(__file__).parent / "configs"

# Counts of the models' own `parameters()`; tests/models compares names and counts with transformers itself.
KNOWN = {
    "gpt2": 124_439_808,
    "bert-base": 109_514_298,
    "bert-large": 336_226_108,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-biased": 68_992,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-8b": 8_190_735_360,
    "qwen3-0.6b": 596_049_920,
    "mistral-7b": 7_241_732_096,
}


def test_every_file_has_a_known_count() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_counts(name: str) -> None:
    found = shape_from_config(CONFIGS / f"{name}.json")
    assert found.parameters == KNOWN[name]
    assert analytic_trace(found, Workload(batch=1, seq=16)).parameters == KNOWN[name]


def test_text_path_and_directory_give_the_same_shape(tmp_path: Path) -> None:
    path = CONFIGS / "gpt2.json"
    (tmp_path / "config.json").write_bytes(path.read_bytes())
    by_text = shape_from_config(path.read_text(encoding="utf-8"))
    by_path = shape_from_config(str(path))
    by_directory = shape_from_config(tmp_path)
    assert (by_text.name, by_path.name) == ("config", str(path))
    assert by_directory.name == str(tmp_path / "config.json")
    assert by_text.parameters == by_path.parameters == by_directory.parameters == shape("gpt2").parameters


def test_a_file_that_names_no_class_is_of_the_whole_one() -> None:
    assert shape_from_config(changed("bert-base", architectures=None)).next_sentence
    assert not shape_from_config(changed("bert-base")).next_sentence


def changed(name: str, **entries: object) -> str:
    data: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return json.dumps({key: value for key, value in {**data, **entries}.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ('{"a":' * 100_000, "not JSON"),
        ("{}", "model_type None is not one of the known families: gpt2, bert, llama, qwen2, qwen3, mistral"),
        ('{"model_type": "mamba"}', "'mamba' is not one of"),
        ('{"model_type": ["gpt2"]}', "is not one of"),
        ('{"model_type": "gpt2"}', "'n_embd' is missing"),
        (changed("gpt2", n_embd=None), "'n_embd' is missing"),
        (changed("gpt2", n_layer="12"), "'n_layer' must be a whole number of at least 1, found '12'"),
        (changed("gpt2", n_layer=True), "'n_layer' must be a whole number"),
        (changed("gpt2", n_layer=0), "'n_layer' must be a whole number"),
        (changed("gpt2", n_head=7), "cannot be cut into 7 equal heads"),
        (changed("gpt2", tie_word_embeddings=1), "'tie_word_embeddings' must be true or false"),
        (changed("bert-base", tie_word_embeddings=False), "not tied"),
        (changed("mistral-7b", num_key_value_heads=None), "'num_key_value_heads' is missing"),
        (changed("mistral-7b", num_key_value_heads=5), "key-value heads evenly"),
    ],
)
def test_damaged_and_unknown_ones_are_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        shape_from_config(text)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list").write_text("[1]")
    with (tmp_path / "long").open("wb") as file:
        file.truncate(2**25)
    said = {
        "missing": "cannot read",
        "binary": "not a readable text",
        "list": "JSON object, found list",
        "long": "too long: expected at most 16.0 MiB",
    }
    for name, words in said.items():
        with pytest.raises(InvalidInput, match=words) as caught:
            shape_from_config(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInput, match="not a readable"):
        shape_from_config("a\0b")


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_what_never_ends_is_not_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(InvalidInput, match="is not a readable text file: expected a regular file, found a device or"):
        shape_from_config(Path(name))
    with pytest.raises(InvalidInput, match=r"cannot read machine file .*: expected a regular file, found a device or"):
        machine(name)
    assert main(["plan", "--trace", name]) == main(["plan", "--hf", name]) == 2


def test_names_that_stay_inside_their_folder() -> None:
    for name in ("a.safetensors", "parts/a.safetensors", "..a", "a..b"):
        assert stays_inside(name)
    for name in ("", ".", "..", "../a", "parts/../../a", "/a", "//a", "C:\\a", "\\a", "..\\a", "a\0", "\ud800"):
        assert not stays_inside(name)
