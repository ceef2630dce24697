"""Write docs/predicted.md: what the simulator promises, beside what was published.

    python benchmarks/predicted.py > docs/predicted.md
    python benchmarks/predicted.py cards          # the table of README.md

Takes a few minutes. tests/docs/test_predicted.py re-runs a part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ps_core._command.forecast import Forecast, Training, bounds, forecast
from ps_core._command.largest_model import largest
from ps_core._errors import DoesNotFit
from ps_core._planner.eviction_policy import Policy
from ps_core._planner.search import with_policy
from ps_core._simulate.cluster import DEVICE_RESERVE_BYTES, Cluster
from ps_core._simulate.machine import MACHINES, default_machine
from ps_core._units import format_bytes, format_count
from ps_core._workloads.named_shapes import shape

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Server:
    """A machine with its memory."""

    label: str
    machine: str
    device: int
    """Bytes of each GPU."""
    host: int
    """Bytes of a node."""

    def training(self, gpus: int, batch: int = 4, nodes: int = 1) -> Training:
        """Sequences of 1024; inputs of recomputed blocks offloaded where it helps; the loss in chunks of rows."""
        cluster = Cluster(gpus=gpus, nodes=nodes, device_memory=self.device, host_memory=self.host)
        return Training(
            cluster=cluster,
            machine=MACHINES[self.machine],
            batch=batch,
            chunked_loss=True,
            offload_checkpoints=None,
            quick=True,
        )


V100 = Server(label="V100-32GiB, 240 GiB", machine="v100", device=32 * GIB, host=240 * GIB)
A100 = Server(label="A100-40GiB, 1000 GiB", machine="a100-40", device=40 * GIB, host=1000 * GIB)
H200 = Server(label="H200 139 GiB, 128 GiB", machine="h200", device=139 * GIB, host=128 * GIB)

# Server, GPUs, batch per GPU; published PatrickStar and DeepSpeed (both at whatever batch fitted).
SCALES = (
    (V100, 1, 4, "12B", "4B"),
    (V100, 8, 4, "18B", "4-6B"),
    (V100, 8, 32, "18B", "4-6B"),
    (A100, 1, 4, "50B", "15B"),
    (A100, 8, 4, "68B", "30B"),
    (A100, 8, 32, "68B", "30B"),
    (H200, 1, 4, "-", "-"),
)

# Server, GPUs, nodes, model, batch per GPU, published PatrickStar and DeepSpeed in TFLOPS per GPU.
SPEEDS = (
    (V100, 1, 1, "gpt-4b", 8, "48.4", "32.9"),
    (V100, 1, 1, "gpt-12b", 8, "33.8", "-"),
    (V100, 8, 1, "gpt-10b", 8, "61.8", "-"),
    (V100, 8, 1, "gpt-18b", 8, "52.4", "-"),
    (A100, 1, 1, "gpt-20b", 8, "93", "-"),
    (A100, 1, 1, "gpt-50b", 8, "67", "-"),
    (A100, 8, 1, "gpt-30b", 8, "141.5", "72.3"),
    (A100, 8, 1, "gpt-68b", 8, "107.1", "-"),
    (A100, 16, 2, "gpt-175b", 4, "-", "-"),
    (A100, 32, 4, "gpt-175b", 4, "110", "-"),
)


def scale_row(server: Server, gpus: int, batch: int, patrickstar: str, deepspeed: str) -> str:
    """The largest model of one machine."""
    found = largest(server.training(gpus, batch))
    if found is None:
        return _row(server.label, gpus, batch, "-", "-", "-", "-", patrickstar, deepspeed)
    told = found.forecast
    size = f"{format_count(found.shape.parameters)} (`{found.shape.name}`)"
    speed = f"{told.tflops_per_gpu:.0f}", f"{told.tokens_per_s:,.0f}", f"{told.bound_tokens_per_s:,.0f}"
    return _row(server.label, gpus, batch, size, *speed, patrickstar, deepspeed)


def speed_rows(
    server: Server, gpus: int, nodes: int, model: str, batch: int, published: Sequence[str]
) -> Iterator[str]:
    """One model under every policy, at the placement found for the first; equal policies share a row."""
    training = server.training(gpus, batch, nodes)
    try:
        found = forecast(shape(model), training)
    except DoesNotFit:
        yield _row(server.label, gpus, f"`{model}`", batch, "does not fit", *[""] * 6, *published)
        return
    policies: dict[tuple[str, ...], list[Policy]] = {}
    for policy in Policy:
        told = _under(found, policy)
        if told is None:
            continue
        moved = told.planned.prediction.moved_bytes
        figures = (
            format_bytes(moved["host->device"]),
            format_bytes(moved["device->host"]),
            format_bytes(moved["wire"]),
            f"{told.step_time_s:.1f}",
            f"{told.prediction.bound_step_time_s:.1f}",
            f"{told.tflops_per_gpu:.1f}",
        )
        policies.setdefault(figures, []).append(policy)
    for figures, same in policies.items():
        named = ", ".join(policy.value for policy in same)
        beside = published if Policy.BELADY in same else ("", "")
        yield _row(server.label, gpus, f"`{model}`", batch, named, *figures, *beside)


def _under(found: Forecast, policy: Policy) -> Forecast | None:
    if policy is Policy.BELADY:
        return found
    if found.planned.placement is None:
        return None
    setup = replace(found.training, policy=policy).setup()
    try:
        planned = with_policy(found.planned, policy, found.training.machine, setup)
    except Exception as error:
        if type(error).__name__ != "NoRoom":
            raise
        return None
    return replace(found, planned=planned)


def _header(*columns: str) -> Iterator[str]:
    names = ("GPU, host memory of a node", "GPUs", *columns, "PatrickStar, published", "DeepSpeed, published")
    yield _row(*names)
    yield _row("---", *("--:" for _ in names[1:]))


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


HEAD = """# Predicted scale and speed

