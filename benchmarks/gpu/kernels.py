"""Kernels against what the device was measured to do: a device-to-device copy, and the link to the host."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from device_timing import DRY, MIB, Row, Scale, Taken, alternated, drawn, host_seconds, in_turns, once, row, seconds

import ps_kernels
from ps_kernels._arithmetic_order import AdamArguments
from ps_kernels._backends import load
from ps_kernels._cuda_source import TUNINGS, Tuning


def copy_rate(scale: Scale) -> tuple[Row, float]:
    source = drawn(scale, scale.copied)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes
    elapsed = seconds(scale, lambda: target.copy_(source))
    return row(f"device-to-device copy, {source.nbytes // MIB} MiB", elapsed, moved), moved / elapsed


def adams(scale: Scale) -> list[Row]:
    """Adam, PyTorch's fused AdamW and a copy of as many bytes, in turns: 28 bytes a parameter, 14 each way."""
    n = scale.parameters
    p, m, v = drawn(scale, n), drawn(scale, n), drawn(scale, n)
    grad, out = drawn(scale, n, torch.bfloat16), torch.empty(n, dtype=torch.bfloat16, device=scale.device)
    single = grad.float()
    source = drawn(scale, n * 7 // 2)
    target = torch.empty_like(source)
    step = torch.tensor(10.0, device=scale.device)
    numbers: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}

    def ours(shift: int) -> Callable[[], object]:
        arrays = [p[: n - shift], m[: n - shift], v[: n - shift], grad[shift:], out[shift:]]
        return lambda: ps_kernels.adam_step(*arrays, step=10, lr=1e-3, weight_decay=0.1, backend=scale.ours)

    def fused() -> None:
        torch._fused_adamw_([p], [single], [m], [v], [], [step], amsgrad=False, maximize=False, **numbers)

    def the_same_job() -> None:
        single.copy_(grad)
        fused()
        out.copy_(p)

    names = (
        "a copy of as many bytes", "adam, bf16 in and out", "torch fused AdamW, fp32 gradient, no 16-bit copy",
        "torch fused AdamW and two casts, the same job", "adam, 16-bit arrays one element off",
    )  # fmt: skip
    times = alternated(scale, lambda: target.copy_(source), ours(0), fused, the_same_job, ours(1))
    return [{**each, "parameters/s": n * 1e3 / each["ms"]} for each in in_turns(names, times, 28 * n)]


