"""Training a PyTorch model whose model data does not fit the accelerator: see `chunked`."""

from ps_core.engine._chunked import chunked
from ps_core.engine._statistics import Statistics, TierStatistics, statistics
from ps_core.engine._surgery import materialized, release

__all__ = ["Statistics", "TierStatistics", "chunked", "materialized", "release", "statistics"]
