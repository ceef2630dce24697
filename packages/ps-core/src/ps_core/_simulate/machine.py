"""Load a machine's figures: a built-in machine's, or from a TOML file.

A file has the names of `Machine`'s figures; `Machine.to_toml` writes one to start from.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

from ps_core._errors import InvalidInput
from ps_core._input_files import read_text
from ps_core._name_suggestions import did_you_mean
from ps_core._simulate.built_in_machines import MACHINES
from ps_core._simulate.rates import NUMBERS, OPTIONAL, Machine

__all__ = ["MACHINES", "NUMBERS", "UNSTEADY", "Machine", "default_machine", "machine", "machine_from_toml"]

UNSTEADY = ("spread: ", "busy machine: ")
"""Beginnings of the notes in a machine file that say how reliable its figures are."""


def machine_from_toml(text: str, source: str = "machine file") -> Machine:
    """Return the machine that a TOML document describes.

    Fields with a default may be left out. With ``base``, the name of a built-in machine, all others may be left out
    too.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput(f"{source}: not TOML: {' '.join(str(error).split())}") from error
    base = data.pop("base", None)
    if base is not None:
        if not isinstance(base, str) or base not in MACHINES:
            raise InvalidInput(f"{source}: unknown base {base!r} (known: {', '.join(MACHINES)})")
        known = {key: getattr(MACHINES[base], key) for key in NUMBERS}
        data = {"name": f"{base}, adapted", **known, **data}
    unknown = sorted(data.keys() - {"name", *NUMBERS})
    if unknown:
        near = did_you_mean(unknown[0], ("base", "name", *NUMBERS), "docs/command.md lists the keys")
        raise InvalidInput(f"{source}: unknown key {unknown[0]!r}; {near}")
    missing = [key for key in ("name", *NUMBERS) if key not in data and key not in OPTIONAL]
    if missing:
        raise InvalidInput(f"{source}: {missing[0]!r} is missing (or name a built-in machine as base)")
    if not isinstance(data["name"], str):
        raise InvalidInput(f"{source}: name must be a text, found {data['name']!r}")
    return Machine(**data)


def machine(name_or_path: str) -> Machine:
    """Return a built-in machine by name, or the one that a TOML file describes."""
    if name_or_path in MACHINES:
        return MACHINES[name_or_path]
    path = Path(name_or_path)
    if not name_or_path or (path.suffix != ".toml" and not path.exists()):
        raise InvalidInput(f"unknown machine {name_or_path!r} (known: {', '.join(MACHINES)}; or a .toml file)")
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InvalidInput(f"cannot read machine file {name_or_path!r}: {' '.join(str(error).split())}") from error
    return machine_from_toml(text, source=name_or_path)


def default_machine(device_memory_bytes: int, device_name: str = "") -> Machine:
    """Return the built-in machine of the accelerator's kind, or of any kind if its name is unknown.

    Of several, return the one whose accelerator memory is nearest, by ratio. A laptop's has less than its name says.
    Without an accelerator, return the CPU's.
    """
    if device_memory_bytes <= 0:
        return MACHINES["cpu"]
    every = [entry for entry in MACHINES.values() if entry.memory_bytes]
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if "laptop" not in words:
        every = [one for one in every if one.name.partition("-")[0].removeprefix("rtx") in words] or every
    return min(every, key=lambda entry: abs(math.log(device_memory_bytes / entry.memory_bytes)))
