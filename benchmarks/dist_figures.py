"""Several processes on one model, beside other ways, in the same run: tokens a second, processor time, peak memory.

    torchrun --nproc-per-node=2 benchmarks/dist_figures.py [--rounds 5] [--only "ours bf16"] [--among "ours bf16,..."]
        [--size 9M]

Contenders take turns, a training step each; a ratio is taken within a round, so that what disturbs the machine disturbs
both. Each process has one thread for computing; its processor time is of all its threads. With ``--only`` the peak
memory of the processes is added up too, which is of one contender only then; it is looked at twenty times a second, and
pages that several processes have mapped count once. DeepSpeed takes part where it is installed.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics as numbers
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ps_dist
from engine_figures import DTYPES, GPT, Shape, Step, batches, check, make
from ps_core import AdamW
from ps_core.engine import chunked, statistics
from turns import ratios, spread, take_turns

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


def alone(precision: str) -> Contender:
    """Exchange nothing, and step a rank's part of the parameters: no way of dividing the work is faster."""

    def made(shape: Shape, together: ps_dist.TorchCollectives) -> Step:
        model = make(shape).to(DTYPES[precision])
        stepped, size, whole = [], 0, sum(each.numel() for each in model.parameters())
        for each in model.parameters():
            if together.ranks * (size + each.numel()) <= whole:
                stepped.append(each)
                size += each.numel()
        step = training(model, torch.optim.AdamW(stepped, fused=True), shape, together.rank, 1)

        def run() -> None:
            step()
            model.zero_grad()

        return run

    return made


def fsdp(precision: str) -> Contender:
    def made(shape: Shape, together: ps_dist.TorchCollectives) -> Step:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # here, for it takes 44 MiB

        model = make(shape)
        assert isinstance(model, GPT)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision == "bf16" else None)
        mesh = dist.device_mesh.init_device_mesh("cpu", (together.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return training(model, torch.optim.AdamW(model.parameters(), fused=True), shape, together.rank, 1)

    return made


def deepspeed(precision: str) -> Contender:
    """ZeRO stage 3, all in memory; in buckets that suit the model, for the usual ones are 500 million elements."""

    def made(shape: Shape, together: ps_dist.TorchCollectives) -> Step:
        os.environ["DS_ACCELERATOR"] = "cpu"
        library = import_module("deepspeed")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        model, data, ranks = make(shape), batches(shape), dist.get_world_size()
        settings = {
            "train_micro_batch_size_per_gpu": shape.batch // ranks,
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 5_000_000},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": precision == "bf16"},
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine = library.initialize(model=model, optimizer=optimizer, config=settings)[0]

        def step() -> None:
            engine.backward(engine(next(data)[together.rank :: ranks]))
            engine.step()

        return step

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
    "alone fp32": alone("fp32"),
    "alone bf16": alone("bf16"),
    "DDP fp32": ddp,
    "FSDP2 fp32": fsdp("fp32"),
    "FSDP2 bf16": fsdp("bf16"),
    "DeepSpeed fp32": deepspeed("fp32"),
    "DeepSpeed bf16": deepspeed("bf16"),
    "ours fp32": ours("fp32"),
    "ours bf16": ours("bf16"),
}
SHAPES = {
    "50M": Shape(),
    "9M": Shape(layers=4, hidden=384, heads=6, vocabulary=4096, batch=12, length=128),
    "tiny": Shape(layers=2, hidden=64, heads=2, vocabulary=96, batch=4, length=16),
}
"""The models, by their number of parameters. Two, three or four processes divide the 12 rows of "9M" evenly."""
RATIOS = (
    ("ours fp32", "alone fp32"),
    ("ours bf16", "alone bf16"),
    ("ours fp32", "FSDP2 fp32"),
    ("ours fp32", "DDP fp32"),
    ("ours fp32", "DeepSpeed fp32"),
    ("alone fp32", "DDP fp32"),
    ("alone fp32", "FSDP2 fp32"),
    ("alone fp32", "DeepSpeed fp32"),
    ("ours bf16", "FSDP2 bf16"),
    ("alone bf16", "FSDP2 bf16"),
    ("alone bf16", "DeepSpeed bf16"),
    ("ours bf16", "DeepSpeed bf16"),
)
Figures = dict[str, list[float]]


def figures(shape: Shape, together: ps_dist.TorchCollectives, names: list[str], rounds: int) -> tuple[Figures, Figures]:
    """Seconds of each contender's steps, and of this process's processor time."""
    spent: Figures = {name: [] for name in names}

    def timed(name: str) -> Step:
        step = CONTENDERS[name](shape, together)

        def run() -> None:
            before = time.process_time()
            step()
            spent[name].append(time.process_time() - before)

        return run

    steps = {name: timed(name) for name in names}
    taken = take_turns(steps, rounds, warm_up=3)  # ours asks in the first pass, and keeps groups from the second on
    return taken, {name: seconds[-rounds:] for name, seconds in spent.items()}


def show(shape: Shape, taken: Figures, spent: Figures, peaks: list[float]) -> None:
    for name, seconds in taken.items():
        rate, processor_s = shape.batch * shape.length / numbers.median(seconds), numbers.median(spent[name])
        print(f"  {name:14} {rate:8.0f} tokens/s, {processor_s:6.3f} s of a processor a step and process")
    for one, other in RATIOS:
        if one in taken and other in taken:
            for what, rows in (("speed", taken), ("processor time", spent)):
                found = ratios(rows[other], rows[one])
                print(f"  {one} / {other}, by {what}: {spread(found)} of {len(found)} rounds")
    if len(taken) == 1:
        print(f"  peak memory, all ranks, shared pages once: {sum(peaks) / KIB:.0f} MiB")


class Peak:
    """The most memory that this process has while it is watched; pages that n processes have mapped count 1/n."""

    def __init__(self) -> None:
        self.kib, self._over = 0, Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            rows = Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines()
            self.kib = max(self.kib, *(int(row.split()[1]) for row in rows if row.startswith("Pss:")))

    def end(self) -> int:
        """Stop; the peak in KiB."""
        self._over.set()
        self._thread.join()
        return self.kib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=CONTENDERS)
    parser.add_argument("--among", default="", help="some contenders, with commas between")
    parser.add_argument("--size", choices=SHAPES, default="50M", help="of the model; tiny: to see that it runs")
    told = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[told.size]
    if not told.only:  # which is for the peak of one contender's memory, and of nothing before it
        check(shape, "fp32")
    together = ps_dist.connect(timeout_s=300)
    names = [told.only] if told.only else told.among.split(",") if told.among else list(CONTENDERS)
    missing = [name for name in names if name.startswith("DeepSpeed") and find_spec("deepspeed") is None]
    if missing and together.rank == 0:
        print(f"  skipped: {', '.join(missing)}, for deepspeed is not installed (pip install deepspeed)")
    peak = Peak() if told.only else None  # it takes time
    taken, spent = figures(shape, together, [name for name in names if name not in missing], told.rounds)
    peaks = [row[0] for row in together.all_values([peak.end() if peak else 0], "peak")]
    if together.rank == 0:
        show(shape, taken, spent, peaks)
    together.close()


if __name__ == "__main__":
    main()