Nothing on this page was measured here: every figure of ours is **predicted**. A step was planned, the plan verified,
and simulated on a [machine file](command.md#machine-files). `python benchmarks/predicted.py > docs/predicted.md`
writes the page. To predict for your own model and computer, use [`pstar plan` and `pstar scale`](command.md). `pstar
plan` searches longer than this script, and may find a plan that is about 1 % faster.

- **Setting.** Sequences have 1024 tokens. Batch is per GPU. Blocks are recomputed in backward; their inputs leave the
  GPU where that helps. The loss is computed in chunks of rows. TFLOPS count 8 operations per parameter and token, per
  GPU.
- **Speeds** are those of the engine. The CPU steps during the next forward pass, which waits for each group's step
  before it needs the group ([ADR 42](adr/0042-steps-beside-the-next-pass.md)). *Bound* is what the plan would allow
  if the step overlapped backward too: 6.7B (`gpt-32x4096`) in 24 GiB of an H200, batch 8, these inputs kept, takes
  1,380 ms where the bound is 1,230. Several processes follow [one plan](distributed.md#order) too; each one's cores
  step its shards.
- **How near.** An H200 ran three such plans, each on two occasions. The built-in rates had predicted from 6 % more to
  26 % less time ([measured](measured-on-a-gpu.md#measured-and-planned)). A step of the 6.7B above took 1,839 ms and
  1,649 ms. It was predicted to take 1,370 there: the tables here keep 0.6 GB of each GPU free (`--reserve-device`), and
  the engine's budget was all of 24 GiB.
- **Published** figures are those of the PatrickStar papers (arXiv 2108.05818; IEEE TPDS 34(1)), read off their plots,
  at batch sizes of their choice.

## The largest model

The largest model that keeps each GPU at half its matrix rate or more (`pstar scale`).
"""

MIDDLE = """
## Speed and moved bytes, by eviction policy

One group size and one placement of optimizer states for each model: those found for Belady's rule. Bytes are those
one process moves in one step; *wire* is what it sends to the others. Policies with the same figures share a row. A
policy that is missing finds no room in that placement, or memory is so tight that there is nothing to choose. LRU often
does as well as Belady's rule: backward is nearly the forward pass in reverse, so the least recently used group is the
one needed last.
They differ with accumulation, tied weights and unequal moments.
"""

APART = """
## Table and head apart

`llama-8b` has a vocabulary of 128,256: a token table and a head of 1.0 GB each in 16 bits. What a GPU of 8 GiB (rates
of `rtx4060`, batch 4, 192 GiB of host memory) does with them whole, and with `--cpu-embedding` and `--head-tiles 16`.
*Least* is the device memory below which there is no plan, the reserve of 0.6 GB included. Inputs of recomputed blocks
leave the GPU.
"""

TAIL = """
## What the model leaves out

- **Matrix work runs at one rate**, whatever its shape. Narrow models (hidden size 2048), short sequences and small
  batches run slower than that on real hardware; recomputation and attention are priced like any other operation.
- **Everything that is neither matrix work, optimizer nor movement** is a fixed overhead a moment: layer norms,
  dropout, activation functions.
- **The thread that launches work** takes 50 microseconds for each operator and 20 for each tensor, on every machine.
  Narrow models and small batches wait for it. It shares the cores with CPU steps, which is not in the figures.
- **Contention is simple**: processes of a node divide host memory and disks evenly; copies up and down share host
  memory by their bytes; a step on the CPU is slowed by its segment's copies. Real memory controllers, NUMA, PCIe
  switches shared by two GPUs, and power limits are rougher. Collectives and matrix work do not slow each other.
- **Non-model memory comes from formulas**, not from an allocator: fragmentation is a flat 5 %, the CUDA
  context and NCCL are named reserves. The real peak can be off by several percent, and so can the largest model.
- **Every process keeps step**: no stragglers, no loading of data, no checkpoints, no evaluation.
- **The machine files are cautious readings** of data sheets and published runs. Change them (`--machine FILE`) to
  what you measure; [the machine format](command.md#machine-files) is small.
"""


CARD = Server(label="", machine="rtx4060", device=8 * GIB, host=192 * GIB)


def apart_row(*, cpu_embedding: bool, head_tiles: int) -> str:
    """One way to have table and head."""
    training = replace(CARD.training(1), cpu_embedding=cpu_embedding, head_tiles=head_tiles, offload_checkpoints=True)
    model = shape("llama-8b")
    least = bounds(model, training)[0].needed_bytes + DEVICE_RESERVE_BYTES
    found = forecast(model, training)
    moved = found.prediction.moved_bytes
    return _row(
        "host" if cpu_embedding else "anywhere",
        head_tiles,
        format_bytes(least),
        format_bytes(moved["host->device"]),
        format_bytes(moved["device->host"]),
        f"{found.step_time_s:.1f}",
        f"{found.prediction.bound_step_time_s:.1f}",
        f"{found.tokens_per_s:,.0f}",
    )


def apart() -> Iterator[str]:
    """All four ways."""
    yield _row("table", "head tiles", "least", "up", "down", "step, s", "bound, s", "tokens/s")
    yield "| --- | --: | --: | --: | --: | --: | --: | --: |"
    for tiles in (1, 16):
        for away in (False, True):
            yield apart_row(cpu_embedding=away, head_tiles=tiles)


# GiB of the card, GiB of RAM, batch.
CARDS = ((8, 16, 4), (24, 64, 16), (24, 128, 16), (80, 512, 16))


def card_row(device: int, host: int, batch: int) -> str:
    """One row of the README's table; the machine is the one `pstar scale` assumes."""
    server = Server(label="", machine=default_machine(device * GIB).name, device=device * GIB, host=host * GIB)
    found = largest(server.training(1, batch))
    if found is None:
        return _row(f"{device} GiB", f"{host} GiB", "-", batch, "-", "-", "-")
    told = found.forecast
    card = f"{device} GiB (`{server.machine}`)"
    size = f"{format_count(found.shape.parameters)} (`{found.shape.name}`)"
    speeds = f"{told.tokens_per_s:,.0f}", f"{told.bound_tokens_per_s:,.0f}", f"{told.tflops_per_gpu:.0f}"
    return _row(card, f"{host} GiB", size, batch, *speeds)


def cards() -> Iterator[str]:
    """The README's table."""
    yield _row("card (rates of)", "RAM", "largest model", "batch", "tokens/s", "bound, tokens/s", "TFLOPS")
    yield "|---|--:|---|--:|--:|--:|--:|"
    yield from (card_row(*card) for card in CARDS)


def page() -> Iterator[str]:
    """The whole page."""
    yield HEAD
    yield from _header("batch", "largest, predicted", "TFLOPS per GPU", "tokens/s", "bound, tokens/s")
    for scale in SCALES:
        yield scale_row(*scale)
    yield MIDDLE
    yield from _header("model", "batch", "policy", "up", "down", "wire", "step, s", "bound, s", "TFLOPS per GPU")
    for server, gpus, nodes, model, batch, *published in SPEEDS:
        yield from speed_rows(server, gpus, nodes, model, batch, published)
    yield APART
    yield from apart()
    yield TAIL.rstrip("\n")


if __name__ == "__main__":
    for line in cards() if sys.argv[1:] == ["cards"] else page():
        print(line, flush=True)
