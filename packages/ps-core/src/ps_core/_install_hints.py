"""Say how to install a package that is missing."""

from __future__ import annotations


def how_to_install(library: str) -> str:
    """Return a sentence that ends in the command, by the import name; this project's packages are in no package
    index.
    """
    if library.startswith("ps_"):
        return f"in the folder of the clone, pip install packages/{library.replace('_', '-')}"
    return f"pip install {library}"
