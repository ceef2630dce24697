"""Train transformer models larger than the accelerator's memory: record, plan, verify, replay."""

from ps_core._version import __version__

__all__ = ["__version__"]
