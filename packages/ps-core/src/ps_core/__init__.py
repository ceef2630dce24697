"""Train transformer models larger than the accelerator's memory: record, plan, verify, replay.

What is here needs the standard library only. A `Trace` says what an iteration touches; `find_plan` decides every move
in advance; `verify` checks a plan in every order its waits allow; `simulate` says how long it takes.
"""

from ps_core._collectives import Collectives
from ps_core._errors import (
    AlreadyManaged,
    CheckpointDamaged,
    CheckpointMismatch,
    DeviceOutOfMemory,
    DoesNotFit,
    IllegalTransition,
    InvalidInput,
    PatrickStarError,
    PlanMismatch,
    RanksDiverged,
    TierFailure,
    UnsupportedParameter,
)
from ps_core._extents import Precision
from ps_core._options import SGD, Adam, AdamW, Budget, Group, Options, TorchOptimizer
from ps_core._plan import Plan, Tier
from ps_core._planner.eviction_policy import Policy
from ps_core._planner.search import Planned, Setup, find_plan
from ps_core._program import Program
from ps_core._simulate.clock import Prediction, simulate
from ps_core._simulate.cluster import Cluster
from ps_core._simulate.machine import Machine, machine
from ps_core._trace import Activation, Moment, Phase, Tensor, Trace
from ps_core._verify import verify
from ps_core._version import __version__
from ps_core._workloads.hf import shape_from_config
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.shapes import TransformerShape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

__all__ = [
    "SGD",
    "Activation",
    "Adam",
    "AdamW",
    "AlreadyManaged",
    "Budget",
    "CheckpointDamaged",
    "CheckpointMismatch",
    "Cluster",
    "Collectives",
    "DeviceOutOfMemory",
    "DoesNotFit",
    "Group",
    "IllegalTransition",
    "InvalidInput",
    "Machine",
    "Moment",
    "Options",
    "PatrickStarError",
    "Phase",
    "Plan",
    "PlanMismatch",
    "Planned",
    "Policy",
    "Precision",
    "Prediction",
    "Program",
    "RanksDiverged",
    "Setup",
    "Tensor",
    "Tier",
    "TierFailure",
    "TorchOptimizer",
    "Trace",
    "TransformerShape",
    "UnsupportedParameter",
    "Workload",
    "__version__",
    "analytic_trace",
    "find_plan",
    "machine",
    "shape",
    "shape_from_config",
    "simulate",
    "verify",
]
