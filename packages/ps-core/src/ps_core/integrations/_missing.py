"""Say how to install the library that an integration is for."""

from __future__ import annotations

from ps_core._install_hints import how_to_install


def missing(error: ModuleNotFoundError, library: str) -> ModuleNotFoundError:
    """Return an error with the command that installs ``library``; ``error`` itself if another module is missing."""
    if error.name is None or error.name.partition(".")[0] != library:
        return error
    told = f"this integration needs the library {library}, which is not installed: {how_to_install(library)}"
    return ModuleNotFoundError(told, name=error.name)
