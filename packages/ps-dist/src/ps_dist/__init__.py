"""Collectives between training processes, over torch.distributed."""

from ps_dist._collectives import Statistics, TorchCollectives
from ps_dist._comm_thread import Pending
from ps_dist._connect import connect, transports
from ps_dist._mesh import Mesh
from ps_dist._share_memory import shared_memory_error
from ps_dist._version import __version__

__all__ = [
    "Mesh",
    "Pending",
    "Statistics",
    "TorchCollectives",
    "__version__",
    "connect",
    "shared_memory_error",
    "transports",
]
