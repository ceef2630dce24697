"""Kernels against what the device was measured to do: a device-to-device copy, and the link to the host."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ps_kernels

MIB = 1 << 20
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is, and where."""

    device: str = "cuda"
    parameters: int = 1 << 28
    """28 bytes each: far more than any cache."""
    copied: int = 1 << 30
    """Elements."""
    tensor: int = 250_000
    """Elements of each of a thousand."""
    link_bytes: tuple[int, ...] = (1024 * MIB, 256 * MIB, 64 * MIB, 16 * MIB, 4 * MIB, MIB)
    rounds: int = 15
    warm_ups: int = 3

    @property
    def ours(self) -> str | None:
        """The backend that is measured."""
        return "cuda" if self.device == "cuda" else None


DRY = Scale(device="cpu", parameters=4096, copied=4096, tensor=16, link_bytes=(4096, 1024), rounds=1, warm_ups=0)


def seconds(scale: Scale, work: Callable[[], object]) -> float:
    """The median time on the device; it first idles a while, so that the host is ahead and is not timed."""
    if scale.device == "cpu":
        return host_seconds(scale, work)
    for _ in range(scale.warm_ups):
        work()
    times = []
    for _ in range(scale.rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1000)
    return statistics.median(times)


def host_seconds(scale: Scale, work: Callable[[], object]) -> float:
    """The median time until the host can go on."""
    times = []
    for _ in range(scale.rounds):
        if scale.device == "cuda":
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


def drawn(scale: Scale, numel: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(numel, device=scale.device).to(kind)


def copy_rate(scale: Scale) -> tuple[Row, float]:
    source = drawn(scale, scale.copied)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes
    elapsed = seconds(scale, lambda: target.copy_(source))
    return row(f"device-to-device copy, {source.nbytes // MIB} MiB", elapsed, moved), moved / elapsed


def optimizers(scale: Scale, copy: float) -> list[Row]:
    n, ours = scale.parameters, scale.ours
    p, m, v = drawn(scale, n), drawn(scale, n), drawn(scale, n)
    grad, out = drawn(scale, n, torch.bfloat16), torch.empty(n, dtype=torch.bfloat16, device=scale.device)

    def adam(backend: str | None, shift: int = 0) -> float:
        arrays = [p[: n - shift], m[: n - shift], v[: n - shift], grad[shift:], out[shift:]]
        numbers: dict[str, Any] = {"step": 10, "lr": 1e-3, "weight_decay": 0.1}
        return seconds(scale, lambda: ps_kernels.adam_step(*arrays, backend=backend, **numbers))

    rows = [row("adam, bf16 in and out", adam(ours), 28 * n, copy)]
    rows.append(row("adam, 16-bit arrays one element off", adam(ours, 1), 28 * (n - 1), copy))
    rows.append(row("adam by the torch fallback", adam("torch"), 28 * n, copy))
    elapsed = seconds(scale, lambda: ps_kernels.sgd_step(p, m, grad, out, lr=1e-3, momentum_decay=0.9, backend=ours))
    rows.append(row("sgd with momentum", elapsed, 20 * n, copy))
    elapsed = seconds(scale, lambda: ps_kernels.accumulate(m, grad, scale=0.5, backend=ours))
    rows.append(row("accumulate bf16", elapsed, 10 * n, copy))
    single = grad.float()
    numbers: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
    step = torch.tensor(10.0, device=scale.device)

    def fused() -> None:
        torch._fused_adamw_([p], [single], [m], [v], [], [step], amsgrad=False, maximize=False, **numbers)

    rows.append(row("torch fused AdamW, fp32 gradient, no 16-bit copy", seconds(scale, fused), 28 * n, copy))
    return rows


def norms(scale: Scale, copy: float) -> list[Row]:
    """Beside PyTorch's own norm, which looks for no infinity and keeps no order."""
    rows, total = [], torch.zeros(2, device=scale.device)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        x = drawn(scale, scale.copied, kind)
        ours = partial(ps_kernels.sumsq_finite, x, total, backend=scale.ours)
        rows.append(row(f"sum of squares, {kind}", seconds(scale, ours), x.nbytes, copy))
        theirs = partial(torch.linalg.vector_norm, x, dtype=torch.float32)
        rows.append(row(f"torch's norm, {kind}", seconds(scale, theirs), x.nbytes, copy))
    return rows


def chunks(scale: Scale, copy: float) -> list[Row]:
    """A thousand tensors of about half a megabyte, as a loop of copies and as one launch."""
    lengths = [scale.tensor + 8 * (index % 97) for index in range(1000)]
    offsets = [sum(lengths[:index]) for index in range(1000)]
    tensors = [drawn(scale, length, torch.bfloat16) for length in lengths]
    chunk = torch.empty(sum(lengths), dtype=torch.bfloat16, device=scale.device)
    pieces = ps_kernels.Pieces(tensors, chunk, offsets, backend=scale.ours)

    def loop() -> None:
        for tensor, offset in zip(tensors, offsets, strict=True):
            chunk[offset : offset + tensor.numel()].copy_(tensor)

    rows = []
    for name, work in (
        ("gather 1,000 tensors", lambda: ps_kernels.gather(tensors, chunk, offsets, backend=scale.ours)),
        ("scatter 1,000 tensors", lambda: ps_kernels.scatter(chunk, offsets, tensors, backend=scale.ours)),
        ("Pieces.gather 1,000 tensors", pieces.gather),
        ("gather by a loop of copy_", loop),
    ):
        moved = 2 * chunk.nbytes
        rows.append(row(name, seconds(scale, work), moved, copy))
        rows.append(row(f"{name}, the host's part", host_seconds(scale, work), moved))
    return rows


def links(scale: Scale) -> list[Row]:
    rows, big = [], scale.link_bytes[0]
    arena = ps_kernels.PinnedArena(big, pin=scale.device == "cuda")
    device = torch.empty(big, dtype=torch.uint8, device=scale.device)
    for name in ("host to device", "device to host"):
        peak = None
        for size in scale.link_bytes:
            here, there = arena.tensor(0, size, torch.uint8), device[:size]
            into, source = (there, here) if name == "host to device" else (here, there)
            elapsed = seconds(scale, partial(into.copy_, source, non_blocking=True))
            peak = peak or size / elapsed
            rows.append({**row(f"{name}, {size} bytes", elapsed, size, peak), "pinned": arena.pinned})
    return rows


def measured(scale: Scale) -> list[Row]:
    first, copy = copy_rate(scale)
    rows = [first]
    for part in (optimizers, norms, chunks):
        if scale.device == "cuda":
            torch.cuda.empty_cache()
        rows += part(scale, copy)
    if scale.device == "cuda":
        torch.cuda.empty_cache()
    return rows + links(scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="small arrays on the CPU: shows that this runs")
    options = parser.parse_args()
    scale = DRY if options.dry_run else Scale()
    torch.manual_seed(1)
    print("backends:", ps_kernels.backends())
    print(*ps_kernels.warm(), sep="\n")
    rows = measured(scale)
    found: dict[str, Any] = {
        "device": "none" if options.dry_run else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parameters": scale.parameters,
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), "utf-8")
    print(f"TABLE {found['device']}, torch {found['torch']}; ratio: of the copy's rate, or of the longest on a link")
    for each in rows:
        ratio = "" if each["ratio"] is None else f"{each['ratio']:8.2f}"
        print(f"{each['name']:50}{each['ms']:10.3f} ms{each['GB/s']:10.1f} GB/s{ratio}")


if __name__ == "__main__":
    main()
