"""Read options from a TOML or YAML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ps_core._errors import InvalidInput
from ps_core._input_files import read_text
from ps_core._install_hints import how_to_install
from ps_models.train._options import TrainOptions, nearest


def from_file(path: Path) -> dict[str, Any]:
    """Return the options that a TOML file sets, or a YAML file by its ending; only their names are checked."""
    kind = "YAML" if path.suffix in (".yaml", ".yml") else "TOML"
    try:
        text = read_text(path)
        return from_text(text, str(path)) if kind == "TOML" else _from_yaml(text, str(path))
    except InvalidInput:
        raise
    except (OSError, ValueError, RecursionError) as error:
        told = " ".join(str(error).split())
        raise InvalidInput(f"--config: cannot read {str(path)!r}: {told}; allowed is a {kind} file") from error


def _from_yaml(text: str, source: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError:
        raise InvalidInput(
            f"--config: {source!r} needs the package yaml; allowed without it is a TOML file; to have it: "
            f"{how_to_install('pyyaml')}"
        ) from None
    try:
        found = yaml.safe_load(text)
        mapping = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    if found is not None and not (isinstance(found, dict) and all(isinstance(key, str) for key in found)):
        raise InvalidInput(f"--config: {source!r} holds no options by name; allowed are lines like `batch: 8`")
    keys = [key.value for key, _ in mapping.value] if found else []
    twice = next((key for key in keys if keys.count(key) > 1), None)  # of which YAML would take the last one
    if twice is not None:
        raise InvalidInput(f"--config: {source!r} sets {twice!r} twice; allowed is once")
    # YAML 1.1 takes 1e-3, which has no point, for a text.
    return _by_name(
        {key: _number(value) if isinstance(value, str) else value for key, value in (found or {}).items()}, source
    )


def _number(text: str) -> str | float:
    return float(text) if re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", text) else text


def from_text(text: str, source: str) -> dict[str, Any]:
    """Return the options that the text of a TOML file sets; only their names are checked."""
    return _by_name(tomllib.loads(text), source)


def _by_name(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the options under the names of the fields; raise `InvalidInput` for unknown or duplicate names."""
    known = {row.name for row in fields(TrainOptions)}
    found = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in known:
            raise InvalidInput(f"--config: {source!r} sets {key!r}, which is not an option; {nearest(key)}")
        if name in found:
            raise InvalidInput(f"--config: {source!r} sets {name!r} twice; allowed is once")
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


def merged(config: Mapping[str, Any], line: Mapping[str, Any]) -> TrainOptions:
    """Return the file's options, replaced by the command line's."""
    return TrainOptions(**{**config, **line})
