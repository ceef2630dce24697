"""Sizes count what they should, by name and by tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_core._errors import InvalidInput
from ps_core._workloads.named_shapes import bert, gpt, names, published_names, shape, size_table
from ps_core._workloads.shapes import Family, TransformerShape, placed_tensors, tensors

DOCS = Path(__file__).parents[2] / "docs"

LLAMA = TransformerShape(
    name="tiny",
    family=Family.LLAMA,
    layers=1,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=160,
    vocabulary=100,
    positions=32,
    tied_head=False,
)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("bert-base", 110_106_428),
        ("bert-large", 336_226_108),
    ],
)
def test_known_counts(name: str, count: int) -> None:
    assert shape(name).parameters == count
    assert sum(tensor.numel for tensor in tensors(shape(name))) == count


# The names of 0.7B, 1B, 2B and 15B are low: the first three leave the token table out, 15B is 16B by any count.
@pytest.mark.parametrize("name", published_names())
def test_published_sizes_are_near_their_names(name: str) -> None:
    least, most = {
        "gpt-0.7b": (1.08, 1.09),
        "gpt-1b": (1.11, 1.12),
        "gpt-2b": (1.05, 1.06),
        "gpt-15b": (1.06, 1.07),
        "gpt-175b": (0.995, 1.005),
    }.get(name, (0.99, 1.05))
    said = float(name.removeprefix("gpt-").removesuffix("b")) * 1e9
    assert least < shape(name).parameters / said < most


def test_the_published_table_is_complete_and_has_its_heads() -> None:
    assert len(published_names()) == 19
    assert {shape(name).heads for name in published_names()} == {16, 96}
    assert shape("gpt-175b").heads == 96
    assert (shape("gpt-68b").layers, shape("gpt-68b").hidden) == (66, 9216)
    assert all(shape(name).vocabulary == 50257 and shape(name).positions == 1024 for name in published_names())


def test_small_and_planning_sizes() -> None:
    assert shape("gpt-10m").parameters == pytest.approx(10e6, rel=0.02)
    assert (shape("gpt-50m").layers, shape("gpt-50m").vocabulary) == (8, 16384)
    assert shape("gpt-50m").parameters == pytest.approx(50.7e6, rel=0.01)
    assert shape("gpt-1t").parameters == pytest.approx(1e12, rel=0.01)
    assert all(shape(name).name == name for name in names())


def test_head_rule() -> None:
    assert [gpt(2, hidden).heads for hidden in (2048, 8192, 12288)] == [16, 16, 96]
    assert [gpt(2, hidden).heads for hidden in (5120, 768, 128, 64, 200, 10)] == [40, 6, 1, 1, 2, 1]
    assert gpt(2, 2048, heads=32).head_dim == 64


def test_lookup_replaces_numbers_and_reads_free_names() -> None:
    assert shape(" GPT2 ", vocabulary=1000, positions=2048).vocabulary == 1000
    assert shape("gpt2", positions=2048).positions == 2048
    free = shape("gpt-3x256")
    assert (free.layers, free.hidden, free.name) == (3, 256, "gpt-3x256")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt-175", "gpt-175b"),
        ("gtp2-xl", "gpt2-xl"),
        ("zzz", "gpt-LAYERSxHIDDEN or"),
        ("gpt-0x256", "layers must be"),
        ("gpt-12345678x64", "gpt-12345678x64: at most 10000 layers and a hidden size below 10000000 are allowed"),
        ("bert-2x10000000", "bert-2x10000000: at most 10000 layers"),
        (f"gpt-{'9' * 5000}x64", "at most 10000 layers"),
        ("gpt-7b", "did you mean gpt-6b or gpt-8b[?] gpt-LAYERSxHIDDEN or"),
        ("llama-7b", "did you mean llama-8b[?] gpt-LAYERSxHIDDEN or"),
        ("llama-70b", "'llama-70b'; gpt-LAYERSxHIDDEN or"),
        ("gpt-0b", "'gpt-0b'; gpt-LAYERSxHIDDEN or"),
        ("gtp-2b", "did you mean gpt-2b or"),
    ],
)
def test_unknown_names_are_refused_in_one_helpful_line(name: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        shape(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [5, None, ("gpt-1b",)])
def test_a_name_is_a_text(name: Any) -> None:
    with pytest.raises(InvalidInput, match="a model's name is a text, as in 'gpt-1b'; found "):
        shape(name)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="equal heads"):
        gpt(2, 100, heads=7)
    with pytest.raises(InvalidInput, match="equal heads"):
        gpt(2, 100, heads=0)
    with pytest.raises(InvalidInput, match="key-value heads evenly"):
        replace(LLAMA, kv_heads=3)
    with pytest.raises(InvalidInput, match="heads x head_dim must be the hidden size 64"):
        replace(LLAMA, family=Family.GPT2)
    with pytest.raises(InvalidInput, match="vocabulary must be a whole number"):
        shape("gpt2", vocabulary=True)
    with pytest.raises(InvalidInput, match="layers must be a whole number from 1 to 10000, found 999999"):
        shape("gpt-999999x64")
    with pytest.raises(InvalidInput, match="hidden must be a whole number"):
        replace(LLAMA, hidden=6.5)


def listed(found: TransformerShape) -> list[str]:
    return [tensor.name for tensor in tensors(found)]


def test_gpt2_names_in_order() -> None:
    block = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    assert listed(gpt(1, 64, vocabulary=100, positions=32)) == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        *(f"transformer.h.0.{name}.{end}" for name in block for end in ("weight", "bias")),
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    ]
    bare = replace(gpt(1, 64), tied_head=False, qkv_bias=False, out_bias=False, mlp_bias=False)
    assert [name for name in listed(bare) if name.endswith("bias")] == [
        "transformer.h.0.ln_1.bias",
        "transformer.h.0.ln_2.bias",
        "transformer.ln_f.bias",
    ]
    assert listed(bare)[-1] == "lm_head.weight"


def test_bert_heads_and_tables_are_optional() -> None:
    full = bert(1, 64, 4, name="tiny")
    masked_only = replace(full, next_sentence=False)
    assert full.parameters - masked_only.parameters == 64 * 64 + 64 + 2 * 64 + 2
    assert listed(masked_only)[-1] == "cls.predictions.transform.LayerNorm.bias"
    assert full.parameters - replace(full, token_types=0).parameters == 2 * 64
    untied = replace(full, tied_head=False)
    assert set(listed(untied)) - set(listed(full)) == {"cls.predictions.decoder.weight"}


def test_llama_like_names_and_flags() -> None:
    every = [tensor.name.removeprefix("model.layers.0.") for tensor in placed_tensors(LLAMA) if tensor.layer == 0]
    attention = [f"self_attn.{name}_proj.{end}" for name in "qkvo" for end in ("weight", "bias")]
    mlp = [f"mlp.{name}_proj.{end}" for name in ("gate", "up", "down") for end in ("weight", "bias")]
    assert every == [*attention, *mlp, "input_layernorm.weight", "post_attention_layernorm.weight"]
    assert LLAMA.parameters == 68992
    qwen3 = replace(LLAMA, family=Family.QWEN3, qkv_bias=False, out_bias=False, mlp_bias=False)
    assert qwen3.parameters == 68352
    assert "model.layers.0.self_attn.k_norm.weight" in listed(qwen3)
    tied = replace(qwen3, tied_head=True)
    assert qwen3.parameters - tied.parameters == 100 * 64
    assert listed(tied)[-1] == "model.norm.weight"


def test_documented_sizes_equal_the_code() -> None:
    assert size_table() in (DOCS / "sizes.md").read_text(encoding="utf-8")
