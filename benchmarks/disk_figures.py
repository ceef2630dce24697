"""Training in a part of the memory that it takes, over a disk: losses, memory, bytes and speed.

    python benchmarks/disk_figures.py --directory /scratch [--layers 21] [--steps 4] [--part 0.4]

A GPT of about 300 million parameters on ``device="cpu"`` in bf16; ``Budget.host`` is its activations and a part of its
model data, the rest is on disk, past the page cache. Two processes train the same steps, one after the other: one with
everything in memory, one over the disk. Compared are

- losses, which must be the same to the bit;
- the process's largest resident set as the system counts it, beyond what it had after imports, with the budget;
- bytes read and written in a step with the least that is possible: every byte of model data changes in a step, so what
  is not in memory at the peak of non-model bytes was written since and is read again;
- a step's time with that of the same bytes in the same pieces between the same file and memory, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from engine_figures import GPT, Shape, batches, check, parameters_of, peak_of_activations
from ps_core import AdamW, Budget
from ps_core._plan import Copy
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.disk.file import DiskFile
from ps_core.engine._devices.disk.queues import DiskStreams
from ps_core.engine._execution.find_hooks import hooks_of
from turns import ratios, spread

BYTES_PER_PARAMETER = 14
MIB = 2**20
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_TRIM_THRESHOLD_": str(MIB), "MALLOC_ARENA_MAX": "2"}
"""Activations are given back to the system as they are freed; or what malloc keeps would count as used."""


def resident_bytes() -> int:
    """The largest resident set so far (``getrusage`` would count what came before ``exec``, too)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux tells"
    return int(found[1]) * 1024


def train(shape: Shape, budget: Budget, steps: int) -> dict[str, Any]:
    """Train; what came of it."""
    imported = resident_bytes()
    with torch.device("meta"):
        model = GPT(shape)
    torch.manual_seed(0)
    started = time.perf_counter()
    model, optimizer = chunked(model, AdamW(), device="cpu", precision="bf16", budget=budget)
    data, losses, seconds, moved = batches(shape), [], [], []
    told = {"packing_s": time.perf_counter() - started}
    for _ in range(steps):
        before, start = dict(statistics(model).moved_bytes), time.perf_counter()
        loss = model(next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
        moved.append({link: count - before.get(link, 0) for link, count in statistics(model).moved_bytes.items()})
    found = statistics(model)
    told |= {
        "losses": losses,
        "seconds": seconds,
        "moved": moved,
        "resident_bytes": resident_bytes() - imported,
        "tiers": {name: (tier.peak_bytes, tier.budget_bytes) for name, tier in found.tiers.items()},
        "passes": (found.planned_passes, found.passes),
        "sizes": sizes_of(model) if "disk" in found.tiers else [],
    }
    release(model)
    return told


def sizes_of(model: Any) -> list[int]:
    """Bytes of every read and write of a planned step: positive for reads, negative for writes."""
    planned = hooks_of(model).scheduler.planned
    if planned is None:
        return []
    copies = [
        (instr.op.source, instr.op.target, instr.op.bytes, instr.queue.name)
        for name in planned.program.iteration()
        for instr in planned.plan.segment(name).instrs
        if isinstance(instr.op, Copy)
    ]
    return [size if queue == "DISK_R" else -size for _, _, size, queue in copies]


def link_alone(sizes: list[int], directory: str) -> float:
    """Seconds of these reads and writes, in order on their two streams, with nothing to do between."""
    file = DiskFile(directory)
    largest = max(map(abs, sizes))
    places = [file.reserve(largest) for _ in range(8)]
    memory = [torch.ones(largest, dtype=torch.uint8) for _ in range(4)]
    for place in places:
        file.write(place, 0, memory[0])
    streams = DiskStreams(file)
    start = time.perf_counter()
    for turn, size in enumerate(sizes):
        place, part = places[turn % 8], memory[turn % 4][: abs(size)]
        if size > 0:
            streams.read(part, place, 0, lambda: None)
        else:
            streams.write(place, 0, part)
    streams.synchronize()
    taken = time.perf_counter() - start
    streams.close()
    file.close()
    return taken


def apart(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run a part in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env=os.environ | environment, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(told: argparse.Namespace, shape: Shape) -> None:
    """Run both, and print."""
    check(shape, "bf16")
    peak, count = peak_of_activations(shape, "bf16"), parameters_of(shape)
    data = BYTES_PER_PARAMETER * count
    host = peak + int(told.part * data)
    print(
        f"{count / 1e6:.0f} million parameters, {data / 1e6:.0f} MB of model data, {peak / 1e6:.0f} MB of activations"
    )
    print(f"host budget {host / 1e6:.0f} MB: activations and {told.part:.0%} of the model data")
    common = [f"--layers={told.layers}", f"--hidden={told.hidden}", f"--steps={told.steps}", f"--batch={told.batch}"]
    common += [f"--length={told.length}", f"--directory={told.directory}"]
    whole = {} if told.skip_resident else apart([*common, "--host=0"], {})
    got = apart([*common, f"--host={host}"], MALLOC)
    plain = apart([*common, f"--host={host}", "--skip-resident"], {}) if told.malloc else got
    if whole:
        print(f"losses {got['losses']}: {'the same' if got['losses'] == whole['losses'] else whole['losses']}")
    print(
        f"passes by plan, all: {got['passes']}; packing {got['packing_s']:.1f} s; tiers (peak, budget) {got['tiers']}"
    )
    beyond = got["resident_bytes"] - host
    print(f"resident set: {got['resident_bytes'] / MIB:.0f} MiB beyond imports, budget and {beyond / MIB:.0f} MiB")
    if told.malloc:
        costs = ratios(got["seconds"][2:], plain["seconds"][2:])
        extra = (plain["resident_bytes"] - host) / MIB
        print(f"  without malloc's settings: budget and {extra:.0f} MiB; with / without in time {spread(costs)}")
    least, moved = 2 * (data - int(told.part * data)), got["moved"][-1]
    print(f"a step's bytes: {moved}, {sum(moved.values()) / least:.3f} of the least, {least / 1e6:.0f} MB")
    seconds = got["seconds"][2:]
    alone = [link_alone(got["sizes"], told.directory) for _ in seconds]
    print(f"a step {spread(seconds)} s; its reads and writes alone {spread(alone)} s")
    print(f"  the disk's own time / the step's: {spread(ratios(alone, seconds))}")
    if whole:
        print(f"  a step with everything in memory: {spread(whole['seconds'][2:])} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of the disk tier.")
    parser.add_argument("--directory", required=True, help="where the disk tier's file goes; on the disk to measure")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--part", type=float, default=0.4)
    parser.add_argument("--malloc", action="store_true", help="also without malloc's settings")
    parser.add_argument("--skip-resident", action="store_true", help="not the run with everything in memory")
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    told = parser.parse_args()
    shape = Shape(layers=told.layers, hidden=told.hidden, heads=told.hidden // 64, batch=told.batch, length=told.length)
    if told.host is None:
        compare(told, shape)
        return
    budget = Budget(host="16GiB") if not told.host else Budget(host=told.host, disk="32GiB", disk_dir=told.directory)
    print(json.dumps(train(shape, budget, told.steps)))


if __name__ == "__main__":
    main()
