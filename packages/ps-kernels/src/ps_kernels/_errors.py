"""Define every error that this package raises on purpose; each is raised before anything is written.

KernelError
├── InvalidArgument (also a ValueError)   an array or number that cannot be used
└── BackendMissing (also a RuntimeError)  the backend asked for is not there; says why
"""

from __future__ import annotations


class KernelError(Exception):
    """Base class of every error that is raised on purpose."""


class InvalidArgument(KernelError, ValueError):
    """Say that an array or a number cannot be used."""


class BackendMissing(KernelError, RuntimeError):
    """Say that the requested backend is not available."""
