"""Collectives between training processes, over torch.distributed."""

from ps_dist._collectives import TorchCollectives
from ps_dist._connect import connect
from ps_dist._version import __version__

__all__ = ["TorchCollectives", "__version__", "connect"]
