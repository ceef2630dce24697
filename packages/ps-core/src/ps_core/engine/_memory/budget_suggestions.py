"""Write budgets and options that would fit as code, with everything else as the user gave it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from ps_core._options import Budget, Options
from ps_core._plan import Tier
from ps_core._units import align_up, meant_as_gib

MIB = 2**20


@dataclass(frozen=True, slots=True)
class UserLimits:
    """The arguments of `chunked` that memory depends on."""

    budget: Budget = field(default_factory=Budget)
    options: Options = field(default_factory=Options)
    sharers: int = 1
    """Number of ranks on this computer, which share the budget of every tier but the accelerator."""


@dataclass(frozen=True, slots=True)
class TierBudget:
    """Sizes of all tiers, for errors that suggest others."""

    tiers: tuple[Tier, ...]
    given: UserLimits
    device_memory_bytes: tuple[int, int] | None
    """The accelerator's memory, free and in all; None: the accelerator is emulated."""


def size(count: int) -> str:
    """Format bytes for people to read."""
    return f"{count / MIB:,.1f} MiB" if count >= MIB // 10 else f"{count:,} bytes"


def suggest_budget(limits: TierBudget, tier: int, needed_bytes: int) -> str:
    """Write the Budget that gives a tier so many bytes, and how much more that is; ask about sizes without a unit."""
    budget = limits.given.budget
    small = {size: meant for size in (budget.device, budget.host, budget.disk) if (meant := meant_as_gib(size))}
    asked = [f'{size} without a unit is {size} bytes; did you mean "{meant}"?' for size, meant in small.items()]
    return _larger_budget(limits, tier, needed_bytes) + (f" ({' '.join(asked)})" if asked else "")


def _larger_budget(limits: TierBudget, tier: int, needed_bytes: int) -> str:
    name, whole = limits.tiers[tier].name, limits.tiers[tier].capacity_bytes
    asked, given, suffix = align_up(needed_bytes), limits.given, ""
    if name != "device" and given.sharers > 1:
        asked, whole = asked * given.sharers, whole * given.sharers
        suffix = f" for the {given.sharers} processes that share it"
    asked, there = _rounded(asked), limits.device_memory_bytes if name == "device" else None
    if there is not None and asked > there[1]:
        return f"an accelerator with {size(asked)}{suffix}: this one has {size(there[1])}"
    if getattr(given.budget, name) is None:
        suffix += " than is free here, less a tenth"
    changed: dict[str, Any] = {name: _sized(asked)}
    return f"{_code(replace(given.budget, **changed))}: {size(asked - whole)} more{suffix}"


def options_as(given: UserLimits, **changed: Any) -> str:
    """Write the Options with other values. (Any: each field has a type of its own.)"""
    return _code(replace(given.options, **changed))


def _code(value: Any) -> str:
    """Write a Budget or Options: fields that are not the default. (Any: dataclasses have no common type.)"""
    rows = [(row.name, getattr(value, row.name)) for row in fields(value) if getattr(value, row.name) != row.default]
    return f"{type(value).__name__}({', '.join(f'{name}={_text(each)}' for name, each in rows)})"


def _text(value: object) -> str:
    return (
        f'"{value}"' if isinstance(value, str) and value.isprintable() and not set(value) & set('"\\') else repr(value)
    )


def _rounded(count: int) -> int:
    """Round up to a size that is easier to write."""
    return align_up(count, MIB if count > MIB else 1024)


def _sized(count: int) -> int | str:
    return f"{count // MIB}MiB" if count >= MIB else count
