"""What to write in place of what was written: budgets and options as code, with all that was given besides."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ps_core._options import Budget, Options
from ps_core._units import align_up

if TYPE_CHECKING:
    from ps_core.engine._memory.store import Store
    from ps_core.engine._parameters.state import TensorRecord

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Given:
    """What `chunked` was given that memory depends on."""

    budget: Budget = field(default_factory=Budget)
    options: Options = field(default_factory=Options)
    sharers: int = 1
    """The processes of this computer, which share all of the budget but the accelerator's."""


def size(count: int) -> str:
    """Bytes for people to read."""
    return f"{count / MIB:,.1f} MiB" if count >= MIB // 10 else f"{count:,} bytes"


def larger(store: Store, tier: int, needed_bytes: int, part: int | None = None) -> str:
    """The Budget with which so many bytes of a tier are there, and how much more that is.

    ``part``: what there is of it for this model, or is to be.
    """
    name, whole = store.tiers[tier].name, store.whole[tier].capacity_bytes
    part = store.tiers[tier].capacity_bytes if part is None else part
    asked, given, suffix = align_up(needed_bytes), store.given, ""
    if part != whole:
        asked, suffix = -(-asked * whole // max(1, part)), " for all models that share it"
    if name != "device" and given.sharers > 1:
        asked, whole = asked * given.sharers, whole * given.sharers
        suffix += f" for the {given.sharers} processes that share it"
    asked, there = _rounded(asked), store.device.memory_bytes() if name == "device" else None
    if there is not None and asked > there[1]:
        return f"an accelerator with {size(asked)}{suffix}: this one has {size(there[1])}"
    if getattr(given.budget, name) is None:
        suffix += " than is free here, less a tenth"
    changed: dict[str, Any] = {name: _sized(asked)}
    return f"{_code(replace(given.budget, **changed))}: {size(asked - whole)} more{suffix}"


def options_as(store: Store, **changed: Any) -> str:
    """The Options with other values (any: one for each of its fields)."""
    return _code(replace(store.given.options, **changed))


class Way(NamedTuple):
    """Something to change in a model before `chunked`."""

    code: str
    """Empty: there is none that would do for any model."""
    text: str


def ways(found: list[Way]) -> str:
    """One remedy of all these; as code if all are."""
    if not all(way.code for way in found):
        return "; ".join(way.text for way in found)
    return f"{'; '.join(way.code for way in found)}: before chunked; {'; '.join(way.text for way in found)}"


def on_the_host(record: TensorRecord) -> Way:
    """Let a table be one of which only rows are on the accelerator."""
    module, text = record.name.rpartition(".")[0], f"HostEmbedding in place of nn.Embedding for {record.name}"
    if record.owners == {nn.Embedding} and module:
        made = f"HostEmbedding.from_embedding(model.get_submodule({module!r}))"
        return Way(f"model.set_submodule({module!r}, {made})", text)
    return Way("", text + " (cpu_embedding=True of ps_models)")


def in_tiles(record: TensorRecord, tiles: int) -> Way:
    """Let the matrix of an ``nn.Linear`` be several parameters."""
    module, tiles = record.name.rpartition(".")[0], min(tiles, record.shape[0])
    if record.owners == {nn.Linear} and module:
        made = f"TiledLinear.from_linear(model.get_submodule({module!r}), {tiles})"
        return Way(f"model.set_submodule({module!r}, {made})", f"{record.name} in tiles (TiledLinear of ps_models)")
    return Way(
        "", f"{record.name} in tiles, each a parameter (of ps_models: tiles={tiles}, a head's head_tiles={tiles})"
    )


def in_pieces(record: TensorRecord) -> Way:
    """What nothing is known of."""
    return Way("", f"{record.name} cut into several parameters, of which one is used at a time")


def _code(value: Any) -> str:
    """How a Budget or Options is written: what is not the default. (Any: dataclasses have no type of their own.)"""
    rows = [(row.name, getattr(value, row.name)) for row in fields(value) if getattr(value, row.name) != row.default]
    return f"{type(value).__name__}({', '.join(f'{name}={_text(each)}' for name, each in rows)})"


def _text(value: object) -> str:
    return (
        f'"{value}"' if isinstance(value, str) and value.isprintable() and not set(value) & set('"\\') else repr(value)
    )


def _rounded(count: int) -> int:
    """A little more, that is easier to write down."""
    return align_up(count, MIB if count > MIB else 1024)


def _sized(count: int) -> int | str:
    return f"{count // MIB}MiB" if count > MIB else count
