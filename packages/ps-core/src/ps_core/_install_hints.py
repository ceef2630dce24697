"""How to get a package that is not there."""

from __future__ import annotations


def how_to_install(library: str) -> str:
    """In words that end in the command, by the name it is imported by; no package index has those of this project."""
    if library.startswith("ps_"):
        return f"in the folder of the clone, pip install packages/{library.replace('_', '-')}"
    return f"pip install {library}"
