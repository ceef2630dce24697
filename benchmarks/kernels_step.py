"""One optimizer step on the CPU beside what else could do it, in turns, in one run.

    python benchmarks/kernels_step.py [--numel 200000000] [--threads 1 2] [--rounds 9] [--new-buffers]

16-bit gradient in, single-precision parameter, momentum and variance, 16-bit parameter out. Every contender works on
the same arrays, which lie in huge pages where the system gives them. test_kernels.py times the same contenders.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

import ps_kernels
from ps_kernels import _compile, _native

PIECES = {"128K pieces": 1 << 17, "1M pieces": 1 << 20}
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
Step = Callable[[], None]


def huge(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory of their own, in huge pages where the system gives them."""
    size_bytes = max(numel * dtype.itemsize, 1)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
        room.madvise(mmap.MADV_HUGEPAGE)
    else:
        room = mmap.mmap(-1, size_bytes)
    return torch.frombuffer(room, dtype=dtype, count=numel)


@dataclass(frozen=True, slots=True)
class Arrays:
    p: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    out: torch.Tensor
    wide: torch.Tensor
    """Room for the gradient in single precision, which all but one pass need."""

    @classmethod
    def made(cls, numel: int) -> Arrays:
        rng = torch.Generator().manual_seed(1)
        kinds = (torch.float32,) * 3 + (torch.bfloat16,) * 2 + (torch.float32,)
        arrays = cls(*(huge(numel, kind) for kind in kinds))
        for each in (arrays.p, arrays.m, arrays.v, arrays.wide):
            for piece in pieces(numel, 1 << 22):
                each[piece].uniform_(generator=rng)
        arrays.g.copy_(arrays.wide)
        arrays.out.zero_()
        return arrays


def pieces(numel: int, piece_numel: int) -> list[slice]:
    return [slice(start, min(numel, start + piece_numel)) for start in range(0, numel, piece_numel)]


def of_ps_kernels(a: Arrays, level: str) -> Step:
    return partial(ps_kernels.adam_step, a.p, a.m, a.v, a.g, a.out, step=3, backend=level, **HYPER)


def widened(a: Arrays, cut: slice, keep: bool) -> torch.Tensor:
    """The gradient in single precision: in room that is kept, or in new memory, as a plain loop has it."""
    return a.wide[: cut.stop - cut.start].copy_(a.g[cut]) if keep else a.g[cut].float()


def of_torch(a: Arrays, piece_numel: int, *, keep: bool = True) -> Step:
    """Cast the gradient, PyTorch's fused step, cast the parameters."""
    step, cuts = [torch.tensor(3.0)], pieces(a.p.numel(), piece_numel)

    def run() -> None:
        for cut in cuts:
            wide = widened(a, cut, keep)
            lists = ([each] for each in (a.p[cut], wide, a.m[cut], a.v[cut]))
            torch._fused_adamw_(*lists, [], step, amsgrad=False, maximize=False, **HYPER)
            a.out[cut].copy_(a.p[cut])

    return run


