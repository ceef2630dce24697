"""Make shapes from a name, or from a few numbers."""

from __future__ import annotations

import re
from dataclasses import replace

from ps_core._errors import InvalidInput
from ps_core._name_suggestions import did_you_mean
from ps_core._workloads.shapes import MOST_LAYERS, Family, TransformerShape

# The published sizes: layers and hidden size. All have 16 heads, 175B has 96; vocabulary and positions are GPT-2's
# (50257 and 1024: every published run but 0.7B's, at 128, has sequences of 1024). The table gives neither, so these
# are our choice; only the smallest sizes feel it.
_PUBLISHED = {
    "0.7b": (24, 1536),
    "1b": (20, 2048),
    "2b": (40, 2048),
    "4b": (64, 2304),
    "6b": (53, 3072),
    "8b": (72, 3072),
    "10b": (50, 4096),
    "11b": (55, 4096),
    "12b": (60, 4096),
    "13b": (65, 4096),
    "15b": (78, 4096),
    "18b": (90, 4096),
    "20b": (25, 8192),
    "30b": (37, 8192),
    "40b": (50, 8192),
    "50b": (62, 8192),
    "60b": (75, 8192),
    "68b": (66, 9216),
    "175b": (96, 12288),
}
_GPT2_VOCABULARY = 50257
_PUBLISHED_HEADS = {**{hidden: 16 for _, hidden in _PUBLISHED.values()}, 12288: 96}


def gpt(
    layers: int,
    hidden: int,
    *,
    heads: int | None = None,
    vocabulary: int = _GPT2_VOCABULARY,
    positions: int = 1024,
    name: str | None = None,
) -> TransformerShape:
    """Return a GPT-2-like shape.

    If heads are not given, they are as published (16, or 96 at 12288) where the hidden size is. Else each is 128 wide
    where that divides the hidden size. Else each has the smallest width above 64 that divides it.
    """
    name = name or f"gpt-{layers}x{hidden}"
    if heads is None:
        heads = _PUBLISHED_HEADS.get(hidden) or _heads(hidden)
    if heads < 1 or hidden % heads:
        raise InvalidInput(f"{name}: the hidden size {hidden} cannot be cut into {heads} equal heads")
    return TransformerShape(
        name=name,
        family=Family.GPT2,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocabulary=vocabulary,
        positions=positions,
    )


