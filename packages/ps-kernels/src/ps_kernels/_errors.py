"""Every error this package raises on purpose; each is raised before anything is written.

KernelError
├── InvalidArgument (also a ValueError)   an array or number that cannot be used
└── BackendMissing (also a RuntimeError)  the backend asked for is not there; says why
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of every error raised on purpose."""


class InvalidArgument(KernelError, ValueError):
    """An array or a number that cannot be used."""


class BackendMissing(KernelError, RuntimeError):
    """The backend asked for is not there."""
