"""Import transformers and PEFT if an option needs them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ps_core._errors import InvalidInput
from ps_core._install_hints import how_to_install


def transformers_for(option: str, folder: Path) -> Any:
    """Return the package transformers; raise `InvalidInput` without it, or without ``option``'s folder."""
    library = package_for(option, "transformers")
    if not folder.is_dir():
        raise InvalidInput(
            f"{option}: found {str(folder)!r}, which is no folder; allowed is one that save_pretrained has written"
        )
    return library


def package_for(option: str, name: str) -> Any:
    """Return a package that ``option`` needs; `InvalidInput` says how to install it. (Any: it may be missing.)"""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InvalidInput(
            f"{option}: needs the package {name}; allowed without it is to leave {option} out; to have it: "
            f"{how_to_install(name)}"
        ) from None