def _heads(hidden: int) -> int:
    if hidden % 128 == 0:
        return max(1, hidden // 128)
    return next((count for count in range(hidden // 64, 0, -1) if hidden % count == 0), 1)


def bert(layers: int, hidden: int, heads: int, *, name: str) -> TransformerShape:
    """Return a BERT shape with both pre-training heads (masked words, next sentence) and the uncased vocabulary."""
    return TransformerShape(
        name=name,
        family=Family.BERT,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocabulary=30522,
        positions=512,
        token_types=2,
        next_sentence=True,
    )


def llama(  # noqa: PLR0913 - the numbers of a shape
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    *,
    ffn: int,
    vocabulary: int,
    positions: int,
    tied_head: bool,
    name: str,
) -> TransformerShape:
    """Return a Llama shape, without biases."""
    return TransformerShape(
        name=name,
        family=Family.LLAMA,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocabulary=vocabulary,
        positions=positions,
        tied_head=tied_head,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )


_LLAMA3 = {"vocabulary": 128256, "positions": 8192}
_NAMED = {
    shape.name: shape
    for shape in (
        gpt(10, 256, heads=4, vocabulary=8192, positions=512, name="gpt-10m"),
        gpt(8, 640, heads=10, vocabulary=16384, name="gpt-50m"),
        gpt(12, 768, heads=12, name="gpt2"),
        gpt(24, 1024, heads=16, name="gpt2-medium"),
        gpt(36, 1280, heads=20, name="gpt2-large"),
        gpt(48, 1600, heads=25, name="gpt2-xl"),
        bert(12, 768, 12, name="bert-base"),
        bert(24, 1024, 16, name="bert-large"),
        llama(10, 256, 4, 2, ffn=704, vocabulary=8192, positions=512, tied_head=True, name="llama-10m"),
        llama(8, 640, 10, 5, ffn=1728, vocabulary=16384, positions=1024, tied_head=True, name="llama-50m"),
        llama(16, 2048, 32, 8, ffn=8192, **_LLAMA3, tied_head=True, name="llama-1b"),
        llama(32, 4096, 32, 8, ffn=14336, **_LLAMA3, tied_head=False, name="llama-8b"),
        *(gpt(*size, name=f"gpt-{label}") for label, size in _PUBLISHED.items()),
        gpt(128, 25600, heads=160, name="gpt-1t"),
    )
}
_FREE_NAME = re.compile(r"(gpt|bert)-(\d+)x(\d+)")
_MOST_DIGITS = 7
_BILLIONS = re.compile(r"([a-z]+)-?(\d{1,6}(?:\.\d{1,6})?)b")
_NEAR = 1.5
"""A named size within this factor of the wanted one is suggested."""


def names() -> tuple[str, ...]:
    """Return every name that `shape` knows, small to large within each kind."""
    return tuple(_NAMED)


def published_names() -> tuple[str, ...]:
    """Return the names of the published size table."""
    return tuple(f"gpt-{label}" for label in _PUBLISHED)


_ANY_SIZE = "gpt-LAYERSxHIDDEN or bert-LAYERSxHIDDEN is any size, as in gpt-24x2048; docs/sizes.md has the names"


def _sizes_near(key: str) -> str:
    """Suggest names for one like ``gpt-1.3b``: the two nearest in size, and one of any size; "" for other names."""
    found = _BILLIONS.fullmatch(key)
    kind = [row for row in _NAMED.values() if row.name.startswith(found[1])] if found else []
    if found is None or not kind:
        return ""
    wanted = max(float(found[2]) * 1e9, 1.0)
    factors = {row.name: max(row.parameters, wanted) / min(row.parameters, wanted) for row in kind}
    near = sorted((name for name, factor in factors.items() if factor < _NEAR), key=factors.__getitem__)[:2]
    return f"did you mean {' or '.join(near)}? {_ANY_SIZE}" if near else _ANY_SIZE


def shape(name: str, *, vocabulary: int | None = None, positions: int | None = None) -> TransformerShape:
    """Return the shape of that name (in any case), or of ``gpt-LAYERSxHIDDEN`` or ``bert-LAYERSxHIDDEN``.

    Given numbers replace its own.
    """
    if not isinstance(name, str):
        raise InvalidInput(f"a model's name is a text, as in 'gpt-1b'; found {name!r}")
    key = name.strip().lower()
    found = _NAMED.get(key)
    if found is None:
        free = _FREE_NAME.fullmatch(key)
        if free is None:
            meant = _sizes_near(key) or did_you_mean(key, _NAMED, _ANY_SIZE)
            raise InvalidInput(f"no model is called {name!r}; {meant}")
        if max(len(free[2]), len(free[3])) > _MOST_DIGITS:
            raise InvalidInput(
                f"{key[:80]}: at most {MOST_LAYERS} layers and a hidden size below {10**_MOST_DIGITS} are "
                "allowed in a name"
            )
        layers, hidden = int(free[2]), int(free[3])
        found = gpt(layers, hidden) if free[1] == "gpt" else bert(layers, hidden, _heads(hidden), name=key)
    if vocabulary is not None:
        found = replace(found, vocabulary=vocabulary)
    return found if positions is None else replace(found, positions=positions)


def size_table() -> str:
    """Return every named size as a Markdown table."""
    lines = [
        "| name | layers | hidden | heads | head width | vocabulary | positions | parameters |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in _NAMED.values():
        numbers = (row.layers, row.hidden, row.heads, row.head_dim, row.vocabulary, row.positions, row.parameters)
        lines.append(f"| `{row.name}` | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(lines) + "\n"
