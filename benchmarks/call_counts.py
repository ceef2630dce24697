"""Count the Python calls and files of one forward pass, backward pass and step, beside those of FSDP2.

    python benchmarks/call_counts.py

Six blocks of ``Linear(64, 64)`` and GELU, bf16, the eighth step. Counted are calls of functions whose code is in
ps_core or ps_kernels (for FSDP2: in ``torch.distributed.fsdp``). Counts do not depend on the machine's speed.
"""

from __future__ import annotations

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
        self.calls = 0
        self.files: set[str] = set()

    def _profile(self, frame: Any, event: str, _: object) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if name.startswith(self._folders):
                self.calls += 1
                self.files.add(name)

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


def counted(model: nn.Module, optimizer: Any, folders: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Calls and files of each part of the eighth step."""
    inputs = torch.randn(8, 64)

    def loss() -> torch.Tensor:
        return model(inputs).float().square().mean()

    for _ in range(WARM_STEPS):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {}
    counter = Counter(folders)
    value = counter.run(loss)
    found["forward"] = counter.calls, len(counter.files)
    counter = Counter(folders)
    counter.run(value.backward)
    found["backward"] = counter.calls, len(counter.files)
    counter = Counter(folders)
    counter.run(lambda: (optimizer.step(), optimizer.zero_grad()))
    found["step"] = counter.calls, len(counter.files)
    return found


def ours(device_bytes: int) -> dict[str, tuple[int, int]]:
    """Counts of the engine under a budget."""
    model, optimizer = chunked(
        blocks(), AdamW(lr=1e-3), device="emulated", budget=Budget(device=device_bytes, host="64MiB"), precision="bf16"
    )
    torch.set_num_threads(1)
    found = counted(model, optimizer, OURS)
    release(model)
    return found


def fsdp2() -> dict[str, tuple[int, int]]:
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
    rows = {name: ours(size) for name, size in BUDGETS.items()}
    rows["FSDP2"] = fsdp2()
    print(f"{'calls (files)':<20}{'forward':>14}{'backward':>14}{'step':>14}")
    for name, row in rows.items():
        cells = "".join(f"{f'{calls:,} ({files})':>14}" for calls, files in row.values())
        print(f"{name:<20}{cells}")


if __name__ == "__main__":
    main()
