"""Write docs/scaling.md: very large models on many nodes, as far as paper goes.

    python benchmarks/scaling.py > docs/scaling.md

Takes a few minutes. tests/docs/test_scaling.py re-runs a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from predicted import A100, GIB, Server
from ps_core._command.forecast import Forecast, forecast
from ps_core._errors import DoesNotFit
from ps_core._plan import Gather, ReduceScatter
from ps_core._simulate.cluster import ring_s, tree_s
from ps_core._units import format_bytes
from ps_core._workloads.named_shapes import shape

H100 = Server(label="H100-80GiB, 2000 GiB", machine="h100", device=80 * GIB, host=2000 * GIB)
PER_NODE = 8
SIZES = (8, 16, 32, 64, 128, 512, 1024, 4096)
PUBLISHED = {32: "110", 64: "126"}
"""TFLOPS per GPU of PatrickStar, 175B on A100-40GB."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, where, and how many sequences a GPU takes."""

    title: str
    model: str
    server: Server
    batch: int


CASES = (
    Case(title="175B on A100", model="gpt-175b", server=A100, batch=4),
    Case(title="A trillion on H100", model="gpt-128x25600", server=H100, batch=4),
)


def row(case: Case, gpus: int) -> str:
    """One size of one case."""
    nodes = gpus // PER_NODE
    published = PUBLISHED.get(gpus, "-") if case.server is A100 else "-"
    try:
        found = forecast(shape(case.model), case.server.training(gpus, case.batch, nodes))
    except DoesNotFit as refusal:
        missing = refusal.needed_bytes - refusal.available_bytes
        why = f"does not fit: {format_bytes(missing)} of {refusal.tier} missing, each"
        return _row(f"{gpus:,}", nodes, why, "", "", "", "", "", "", published)
    told = found.planned.prediction
    ring = told.busy_s["collectives"]
    per_rank = case.server.training(gpus, case.batch, nodes).cluster.ranks_per_node
    tree = ring - collectives(found) * (ring_s(gpus, per_rank) - tree_s(gpus, per_rank))
    peaks = " / ".join(format_bytes(count) for count in told.peak_bytes.values())
    return _row(
        f"{gpus:,}",
        nodes,
        peaks,
        f"{told.step_time_s:.1f}",
        f"{told.bound_step_time_s:.1f}",
        f"{ring:.1f}",
        f"{tree:.1f}",
        f"{found.tflops_per_gpu:.0f}",
        f"{found.tokens_per_s:,.0f}",
        published,
    )


def collectives(found: Forecast) -> int:
    """Gathers and sums of a step."""
    program, plan = found.planned.program, found.planned.plan
    return sum(
        isinstance(instr.op, Gather | ReduceScatter)
        for name in program.iteration()
        for instr in plan.segment(name).instrs
    )


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


HEAD = """# Predicted scaling to many GPUs

Nothing on this page was measured: every figure of ours is **predicted**, as in [the other tables](predicted.md). The
engine has never run on a machine of this size. `python benchmarks/scaling.py > docs/scaling.md` writes the page.

- **Setting.** Nodes have 8 GPUs. Each GPU has 4 sequences of 1024 tokens, so a step's batch grows with the GPUs.
  There is one copy of the model in all (ZeRO over every process). Blocks are recomputed in backward, the loss is in
  chunks of rows.
- *Peaks* are those of a process, on its GPU and in its part of host memory.
- *Step* is the time of a step as the engine runs the plan: the CPU steps a process's shards during the next forward
  pass. *Bound* is the time if everything overlapped. Several processes follow [such a plan](distributed.md#order).
- TFLOPS count 8 operations per parameter and token, per GPU. *Published* is PatrickStar (arXiv 2108.05818; IEEE TPDS
  34(1)), read off its plots, at a batch of its choice.

`pstar plan gpt-175b --gpus 512 --nodes 64 --machine a100-40` plans one such row. It searches longer than the script of
these tables, and finds a step of 44.4 s.

## How long a collective takes

- **A gather** sends a shard to each node once. Its rate is the slower of a GPU's link and its node's adapters
  together.
- **A sum** adds gradients in rank order, for the same bits on any number of nodes. So each rank's gradients come to a
  node separately, at the GPU's part of the adapters. That takes several times as long.
- **Hops.** Both also wait until the first byte has come round. In a ring of p processes on n nodes there are p - n
  hops of 3.4 us within nodes and n - 1 of 14 us between them; in a tree the logarithms of both.

The columns *ring* and *tree* are the busy time of a step's collectives with one or the other. Collectives run while
the GPU computes, so the step is not their sum. Its time is predicted with the ring, which NCCL uses for gathers of
this kind.
"""

TAIL = """
## Where this is off

- **The published points are slower**: 110 TFLOPS where 139 are predicted (32 GPUs), 126 where 134 are (64), so the
  prediction is too high by 26 and by 6 per cent. The published rate rises from 32 to 64 GPUs, because each then has
  less to step and to move; in the prediction steps and moves already overlap with computation. The machine file's
  rate for matrix work on an A100 is that of well-tuned later code. The published batch and network are not known
  here. Nothing is fitted: a machine file with the rates of a cluster (`pstar doctor --calibrate` on one of its nodes)
  says more than this page.
- **Sums in rank order** cost several nodes 5 to 50 per cent of a step. A chain from node to node would give the same
  bits with less traffic. That is not built.
- **What large clusters lose most to** is not in the model: stragglers, congestion, and adapters that are shared with
  storage.
- **In the thousands** a ring's hops are up to half of a collective's time, and the prediction depends on two latencies
  that were taken from NCCL's own model and not measured. Libraries cut this with trees or several rings, users with
  copies: `connect(replicate=...)` keeps gathers within a few nodes. `pstar plan --replicate` plans them.
- **Batches grow without limit here**: 4096 GPUs take 16.8 million tokens a step, more than a model of this size is
  usually trained with. With fewer sequences a GPU the same bytes are hidden behind less work.
- **Only single GPUs have run the engine**, of one kind. Up to four processes, on CPUs, have followed such plans.
  Nothing of this size has run.
"""


def page() -> Iterator[str]:
    """The whole page."""
    yield HEAD.rstrip("\n")
    for case in CASES:
        yield f"\n## {case.title}\n"
        yield f"`{case.model}` on {case.server.label} a node, {case.batch} sequences a GPU.\n"
        yield _row(
            "GPUs",
            "nodes",
            "peaks",
            "step, s",
            "bound, s",
            "ring, s",
            "tree, s",
            "TFLOPS per GPU",
            "tokens/s",
            "published TFLOPS",
        )
        yield "| --: | --: | --- | --: | --: | --: | --: | --: | --: | --: |"
        for gpus in SIZES:
            yield row(case, gpus)
    yield TAIL.rstrip("\n")


if __name__ == "__main__":
    for line in page():
        print(line, flush=True)
