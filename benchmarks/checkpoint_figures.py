"""What saving and loading cost beside the bare disk: ratios to ``dd`` in the same run, and the memory they take.

    python benchmarks/checkpoint_figures.py [--folder .] [--millions 40] [--rounds 9]

The contenders take turns; a ratio is taken within a round, for a disk's rate changes from minute to minute. ``dd``
writes zeros as many as the checkpoint has bytes, through the page cache with an fsync at the end and past it; it reads
the checkpoint's own files past the cache. Files are dropped from the cache before anything reads them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics as numbers
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, load_checkpoint, release, save_checkpoint
from ps_core.engine._checkpoint.checkpoint_tensors import largest_chunk_bytes
from turns import ratios, spread

WIDTH = 1024
BLOCK = "bs=8M"


def make(millions: float) -> tuple[nn.Module, Any]:
    """Layers of a million parameters, about eight to a group; trained for a step, so that all memory is there."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, round(millions)))])
    options = Options(group_bytes=min(8, len(model)) * WIDTH * WIDTH * 2)
    model, optimizer = chunked(model, AdamW(), budget=Budget(host="16GiB"), options=options)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def timed(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and the most memory that was taken besides what there was."""
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status("VmRSS"), time.perf_counter()
    work()
    return time.perf_counter() - start, status("VmHWM") - before


def dd(*arguments: str) -> None:
    subprocess.run(["dd", BLOCK, *arguments], check=True, capture_output=True)


def forget(folder: Path) -> None:
    """Have no file of a folder in the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def figures(folder: Path, millions: float, rounds: int) -> dict[str, float]:
    """Print rates and ratios; their medians."""
    model, optimizer = make(millions)
    path, fresh, zeros = folder / "checkpoint", folder / "fresh", folder / "zeros"
    save_checkpoint(path, model, optimizer)
    files = [each for each in path.iterdir() if each.suffix == ".safetensors"]
    size = sum(each.stat().st_size for each in files)
    count = f"count={max(1, round(size / 2**23))}"
    chunk = largest_chunk_bytes(model[0].weight._owner)  # type: ignore[union-attr]  # it is managed
    contenders: dict[str, Callable[[], object]] = {
        "dd conv=fsync": lambda: dd("if=/dev/zero", f"of={zeros}", count, "conv=fsync"),
        "dd oflag=direct conv=fsync": lambda: dd("if=/dev/zero", f"of={zeros}", count, "oflag=direct", "conv=fsync"),
        "save": lambda: save_checkpoint(fresh, model, optimizer),
        "dd iflag=direct": lambda: [dd(f"if={each}", "of=/dev/null", "iflag=direct") for each in path.glob("*tensors")],
        "load": lambda: load_checkpoint(path, model, optimizer),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    extra: dict[str, int] = dict.fromkeys(("save", "load"), 0)
    for turn in range(rounds):
        for name in sorted(contenders, reverse=bool(turn % 2)):
            zeros.unlink(missing_ok=True)
            shutil.rmtree(fresh, ignore_errors=True)
            forget(path)
            taken, memory = timed(contenders[name])
            seconds[name].append(taken)
            if name in extra:
                extra[name] = max(extra[name], memory)
    print(f"{size / 1e9:.2f} GB, {rounds} rounds, chunks of {chunk / 2**20:.0f} MiB")
    for name, taken in seconds.items():
        print(f"  {name:28} {spread([size / each / 1e9 for each in taken])} GB/s")
    found: dict[str, float] = {}
    for ours, yardsticks in (("save", list(contenders)[:2]), ("load", ["dd iflag=direct"])):
        for name in yardsticks:
            rates = ratios(seconds[name], seconds[ours])
            print(f"  {ours} / {name}: {spread(rates)}")
            found[f"{ours} / {name}"] = numbers.median(rates)
        print(f"  {ours} took at most {extra[ours] / chunk:.2f} chunks of memory besides")
        found[f"{ours}, chunks"] = extra[ours] / chunk
    release(model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of checkpoints.")
    parser.add_argument("--folder", default=".", help="on the disk that is to be measured")
    parser.add_argument("--millions", type=float, default=40, help="of parameters; 12 bytes each are saved")
    parser.add_argument("--rounds", type=int, default=9)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=told.folder) as folder:
        figures(Path(folder), told.millions, told.rounds)


if __name__ == "__main__":
    main()
