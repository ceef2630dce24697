"""Several processes on one model, beside PyTorch's own ways, in the same run: tokens a second and peak memory.

    torchrun --nproc-per-node=2 benchmarks/dist_figures.py [--rounds 5] [--only "ours bf16"]

Contenders take turns, a training step each; a ratio is taken within a round, so that what disturbs the machine disturbs
both. Each process has one thread. With ``--only`` the peak resident set sizes of the processes are added up too: they
are of one contender only then.
"""

from __future__ import annotations

import argparse
import resource
import statistics as numbers
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ps_dist
from ps_core import AdamW
from ps_core.engine import chunked, statistics

sys.path.insert(0, str(Path(__file__).parent))
from engine_figures import GPT, Shape, Step, batches, make, spread, take_turns

KIB = 1024
Contender = Callable[[Shape, ps_dist.TorchCollectives], Step]


def training(model: nn.Module, optimizer: torch.optim.Optimizer, shape: Shape, rank: int, parts: int) -> Step:
    """A step on this rank's rows of each batch; ``parts``: what the loss is divided by."""
    data, ranks = batches(shape), dist.get_world_size()

    def step() -> None:
        loss = model(next(data)[rank::ranks])
        (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(shape: Shape, together: ps_dist.TorchCollectives) -> Step:
    model = DistributedDataParallel(make(shape))
    return training(model, torch.optim.AdamW(model.parameters(), fused=True), shape, together.rank, 1)


def fsdp(precision: str) -> Contender:
    def made(shape: Shape, together: ps_dist.TorchCollectives) -> Step:
        model = make(shape)
        assert isinstance(model, GPT)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision == "bf16" else None)
        mesh = dist.device_mesh.init_device_mesh("cpu", (together.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return training(model, torch.optim.AdamW(model.parameters(), fused=True), shape, together.rank, 1)

    return made


def ours(precision: str) -> Contender:
    def made(shape: Shape, together: ps_dist.TorchCollectives) -> Step:
        model, optimizer = chunked(make(shape), AdamW(), precision=precision, collectives=together)
        assert optimizer is not None
        found = statistics(model)
        if together.rank == 0:
            print(f"  ours {precision}: {found.bytes_per_parameter:.2f} bytes a parameter and rank, counted")
        return training(model, optimizer, shape, together.rank, together.ranks)

    return made


CONTENDERS: dict[str, Contender] = {
    "DDP fp32": ddp,
    "FSDP2 fp32": fsdp("fp32"),
    "FSDP2 bf16": fsdp("bf16"),
    "ours fp32": ours("fp32"),
    "ours bf16": ours("bf16"),
}
RATIOS = (("ours fp32", "FSDP2 fp32"), ("ours fp32", "DDP fp32"), ("ours bf16", "FSDP2 bf16"))


def figures(shape: Shape, together: ps_dist.TorchCollectives, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender's steps."""
    steps = {name: CONTENDERS[name](shape, together) for name in names}
    return take_turns(steps, rounds, warm_up=3)  # ours asks in the first pass, and keeps groups from the second on


def show(shape: Shape, taken: dict[str, list[float]], peaks: list[float]) -> None:
    for name, seconds in taken.items():
        print(f"  {name:12} {shape.batch * shape.length / numbers.median(seconds):8.0f} tokens/s")
    for one, other in RATIOS:
        if one in taken and other in taken:
            ratios = [theirs / mine for mine, theirs in zip(taken[one], taken[other], strict=True)]
            print(f"  {one} / {other}: {spread(ratios)} of {len(ratios)} rounds")
    if len(taken) == 1:
        print(f"  peak resident set, all ranks: {sum(peaks) / KIB:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=CONTENDERS)
    parser.add_argument("--small", action="store_true", help="to see that it runs")
    told = parser.parse_args()
    torch.set_num_threads(1)
    together = ps_dist.connect(timeout_s=300)
    shape = Shape(layers=2, hidden=64, heads=2, vocabulary=96, batch=4, length=16) if told.small else Shape()
    taken = figures(shape, together, [told.only] if told.only else list(CONTENDERS), told.rounds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = [row[0] for row in together.all_values([peak], "peak")]
    if together.rank == 0:
        show(shape, taken, peaks)
    together.close()


if __name__ == "__main__":
    main()
