"""What is said once a process, whatever filters for warnings are set."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def say_once(message: str) -> None:
    """Warn; the same message a second time does nothing. Where warnings are errors it is raised."""
    warnings.warn(f"ps_kernels: {message}", stacklevel=4)
