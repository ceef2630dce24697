"""Warn once a process, whatever warning filters are set."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def say_once(message: str) -> None:
    """Warn; the same message a second time does nothing. If warnings are errors, raise."""
    warnings.warn(f"ps_kernels: {message}", stacklevel=4)
