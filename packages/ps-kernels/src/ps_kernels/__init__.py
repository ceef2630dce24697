"""Run optimizer steps, norms and copies on arrays, with the same bits on every backend.

Importing this loads neither NumPy nor PyTorch. A call loads the library of its arrays.
"""

from ps_kernels._api import Pieces, accumulate, adam_step, gather, scatter, set_threads, sgd_step, sumsq_finite
from ps_kernels._backends import backends, warm
from ps_kernels._errors import BackendMissing, InvalidArgument, KernelError
from ps_kernels._losses import cross_entropy
from ps_kernels._pinned import PinnedArena
from ps_kernels._sums import sum_in_order
from ps_kernels._version import __version__

__all__ = [
    "BackendMissing",
    "InvalidArgument",
    "KernelError",
    "Pieces",
    "PinnedArena",
    "__version__",
    "accumulate",
    "adam_step",
    "backends",
    "cross_entropy",
    "gather",
    "scatter",
    "set_threads",
    "sgd_step",
    "sum_in_order",
    "sumsq_finite",
    "warm",
]