def tunings(scale: Scale) -> list[Row]:
    """Every way for Adam to go through memory, in turns with a copy of as many bytes; all must give the same bits."""
    ways = [(str(tuning), tuned(scale, tuning)) for tuning in TUNINGS[: None if scale.device == "cuda" else 2]]
    compile_all(scale, [backend for _, backend in ways])
    wrong = differing(scale, ways)
    n, source = scale.parameters, drawn(scale, scale.parameters * 7 // 2)
    target, arrays = torch.empty_like(source), adam_arrays(scale, n)
    times = alternated(scale, lambda: target.copy_(source), *(partial(one_adam, each, arrays) for _, each in ways))
    names = ["a copy of as many bytes", *(f"adam, {name}" for name, _ in ways)]
    return in_turns(names, times, 28 * n) + [{"name": f"OTHER BITS: {name}"} for name in wrong]


def tuned(scale: Scale, tuning: Tuning) -> Any:
    """The kernels, so compiled; on the CPU what there is."""
    if scale.device == "cpu":
        return load("torch")
    from ps_kernels._cuda import CudaBackend, CupyLauncher

    return CudaBackend(CupyLauncher(tuning), tuning)


def compile_all(scale: Scale, backends: list[Any]) -> None:
    """At the same time, for a compiler uses one processor and there are many."""
    if scale.device == "cuda":
        with ThreadPoolExecutor() as pool:
            for each in [pool.submit(lambda one: list(one._launcher.warm(0, ["step"])), one) for one in backends]:
                each.result()


def adam_arrays(scale: Scale, numel: int) -> list[torch.Tensor]:
    """Parameters, states, gradient and 16-bit copy."""
    singles = [drawn(scale, numel) for _ in range(3)]
    return [
        *singles,
        drawn(scale, numel, torch.bfloat16),
        torch.empty(numel, dtype=torch.bfloat16, device=scale.device),
    ]


def one_adam(backend: Any, arrays: list[torch.Tensor]) -> None:
    """A step by these kernels, whose arguments nobody checks."""
    numbers = AdamArguments(
        step=10, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True, grad_scale=1.0
    )
    backend.adam(tuple(arrays[:3]), arrays[3], arrays[4], numbers.scalars())


def differing(scale: Scale, ways: list[tuple[str, Any]]) -> list[str]:
    """Those whose results are not the first one's to the bit."""
    start = adam_arrays(scale, 1_000_003 if scale.device == "cuda" else 1003)
    results = []
    for _, backend in ways:
        arrays = [each.clone() for each in start]
        one_adam(backend, arrays)
        results.append(arrays)
    same = [all(map(torch.equal, results[0], each)) for each in results]
    return [name for (name, _), good in zip(ways, same, strict=True) if not good]


def optimizers(scale: Scale, copy: float) -> list[Row]:
    n, ours = scale.parameters, scale.ours
    p, m, v = drawn(scale, n), drawn(scale, n), drawn(scale, n)
    grad, out = drawn(scale, n, torch.bfloat16), torch.empty(n, dtype=torch.bfloat16, device=scale.device)
    elapsed = seconds(scale, lambda: ps_kernels.sgd_step(p, m, grad, out, lr=1e-3, momentum_decay=0.9, backend=ours))
    rows = [row("sgd with momentum", elapsed, 20 * n, copy)]
    elapsed = seconds(scale, lambda: ps_kernels.accumulate(m, grad, scale=0.5, backend=ours))
    rows.append(row("accumulate bf16", elapsed, 10 * n, copy))
    elapsed = seconds(scale, lambda: ps_kernels.adam_step(p, m, v, grad, out, step=10, lr=1e-3, backend="torch"))
    return [*rows, row("adam by the torch fallback", elapsed, 28 * n, copy)]


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


def losses(scale: Scale, copy: float) -> list[Row]:
    """Time losses and gradients of 1,024 rows with GPT-2's vocabulary: by the kernel, and by PyTorch in fp32."""
    rows, columns = (1024, 50304) if scale.device == "cuda" else (4, 512)
    logits = drawn(scale, rows * columns, torch.bfloat16).view(rows, columns)
    labels, found = torch.arange(rows, device=scale.device), torch.empty(rows, device=scale.device)

    def ours() -> None:
        ps_kernels.cross_entropy(logits, labels, found, backend=scale.ours)

    def theirs() -> None:
        single = logits.float().requires_grad_()
        torch.nn.functional.cross_entropy(single, labels, reduction="sum").backward()
        assert single.grad is not None
        single.grad.bfloat16()

    taken = alternated(scale, ours, theirs)
    names = ("cross entropy and its gradient, bf16", "torch's cross entropy and backward, in fp32 of bf16")
    return [row(name, each, 2 * logits.nbytes, copy) for name, each in zip(names, taken, strict=True)]


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
    """Beside PyTorch's own pinned memory; the yardstick is the best rate that either has at any size."""
    rows, big = [], scale.link_bytes[0]
    cuda = scale.device == "cuda"
    arena = ps_kernels.PinnedArena(big, pin=cuda)
    theirs = torch.empty(big, dtype=torch.uint8, pin_memory=cuda)
    ours = "" if arena.pinned or not cuda else ", NOT PINNED"
    device, other = (torch.empty(big, dtype=torch.uint8, device=scale.device) for _ in range(2))
    for name, up in (("host to device", True), ("device to host", False)):
        found = []
        for size in scale.link_bytes:
            pairs = [(device[:size], each[:size]) for each in (arena.tensor(0, big, torch.uint8), theirs)]
            works = [partial((a if up else b).copy_, b if up else a, non_blocking=True) for a, b in pairs]
            found.append((size, alternated(scale, *works)))
        peak = max(size / taken for size, both in found for taken in both)
        for size, both in found:
            for whose, taken in zip((ours, ", torch's memory"), both, strict=True):
                rows.append(row(f"{name}, {size} bytes{whose}", taken, size, peak))
    here, there = (arena.tensor(start, big // 2, torch.uint8) for start in (0, big // 2))
    elapsed = both_ways(scale, (device[: big // 2], here), (there, other[: big // 2]))
    return [*rows, row(f"both ways at once, {big // 2} bytes each", elapsed, big // 2 * 2)]


def both_ways(scale: Scale, *pairs: tuple[torch.Tensor, torch.Tensor]) -> Taken:
    if scale.device == "cpu":
        return Taken.of([once(scale, lambda: [into.copy_(source) for into, source in pairs])])
    streams = [torch.cuda.Stream() for _ in pairs]  # type: ignore[no-untyped-call]

    def work() -> None:
        now = torch.cuda.current_stream()
        for stream, (into, source) in zip(streams, pairs, strict=True):
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                into.copy_(source, non_blocking=True)
        for stream in streams:
            now.wait_stream(stream)

    return seconds(scale, work)


def measured(scale: Scale, keep: Callable[[list[Row]], None]) -> list[Row]:
    """Part by part, what is most asked for first; one that fails leaves the others their turn."""
    rows: list[Row] = []
    copy = 1.0

    def copies() -> list[Row]:
        nonlocal copy
        found, copy = copy_rate(scale)
        return [found]

    parts: list[Callable[[], list[Row]]] = [
        copies,
        partial(adams, scale),
        partial(tunings, scale),
        partial(links, scale),
    ]
    parts += [lambda: optimizers(scale, copy), lambda: norms(scale, copy), lambda: losses(scale, copy)]
    parts.append(lambda: chunks(scale, copy))
    for part in parts:
        try:
            if scale.device == "cuda":
                torch.cuda.empty_cache()
            found = part()
        except Exception as error:
            traceback.print_exc()
            found = [{"name": f"{type(error).__name__}: {error}"[:300]}]
        show(found)
        rows += found
        keep(rows)
    return rows


def show(rows: list[Row]) -> None:
    for each in rows:
        if "ms" not in each:
            print("FAILED", each["name"], flush=True)
            continue
        ratio = "" if each["ratio"] is None else f"{each['ratio']:8.3f}"
        ratio += " ({:.3f} to {:.3f})".format(*each["ratio_range"]) if "ratio_range" in each else ""
        print(f"{each['name']:62}{each['ms']:10.3f} ms{each['GB/s']:10.1f} GB/s{ratio}", flush=True)


def versions() -> dict[str, str | None]:
    """What the figures are of."""
    names = ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "nvidia-cuda-nvrtc")
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="small arrays on the CPU: shows that this runs")
    options = parser.parse_args()
    scale = DRY if options.dry_run else Scale()
    torch.manual_seed(1)
    print("backends:", ps_kernels.backends())
    print(*ps_kernels.warm(), sep="\n")
    found: dict[str, Any] = {
        "device": "none" if options.dry_run else torch.cuda.get_device_name(),
        "parameters": scale.parameters,
        "rounds": scale.rounds,
        **versions(),
    }

    def keep(rows: list[Row]) -> None:
        if options.json is not None:
            options.json.write_text(json.dumps({**found, "rows": rows}, indent=1), "utf-8")

    rows = measured(scale, keep)
    print(f"TABLE {found['device']}, torch {found['torch']}; ratio: to a copy's rate, or to the link's best")
    show(rows)
    return int(any("ms" not in each for each in rows))


if __name__ == "__main__":
    sys.exit(main())
