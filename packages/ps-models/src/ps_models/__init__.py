"""Model builders, data and the trainer."""

from ps_models._version import __version__

__all__ = ["__version__"]
