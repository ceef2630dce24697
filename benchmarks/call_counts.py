"""Count the Python calls and files of one forward pass, backward pass and step, beside those of FSDP2.

    python benchmarks/call_counts.py [--functions]

Six blocks of ``Linear(64, 64)`` and GELU, bf16, the eighth step. Counted are calls of functions whose code is in
ps_core or ps_kernels (for FSDP2: in ``torch.distributed.fsdp``). Counts do not depend on the machine's speed; the
test ``tests/engine/test_overhead.py`` holds ours. With ``--functions`` every function is listed. (FSDP2 has no step of
its own, but that of ``torch.optim``.)
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ps_core
import ps_kernels
from ps_core import AdamW, Budget
from ps_core.engine import chunked, release

WARM_STEPS = 7
BUDGETS = {"every group moves": 40 * 1024, "nothing moves": 4 * 2**20}
OURS = tuple(os.path.dirname(package.__file__ or "") for package in (ps_core, ps_kernels))


class Counter:
    """Counts calls of Python functions whose code lies in some folders."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._folders = folders
        self.functions: collections.Counter[tuple[str, str]] = collections.Counter()
        """By file and name."""

    @property
    def totals(self) -> tuple[int, int]:
        """Return the number of calls, and of files that the called functions are in."""
        return self.functions.total(), len({file for file, _ in self.functions})

    def _profile(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._folders):
            self.functions[code.co_filename, code.co_qualname] += 1

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function and count meanwhile. The garbage collector would add calls of its own."""
        gc.collect()
        gc.disable()
        sys.setprofile(self._profile)
        try:
            return function()
        finally:
            sys.setprofile(None)
            gc.enable()


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))


def counted(model: nn.Module, optimizer: Any, folders: tuple[str, ...]) -> dict[str, Counter]:
    """Calls of each part of the eighth step."""
    inputs = torch.randn(8, 64)

    def loss() -> torch.Tensor:
        return model(inputs).float().square().mean()

    for _ in range(WARM_STEPS):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {part: Counter(folders) for part in ("forward", "backward", "step")}
    value = found["forward"].run(loss)
    found["backward"].run(value.backward)
    found["step"].run(lambda: (optimizer.step(), optimizer.zero_grad()))
    return found


def ours(device_bytes: int) -> dict[str, Counter]:
    """Counts of the engine under a budget."""
    model, optimizer = chunked(
        blocks(), AdamW(lr=1e-3), device="emulated", budget=Budget(device=device_bytes, host="64MiB"), precision="bf16"
    )
    torch.set_num_threads(1)
    found = counted(model, optimizer, OURS)
    release(model)
    return found


def fsdp2() -> dict[str, Counter]:
    """Counts of FSDP2 with one process."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = blocks()
        mesh = dist.init_device_mesh("cpu", (1,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        folder = os.path.join(os.path.dirname(torch.__file__), "distributed", "fsdp")
        return counted(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True), (folder,))
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts calls.")
    parser.add_argument("--functions", action="store_true", help="list every function")
    told = parser.parse_args()
    rows = {name: ours(size) for name, size in BUDGETS.items()}
    rows["FSDP2"] = fsdp2()
    print(f"{'calls (files)':<20}{'forward':>14}{'backward':>14}{'step':>14}")
    for name, row in rows.items():
        cells = [f"{calls:,} ({files})" for calls, files in (counter.totals for counter in row.values())]
        print(f"{name:<20}" + "".join(f"{cell:>14}" for cell in cells))
    for name, row in rows.items() if told.functions else ():
        for part, counter in row.items():
            print(f"\n{name}, {part}")
            for (file, function), count in counter.functions.most_common():
                print(f"{count:>6} {os.path.basename(os.path.dirname(file))}/{os.path.basename(file)} {function}")


if __name__ == "__main__":
    main()
