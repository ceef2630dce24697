"""Hold the version, in one place; all four packages carry the same."""

__version__ = "0.1.0"
