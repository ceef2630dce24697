"""Log the engine's few messages, through the standard library's logging."""

from __future__ import annotations

import logging
import sys

from ps_core._broken_pipe import tell

LOGGER = logging.getLogger("ps_core")
"""The engine's logger, to be silenced or redirected as any other; by default its lines go to stderr."""


def log_line(text: str) -> None:
    """Log one line at level INFO."""
    _tell(logging.INFO, text)


def warn(text: str) -> None:
    """Log one line at level WARNING: something is lost, or is not as the user asked."""
    _tell(logging.WARNING, text)


def _tell(level: int, text: str) -> None:
    if LOGGER.level == logging.NOTSET and not LOGGER.hasHandlers():
        tell(f"ps_core: {text}", sys.stderr)
    else:
        LOGGER.log(level, text)


def say_if_debugging(text: str) -> None:
    """Log one line at level DEBUG, which is shown only if that level is on."""
    LOGGER.debug(text)