def of_deepspeed(a: Arrays, piece_numel: int, *, keep: bool = True) -> Step:
    """The same with DeepSpeed's step, called without the Python around it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))], adamw_mode=True)
    update, cuts = partial(optimizer.ds_opt_adam.adam_update, optimizer.opt_id), pieces(a.p.numel(), piece_numel)
    numbers = (3, HYPER["lr"], HYPER["beta1"], HYPER["beta2"], HYPER["eps"], HYPER["weight_decay"], True)

    def run(_alive: object = optimizer) -> None:  # its end would end the step
        for cut in cuts:
            wide = widened(a, cut, keep)
            update(*numbers, a.p[cut], wide, a.m[cut], a.v[cut])
            a.out[cut].copy_(a.p[cut])

    return run


def of_streams(a: Arrays, threads: Callable[[], int]) -> Step:
    """The bytes of a step without its arithmetic, in C, compiled now."""
    level, flags = next((name, flags) for name, flags in _compile.levels().items() if available(name))
    sources = (Path(__file__).with_name("kernels_streams.c"), _compile._SOURCE / "levels.c")
    command = [*_compile._compiler(), *_compile._COMMON, *flags, "-fopenmp", f"-I{_compile._SOURCE}"]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"streams_{level}.so"
        subprocess.run([*command, "-shared", *map(str, sources), "-o", str(made)], check=True)
        function = ctypes.CDLL(str(made)).stream_step
    numel = a.p.numel()
    addresses = (each.data_ptr() for each in (a.p, a.m, a.v, a.g, a.out))
    step, flip = _native._Step(*addresses, numel, 1, 1, 2 * numel >= _native._STREAM_BYTES), ctypes.c_uint(0)

    def run(_alive: object = a) -> None:
        function(ctypes.byref(flip), ctypes.byref(step), threads())

    return run


def available(name: str) -> bool:
    return ps_kernels.backends()[name] == "available"


def why_no_deepspeed() -> str | None:
    if find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    try:
        of_deepspeed(Arrays.made(64), 64)()
    except Exception as error:
        return f"deepspeed does not build its step: {str(error).splitlines()[0]}"
    return None


class Threads:
    """The number for every contender; there may be several OpenMP libraries."""

    def __init__(self) -> None:
        self.count = 1

    def set(self, count: int) -> None:
        self.count = count
        torch.set_num_threads(count)
        ps_kernels.set_threads(count)
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "libgomp" in line:
                ctypes.CDLL(line.split()[-1]).omp_set_num_threads(count)

    def get(self) -> int:
        return self.count


def contenders(arrays: Arrays, threads: Threads, absent: str | None, *, new_buffers: bool = True) -> dict[str, Step]:
    """Each by its name; `absent` says why DeepSpeed is not there."""
    vectors = [level for level in _native.LEVELS if available(level) and level != "scalar"]
    found = {f"ps-kernels {level}": of_ps_kernels(arrays, level) for level in vectors or ["scalar"]}
    found["streams without arithmetic"] = of_streams(arrays, threads.get)
    others: dict[str, Callable[..., Step]] = {"PyTorch": of_torch}
    if absent is None:
        others["DeepSpeed"] = of_deepspeed
    for name, made in others.items():
        found |= {f"{name}, {how}": made(arrays, piece_numel) for how, piece_numel in PIECES.items()}
        found[f"{name}, whole"] = made(arrays, arrays.p.numel())
        if new_buffers:
            found[f"{name}, whole, new buffer"] = made(arrays, arrays.p.numel(), keep=False)
    return found


def timed(steps: dict[str, Step], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each in every round, and of the first right before or after it: a machine's memory is not always as
    fast, so only what ran side by side is compared."""
    first = next(iter(steps.values()))
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(-1, rounds):
        for name, step in steps.items():
            order = (step, first) if turn % 2 else (first, step)
            taken = [seconds(one) for one in order]
            if turn >= 0:
                pairs[name].append((taken[1 - turn % 2], taken[turn % 2]))
    return pairs


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def table(pairs: dict[str, list[tuple[float, float]]], numel: int) -> str:
    """Nanoseconds a parameter, and what the first takes of them: medians, with the middle half of the rounds."""
    rows = ["| step | ns a parameter | middle half | first / this | middle half |", "|---|---|---|---|---|"]
    for name, each in pairs.items():
        mine = spread([1e9 * taken / numel for taken, _ in each])
        ratio = spread([first / taken for taken, first in each])
        rows.append(f"| {name} | {mine[1]:.3f} | {mine[0]:.3f} - {mine[2]:.3f} "
                    f"| {ratio[1]:.2f} | {ratio[0]:.2f} - {ratio[2]:.2f} |")  # fmt: skip
    return "\n".join(rows)


def spread(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=200_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-buffers", action="store_true", help="also with a new buffer each step: slow, and loud")
    chosen = parser.parse_args()
    absent, threads = why_no_deepspeed(), Threads()
    if absent:
        print(f"WITHOUT DEEPSPEED: {absent}")
    steps = contenders(Arrays.made(chosen.numel), threads, absent, new_buffers=chosen.new_buffers)
    for count in chosen.threads:
        threads.set(count)
        print(f"\n{chosen.numel:,} parameters, threads: {count}, ns a parameter; first: {next(iter(steps))}")
        print(table(timed(steps, chosen.rounds), chosen.numel), flush=True)


if __name__ == "__main__":
    main()
