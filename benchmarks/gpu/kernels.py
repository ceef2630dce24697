"""Kernels against what the device was measured to do: a device-to-device copy, and the link to the host."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ps_kernels

PARAMETERS = 1 << 28
"""28 bytes each: far more than any cache."""
ROUNDS, WARM_UPS = 15, 3
MIB = 1 << 20
Row = dict[str, Any]


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median time on the device; it first idles a while, so that the host is ahead and is not timed."""
    for _ in range(WARM_UPS):
        work()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(40_000_000)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def host_seconds(work: Callable[[], object]) -> float:
    """The median time until the host can go on."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def row(name: str, elapsed: float, moved_bytes: float, yardstick: float | None = None) -> Row:
    """One line of the table: ``yardstick`` is the rate, in bytes a second, to which the row's is compared."""
    rate = moved_bytes / elapsed
    return {
        "name": name,
        "ms": elapsed * 1e3,
        "GB/s": rate / 1e9,
        "ratio": None if yardstick is None else rate / yardstick,
    }


def drawn(numel: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(numel, device="cuda").to(kind)


def copy_rate() -> tuple[Row, float]:
    source = drawn(1 << 30)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * 4
    elapsed = seconds(lambda: target.copy_(source))
    return row("device-to-device copy, 4 GiB", elapsed, moved), moved / elapsed


def optimizers(copy: float) -> list[Row]:
    n = PARAMETERS
    p, m, v = drawn(n), drawn(n), drawn(n)
    grad, out = drawn(n, torch.bfloat16), torch.empty(n, dtype=torch.bfloat16, device="cuda")
    rows = []

    def ours(backend: str, shift: int = 0) -> float:
        arrays = [p[: n - shift], m[: n - shift], v[: n - shift], grad[shift:], out[shift:]]
        return seconds(lambda: ps_kernels.adam_step(*arrays, step=10, lr=1e-3, weight_decay=0.1, backend=backend))

    rows.append(row("adam, bf16 in and out", ours("cuda"), 28 * n, copy))
    rows.append(row("adam, 16-bit arrays one element off", ours("cuda", 1), 28 * (n - 1), copy))
    rows.append(row("adam by the torch fallback", ours("torch"), 28 * n, copy))
    elapsed = seconds(lambda: ps_kernels.sgd_step(p, m, grad, out, lr=1e-3, momentum_decay=0.9))
    rows.append(row("sgd with momentum", elapsed, 20 * n, copy))
    elapsed = seconds(lambda: ps_kernels.accumulate(m, grad, scale=0.5))
    rows.append(row("accumulate bf16", elapsed, 10 * n, copy))
    single = grad.float()
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
    step = torch.tensor(10.0, device="cuda")

    def fused() -> None:
        torch._fused_adamw_([p], [single], [m], [v], [], [step], amsgrad=False, maximize=False, **numbers)

    rows.append(row("torch fused AdamW, fp32 gradient, no 16-bit copy", seconds(fused), 28 * n, copy))
    return rows


def norms(copy: float) -> list[Row]:
    rows, total = [], torch.zeros(2, device="cuda")
    for kind in (torch.float32, torch.bfloat16):
        x = drawn(1 << 30, kind)
        size = x.numel() * x.element_size()
        rows.append(row(f"sum of squares, {kind}", seconds(lambda x=x: ps_kernels.sumsq_finite(x, total)), size, copy))
    return rows


def chunks(copy: float) -> list[Row]:
    """A thousand tensors of about half a megabyte, as a loop of copies and as one launch."""
    lengths = [250_000 + 8 * (index % 97) for index in range(1000)]
    offsets = [sum(lengths[:index]) for index in range(1000)]
    tensors = [drawn(length, torch.bfloat16) for length in lengths]
    chunk = torch.empty(sum(lengths), dtype=torch.bfloat16, device="cuda")
    moved = 4 * chunk.numel()

    def loop() -> None:
        for tensor, offset in zip(tensors, offsets, strict=True):
            chunk[offset : offset + tensor.numel()].copy_(tensor)

    rows = []
    for name, work in (
        ("gather 1,000 tensors", lambda: ps_kernels.gather(tensors, chunk, offsets)),
        ("scatter 1,000 tensors", lambda: ps_kernels.scatter(chunk, offsets, tensors)),
        ("gather by a loop of copy_", loop),
    ):
        rows += [row(name, seconds(work), moved, copy), row(f"{name}, the host's part", host_seconds(work), moved)]
    return rows


def links() -> list[Row]:
    rows = []
    big = 1 << 30
    arena = ps_kernels.PinnedArena(big)
    device = torch.empty(big, dtype=torch.uint8, device="cuda")
    for name in ("host to device", "device to host"):
        peak = None
        for size in (big, 256 * MIB, 64 * MIB, 16 * MIB, 4 * MIB, MIB):
            here, there = arena.tensor(0, size, torch.uint8), device[:size]
            into, source = (there, here) if name == "host to device" else (here, there)
            elapsed = seconds(lambda into=into, source=source: into.copy_(source, non_blocking=True))
            peak = peak or size / elapsed
            rows.append(row(f"{name}, {size // MIB} MiB", elapsed, size, peak))
        del here, there, into, source
    pinned = arena.pinned
    return [{**each, "pinned": pinned} for each in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    torch.manual_seed(1)
    print("backends:", ps_kernels.backends())
    first, copy = copy_rate()
    rows = [first]
    for part in (optimizers, norms, chunks):
        torch.cuda.empty_cache()
        rows += part(copy)
    torch.cuda.empty_cache()
    rows += links()
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parameters": PARAMETERS,
        "rows": rows,
    }
    if path is not None:
        path.write_text(json.dumps(found, indent=1), "utf-8")
    print(f"{found['device']}, torch {found['torch']}; ratio: of the copy's rate, or of the link's at 1 GiB")
    for each in rows:
        ratio = "" if each["ratio"] is None else f"{each['ratio']:8.2f}"
        print(f"{each['name']:50}{each['ms']:10.3f} ms{each['GB/s']:10.1f} GB/s{ratio}")


if __name__ == "__main__":
    main()
