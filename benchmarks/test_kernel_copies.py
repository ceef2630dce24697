"""Norms beside reading the same bytes once, and many small copies beside one large one: ratios, side by side.

``nox -s bench`` runs it; as a program, ``python benchmarks/test_kernel_copies.py``, it prints one table.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_kernels

COUNT = int(os.environ.get("PS_BENCH_TENSORS", "1000"))
NORM_BYTES = int(os.environ.get("PS_BENCH_NORM_BYTES", str(1 << 26)))
COLD_BYTES = int(os.environ.get("PS_BENCH_COLD_BYTES", str(1 << 28)))
"""What a round of copies touches before it comes back to the same memory: more than the caches hold."""
SIZES = (8 << 10, 32 << 10, 128 << 10)
KINDS = (torch.bfloat16, torch.float16, torch.float32)
THREADS = sorted({1, min(2, torch.get_num_threads())})
ROUNDS = 15
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the yardsticks")


@cache
def yardsticks() -> ctypes.CDLL:
    """The C functions of kernel_yardsticks.c."""
    folder = Path(tempfile.mkdtemp())
    made = folder / "yardsticks.so"
    source = Path(__file__).with_name("kernel_yardsticks.c")
    command = ("cc", "-O3", "-march=native", "-Wno-psabi", "-fopenmp", "-fPIC", "-shared", source, "-o", made)
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(made))
    shutil.rmtree(folder)
    library.read_all.restype = ctypes.c_ulonglong
    return library


def read_once(x: torch.Tensor, threads: int) -> None:
    yardsticks().read_all(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes), threads)


@dataclass(kw_only=True)
class Sets:
    """Lists of small tensors, each with its chunk, taken in turn so that none is still in a cache."""

    size: int
    lists: list[list[torch.Tensor]] = field(default_factory=list)
    chunks: list[torch.Tensor] = field(default_factory=list)
    pieces: list[ps_kernels.Pieces] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        numel = self.size // 2
        self.offsets = [number * numel for number in range(COUNT)]
        for _ in range(max(2, COLD_BYTES // (2 * COUNT * self.size))):
            self.lists.append([torch.ones(numel, dtype=torch.bfloat16) for _ in range(COUNT)])
            self.chunks.append(torch.ones(COUNT * numel, dtype=torch.bfloat16))
            self.pieces.append(ps_kernels.Pieces(self.lists[-1], self.chunks[-1], self.offsets))

    def next(self) -> int:
        self.turn = (self.turn + 1) % len(self.chunks)
        return self.turn

    def works(self, threads: int) -> dict[str, Callable[[], None]]:
        """Each way of moving the same bytes."""

        def one_copy() -> None:  # from another set's chunk: as many bytes, as cold
            into, source = self.chunks[self.next()], self.chunks[self.turn - 1]
            addresses = (ctypes.c_void_p(x.data_ptr()) for x in (into, source))
            yardsticks().copy_all(*addresses, ctypes.c_size_t(into.nbytes), threads)

        def loop() -> None:
            turn = self.next()
            chunk = self.chunks[turn]
            for tensor, offset in zip(self.lists[turn], self.offsets, strict=True):
                chunk[offset : offset + tensor.numel()].copy_(tensor)

        def gather() -> None:
            turn = self.next()
            ps_kernels.gather(self.lists[turn], self.chunks[turn], self.offsets)

        def scatter() -> None:
            turn = self.next()
            ps_kernels.scatter(self.chunks[turn], self.offsets, self.lists[turn])

        def prepared_gather() -> None:
            self.pieces[self.next()].gather()

        def prepared_scatter() -> None:
            self.pieces[self.next()].scatter()

        return {
            "one memcpy": one_copy,
            "a loop of copy_": loop,
            "gather": gather,
            "scatter": scatter,
            "Pieces.gather": prepared_gather,
            "Pieces.scatter": prepared_scatter,
        }


WORKS = ("one memcpy", "a loop of copy_", "gather", "scatter", "Pieces.gather", "Pieces.scatter")


@pytest.fixture(params=THREADS, ids=lambda count: f"{count}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    ps_kernels.set_threads(request.param)
    yield request.param
    ps_kernels.set_threads(before)


@pytest.fixture(scope="module")
def sets() -> Callable[[int], Sets]:
    return cache(lambda size: Sets(size=size))


@pytest.mark.benchmark(group="1,000 small tensors, cold")
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size >> 10}K")
@pytest.mark.parametrize("work", WORKS)
def test_copies(benchmark: Any, sets: Callable[[int], Sets], threads: int, size: int, work: str) -> None:
    benchmark(sets(size).works(threads)[work])


def drawn(kind: torch.dtype) -> torch.Tensor:
    return torch.rand(NORM_BYTES // kind.itemsize, generator=torch.Generator().manual_seed(1)).to(kind)


@pytest.mark.benchmark(group="norm and finite check")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("work", ["sumsq_finite", "reading once"])
def test_norms(benchmark: Any, threads: int, kind: torch.dtype, work: str) -> None:
    x, total = drawn(kind), torch.zeros(2)
    if work == "sumsq_finite":
        benchmark(ps_kernels.sumsq_finite, x, total)
    else:
        benchmark(read_once, x, threads)


def measured(works: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Each one's times, in rounds of them all, so that what disturbs one disturbs the others."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(times: dict[str, list[float]], one: str, other: str) -> str:
    """How many times as long one takes as the other: the median, and the quartiles, over the rounds."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times[one], times[other], strict=True)])
    return f"{middle:5.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    print("norm and finite check: times as long as reading the same bytes once")
    for kind in KINDS:
        x, total = drawn(kind), torch.zeros(2)
        for count in THREADS:
            ps_kernels.set_threads(count)
            ours, yardstick = partial(ps_kernels.sumsq_finite, x, total), partial(read_once, x, count)
            times = measured({"norm": ours, "read": yardstick})
            rate = x.nbytes / statistics.median(times["read"]) / 1e9
            print(f"  {kind!s:15} {count} threads {ratio(times, 'norm', 'read')}   reading: {rate:.1f} GB/s")
    print(f"{COUNT} small tensors: share of memcpy's rate | times as fast as a loop of copy_ (at most: memcpy's)")
    for size in SIZES:
        every = Sets(size=size)
        for count in THREADS:
            ps_kernels.set_threads(count)
            times = measured(every.works(count))
            rate = COUNT * size / statistics.median(times["one memcpy"]) / 1e9
            print(f"  {size >> 10} KiB each, {count} threads; memcpy {rate:.1f} GB/s")
            for name in WORKS[1:]:
                share, gain = ratio(times, "one memcpy", name), ratio(times, "a loop of copy_", name)
                print(f"    {name:16} {share:20} | {gain}")
            print(f"    {'at most':16} {'':20} | {ratio(times, 'a loop of copy_', 'one memcpy')}")


if __name__ == "__main__":
    main()
