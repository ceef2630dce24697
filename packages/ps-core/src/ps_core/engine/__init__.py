"""Train a PyTorch model whose model data does not fit the accelerator: see `chunked`."""

from ps_core._simulate.idle_time import StepTimes
from ps_core.engine._checkpoint.check_files import check_checkpoint
from ps_core.engine._checkpoint.export import export_checkpoint, save_weights
from ps_core.engine._checkpoint.load_weights import load_weights
from ps_core.engine._checkpoint.save_load import load_checkpoint, save_checkpoint
from ps_core.engine._chunked import chunked
from ps_core.engine._execution.activation_offload import offloaded
from ps_core.engine._execution.find_hooks import is_managed
from ps_core.engine._execution.host_embedding import HostEmbedding
from ps_core.engine._materialized import materialized, release
from ps_core.engine._memory_measurement import MemoryMeasurement
from ps_core.engine._optim.optimizer import ChunkedOptimizer
from ps_core.engine._profiling.profile import Profile, profiled
from ps_core.engine._rank0_only import rank0_only
from ps_core.engine._statistics import Statistics, TierStatistics, statistics
from ps_core.engine._tracing.fake_trace import CannotTrace, trace
from ps_core.engine._weight_average import WeightAverage

__all__ = [
    "CannotTrace",
    "ChunkedOptimizer",
    "HostEmbedding",
    "MemoryMeasurement",
    "Profile",
    "Statistics",
    "StepTimes",
    "TierStatistics",
    "WeightAverage",
    "check_checkpoint",
    "chunked",
    "export_checkpoint",
    "is_managed",
    "load_checkpoint",
    "load_weights",
    "materialized",
    "offloaded",
    "profiled",
    "rank0_only",
    "release",
    "save_checkpoint",
    "save_weights",
    "statistics",
    "trace",
]
