"""A step in one thread of Python while PyTorch multiplies matrices in another: what each gets of a machine.

    python benchmarks/kernels_beside.py [--numel 20000000] [--windows 6]

Each thread of Python that calls has its own OpenMP threads, and these do not know of the others'.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import ps_kernels

Work = Callable[[], object]


def rates(works: dict[str, Work], least_s: float) -> dict[str, float]:
    """How often a second each is done, all at the same time, each in a thread of its own."""
    counts, stop = dict.fromkeys(works, 0), threading.Event()

    def repeat(name: str) -> None:
        while not stop.is_set():
            works[name]()
            counts[name] += 1

    workers = [threading.Thread(target=repeat, args=(name,)) for name in works]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    time.sleep(least_s)
    stop.set()
    for worker in workers:
        worker.join()
    return {name: count / (time.perf_counter() - start) for name, count in counts.items()}


def openmp_libraries() -> list[str]:
    """Those loaded into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split()[-1] for line in lines if "gomp" in line or "iomp" in line}
    return sorted(Path(name).name for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=20_000_000)
    parser.add_argument(
        "--windows", type=int, default=6, help="of 0.4 s each; the fullest counts, the rest was disturbed"
    )
    chosen = parser.parse_args()
    p, m, v = (torch.rand(chosen.numel) for _ in range(3))
    g = torch.rand(chosen.numel).bfloat16()
    a, b = torch.rand(2, 1024, 1024)
    into = torch.empty_like(a)
    step: Work = lambda: ps_kernels.adam_step(p, m, v, g, g, step=3, lr=1e-3)  # noqa: E731
    multiply: Work = lambda: torch.mm(a, b, out=into)  # noqa: E731
    cores = sorted(os.sched_getaffinity(0))
    print("OpenMP libraries:", ", ".join(openmp_libraries()))
    print("| threads of step, product | bound | step alone | product alone | both: step | both: product |")
    print("|---|---|---|---|---|---|")
    for ours, theirs, bound in ((1, 1, False), (1, 1, True), (2, 2, False), (1, 2, False), (2, 1, False)):
        ps_kernels.set_threads(ours, cores=cores[:ours] if bound else None)
        torch.set_num_threads(theirs)
        works = {"step": step, "product": multiply}
        alone, both = dict.fromkeys(works, 0.0), dict.fromkeys(works, 0.0)
        for _ in range(chosen.windows):
            for name, work in works.items():
                alone[name] = max(alone[name], rates({name: work}, 0.4)[name])
            found = rates(works, 0.4)
            both = max(both, found, key=lambda each: sum(each[name] / alone[name] for name in works))
        rate = " | ".join(f"{alone[name]:.1f}/s" for name in works)
        share = " | ".join(f"{both[name] / alone[name]:.2f}" for name in works)
        print(f"| {ours}, {theirs} | {'yes' if bound else 'no'} | {rate} | {share} |")


if __name__ == "__main__":
    main()
