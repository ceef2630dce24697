"""Training GPTs on a CUDA device: tokens and TFLOP a second, for models that fit it and models that do not.

Each training has a process of its own. Those of a group are there at the same time and take turns, a few steps each, so
that what changes on the machine changes for all of them; a turn begins and ends with an idle device. TFLOPS count 8
operations a parameter and token, 2 of them for recomputing blocks: the published convention.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from trainer import MARK, Case, Row

GIB = 2**30
TRAINER = Path(__file__).with_name("trainer.py")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Trainings that take turns; the first one's rate is divided by each other's."""

    cases: tuple[Case, ...]
    turns: int = 4
    steps: int = 3
    """In a turn."""
    limit_s: float = 150.0
    profiled: int = 0
    """So many more steps of each engine, under its profiler."""


B13: dict[str, int] = {"layers": 24, "hidden": 2048}
B67: dict[str, int] = {"layers": 32, "hidden": 4096}
B27: dict[str, int] = {"layers": 32, "hidden": 2560}
# A group is at the same time in 78 GiB of a card's memory and 128 GiB of the host's, of which FSDP2 takes 16 bytes a
# parameter, rounded up by PyTorch's allocator of pinned memory.
GROUPS = (
    Group(limit_s=170.0, cases=(
        Case(name="engine, 1.3B in 12 GiB", how="engine", device_bytes=12 * GIB, host_bytes=32 * GIB, **B13),
        Case(name="FSDP2 with CPU offload, 1.3B", how="fsdp2", warm_ups=2, **B13),
    )),
    Group(limit_s=100.0, cases=(
        Case(name="engine, 1.3B in 30 GiB", how="engine", device_bytes=30 * GIB, host_bytes=32 * GIB, **B13),
        Case(name="plain, 1.3B", how="plain", warm_ups=2, **B13),
    )),
    Group(turns=2, steps=2, limit_s=220.0, cases=(
        Case(name="engine, 2.7B in 16 GiB", how="engine", device_bytes=16 * GIB, host_bytes=44 * GIB, **B27),
        Case(name="FSDP2 so, weights stay for backward, 2.7B", how="fsdp2", warm_ups=1, reshard=False, **B27),
    )),
)  # fmt: skip
SIZES = (
    Group(limit_s=60.0, profiled=3, cases=(
        Case(name="engine, 1.3B in 30 GiB", how="engine", device_bytes=30 * GIB, host_bytes=32 * GIB, **B13),
        Case(name="bf16 and fp32 masters, 1.3B", how="masters", warm_ups=2, **B13),
    )),
    Group(turns=3, limit_s=80.0, profiled=3, cases=(
        Case(name="engine, 1.3B in 12 GiB", how="engine", device_bytes=12 * GIB, host_bytes=32 * GIB, **B13),
        Case(name="FSDP2 with CPU offload, weights stay for backward, 1.3B", how="fsdp2", warm_ups=2, reshard=False,
             **B13),
    )),
    Group(turns=1, limit_s=85.0, profiled=3, cases=(
        Case(name="engine, 6.7B in 24 GiB", how="engine", device_bytes=24 * GIB, host_bytes=104 * GIB, **B67),
    )),
    Group(turns=1, limit_s=60.0, profiled=3, cases=(
        Case(name="engine, 1.3B in 12 GiB, steps within backward", how="engine", device_bytes=12 * GIB,
             host_bytes=32 * GIB, in_backward=True, **B13),
    )),
    Group(turns=1, limit_s=85.0, profiled=3, cases=(
        Case(name="engine, 6.7B in 24 GiB, steps within backward", how="engine", device_bytes=24 * GIB,
             host_bytes=104 * GIB, in_backward=True, **B67),
    )),
)  # fmt: skip
"""The most telling first; the first three take a little over two minutes on an H200."""
COMPARED = (
    Group(turns=2, limit_s=100.0, cases=(  # 40 GiB for this one: the three of them do not fit an 80 GB card
        Case(name="bf16 and fp32 masters, nothing recomputed, 1.3B", how="masters", warm_ups=2, checkpoint=False,
             **B13),
    )),
    Group(turns=3, limit_s=150.0, profiled=3, cases=(
        Case(name="engine, 1.3B in 12 GiB", how="engine", device_bytes=12 * GIB, host_bytes=32 * GIB, **B13),
        Case(name="torchao's CPUOffloadOptimizer, 1.3B", how="torchao", warm_ups=2, **B13),
        Case(name="DeepSpeed, ZeRO 2 with CPU offload, 1.3B", how="deepspeed", warm_ups=2, **B13),
    )),
)  # fmt: skip
"""Besides `GROUPS`; torchao and DeepSpeed have to be carried to the card, and are left out where they are not.

DeepSpeed compiles its optimizer while it is built, for a minute or so.
"""
SMALL: dict[str, int] = {"layers": 2, "hidden": 64, "batch": 2, "length": 32, "vocabulary": 128}
DRY = (
    Group(turns=2, steps=1, limit_s=800.0, cases=(
        Case(name="engine, dry", how="engine", device_bytes=2**21, on="emulated", **SMALL),
        Case(name="FSDP2 with CPU offload, dry", how="fsdp2", warm_ups=1, on="cpu", **SMALL),
        Case(name="FSDP2 so, weights stay, dry", how="fsdp2", warm_ups=1, on="cpu", reshard=False, **SMALL),
        Case(name="plain, dry", how="plain", warm_ups=1, on="cpu", **SMALL),
    )),
)  # fmt: skip
DRY_SIZES = (
    Group(turns=1, limit_s=800.0, profiled=3, cases=(
        Case(name="engine, dry", how="engine", device_bytes=2**21, on="emulated", **SMALL),
        Case(name="bf16 and fp32 masters, dry", how="masters", warm_ups=1, on="cpu", **SMALL),
    )),
    Group(turns=1, limit_s=800.0, profiled=3, cases=(
        Case(name="engine, dry, steps within backward", how="engine", device_bytes=2**21, on="emulated",
             in_backward=True, **SMALL),
    )),
)  # fmt: skip
DRY_COMPARED = (
    Group(turns=1, steps=1, limit_s=800.0, cases=(
        Case(name="engine, dry", how="engine", device_bytes=2**22, on="emulated", **SMALL),
        Case(name="bf16 and fp32 masters, dry", how="masters", warm_ups=1, on="cpu", **SMALL),
    )),
)  # fmt: skip
LARGEST_HIDDEN = 5120
"""A layer has 0.31 thousand million parameters, a step of the search."""
LARGEST_BEGIN, LARGEST_UP, LARGEST_DOWN = 0.9, 1.08, 0.88
"""How much of what the bytes would allow is tried first, and what comes after one that fits, or does not."""


class Worker:
    """A training's process."""

    def __init__(self, case: Case, port: int) -> None:
        self.case = case
        self.row: Row = {"name": case.name, "turns_s": []}
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed when the process is
        self._process = subprocess.Popen(
            [sys.executable, str(TRAINER), json.dumps(asdict(case))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, errors="replace",
            env={**os.environ, "PS_PORT": str(port)},
        )  # fmt: skip
        self._answers: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def good(self) -> bool:
        return "failed" not in self.row

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(json.loads(line.removeprefix(MARK)))
        self._answers.put(None)

    def answer(self, end: float) -> Row:
        """What it says next; nothing from the one that fails."""
        try:
            found = self._answers.get(timeout=max(0.1, end - time.monotonic()))
        except queue.Empty:
            self.row["failed"] = "not done in time"
            return {}
        if found is None:
            self._said.seek(0)
            lines = [line for line in self._said.read().splitlines() if line.strip()] or ["nothing said"]
            status = self._process.wait()
            self.row |= {"failed": f"exit status {status}: {blamed(lines)[:300]}", "said": lines[-30:]}
        return found or {}

    def ask(self, what: str, end: float) -> Row:
        if not self.good:
            return {}
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, and its answer says why
            print(what, file=self._process.stdin, flush=True)
        return self.answer(end)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._said.close()


def blamed(lines: Sequence[str]) -> str:
    """The line that names an error: the last one may be advice."""
    named = [
        line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*(Error|DoesNotFit|OutOfMemory|Failure)\b", line)
    ]
    return (named or lines)[-1]


def together(group: Group, limit_s: float) -> list[Row]:
    """All of a group's rows, or why there are none."""
    end = time.monotonic() + min(group.limit_s, limit_s)
    workers = [Worker(case, 29541 + index) for index, case in enumerate(group.cases)]
    try:
        for worker in workers:
            worker.row |= worker.answer(end)
        for worker in workers:
            worker.row["warm_up"] = worker.ask(f"turn {worker.case.warm_ups}", end)
        for index in range(group.turns):
            for worker in workers if index % 2 == 0 else workers[::-1]:
                done = worker.ask(f"turn {group.steps}", end)
                if done:
                    worker.row["turns_s"].append(done["step_s"])
                    worker.row["losses"] = done["losses"]
        for worker in [each for each in workers if group.profiled and each.case.how == "engine"]:
            worker.row |= worker.ask(f"profile {group.profiled}", end)
        for worker in workers:
            worker.row |= worker.ask("facts", end)
    finally:
        for worker in workers:
            worker.close()
    rows = [judged(worker) for worker in workers]
    for other in rows[1:]:
        other["first_over_this"] = ratio(rows[0]["turns_s"], other["turns_s"])
    return rows


def judged(worker: Worker) -> Row:
    """With rates, from the turns that there were."""
    row, tokens = worker.row, worker.case.batch * worker.case.length
    if row["turns_s"]:
        step_s = statistics.median(row["turns_s"])
        row |= {"step_s": step_s, "tokens_per_s": tokens / step_s}
        row["tflops"] = 8 * row["parameters"] * tokens / step_s / 1e12
    return row


def ratio(first: Sequence[float], other: Sequence[float]) -> list[float] | None:
    """How many times as fast the first is: least, median and most over the pairs of turns."""
    pairs = sorted(theirs / ours for ours, theirs in zip(first, other, strict=False))
    return [pairs[0], statistics.median(pairs), pairs[-1]] if pairs else None


def available_bytes() -> int:
    """Of the host's memory."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("ascii"))
    assert found is not None
    return int(found[1]) * 1024


def host_bytes() -> int | None:
    """None, as the engine finds it; but a virtual machine may begin with little and get more when that is used."""
    found = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text("ascii"))
    return 100 * GIB if found and int(found[1]) * 1024 < 64 * GIB else None


def device_bytes() -> int:
    """What is free of the card's memory; asked in another process, which takes none of it for long."""
    asking = "import torch; print(torch.cuda.mem_get_info()[0])"
    said = subprocess.run([sys.executable, "-c", asking], capture_output=True, text=True, check=False, timeout=120)
    return int(said.stdout) if said.returncode == 0 else 70 * GIB


def most_layers(device: int, host: int) -> int:
    """How many the bytes would allow: 14 a parameter, and on the card the blocks' inputs and 10 GiB to work in."""
    case = Case(name="", how="engine", layers=0, hidden=LARGEST_HIDDEN)
    tables = 14 * (case.vocabulary + case.length) * LARGEST_HIDDEN
    layer = 14 * 12 * LARGEST_HIDDEN**2 + 2 * case.batch * case.length * LARGEST_HIDDEN
    return max(1, int((0.9 * (device + host) - tables - 10 * GIB) / layer))


def next_layers(tried: dict[int, bool]) -> int:
    """What to try once some fitted and some did not; 0: nothing any more."""
    fits = [layers for layers, good in tried.items() if good]
    does_not = [layers for layers, good in tried.items() if not good]
    if fits and does_not:
        return 0
    return int(max(fits) * LARGEST_UP) + 1 if fits else int(min(does_not) * LARGEST_DOWN)


def largest(limit_s: float, keep: Callable[[list[Row]], None]) -> list[Row]:
    """Models of about what should just fit, with all that device and host have: larger ones, or smaller ones."""
    rows: list[Row] = []
    end, tried = time.monotonic() + limit_s, dict[int, bool]()
    host = host_bytes() or available_bytes()
    layers = int(LARGEST_BEGIN * most_layers(device_bytes(), host))
    while layers and (left := end - time.monotonic()) > 60:
        case = Case(
            name=f"engine, {layers} layers of {LARGEST_HIDDEN}, all there is", how="engine", layers=layers,
            hidden=LARGEST_HIDDEN, host_bytes=host_bytes(), warm_ups=2,
        )  # fmt: skip
        rows += together(Group(cases=(case,), turns=1, steps=1, limit_s=left), left)
        show(rows[-1:])
        keep(rows)
        tried[layers] = "failed" not in rows[-1]
        layers = next_layers(tried)
    return rows


def sizes(
    groups: Sequence[Group], limit_s: float, keep: Callable[[list[Row]], None], machine: Path, timelines: Path
) -> list[Row]:
    """Each group by itself; its engines also take steps under their profiler.

    Plans are made with the machine file that calibration has left, if any.
    """
    rows: list[Row] = []
    end = time.monotonic() + limit_s
    timelines.mkdir(parents=True, exist_ok=True)
    for index, group in enumerate(groups):
        if (left := end - time.monotonic()) < 30:  # no model is built much sooner
            break
        more = {
            "machine": str(machine) if machine.is_file() else None, "timeline": str(timelines / f"timeline-{index}")
        }  # fmt: skip
        cases = tuple(replace(case, **more) if case.how == "engine" else case for case in group.cases)
        rows += together(replace(group, cases=cases), left)
        show(rows[-len(cases) :])
        for row in rows[-len(cases) :]:
            for name, found in row.get("profile", {}).items():
                print(f"{row['name']}, {name}: {found['said']}", flush=True)
        keep(rows)
    return rows


def carried(groups: Sequence[Group]) -> list[Group]:
    """Leave out what needs a package that is not there."""
    missing = {name for name in ("torchao", "deepspeed") if find_spec(name) is None}
    for name in sorted(missing):
        print(f"{name} is not installed: not compared")
    return [replace(group, cases=tuple(case for case in group.cases if case.how not in missing)) for group in groups]


def show(rows: list[Row]) -> None:
    for each in rows:
        line = f"{each['name']:44}"
        if "step_s" in each:
            line += f"{each['parameters'] / 1e9:7.2f}B {each['step_s']:8.3f} s/step"
            line += f"{each['tokens_per_s']:10.0f} tokens/s{each['tflops']:8.1f} TFLOPS"
        if each.get("first_over_this"):
            low, middle, high = each["first_over_this"]
            line += f"  the first is {middle:.2f} times as fast ({low:.2f} to {high:.2f})"
        print(line + (f"  {each['failed']}" if "failed" in each else ""), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0, help="for everything together")
    parser.add_argument("--largest", action="store_true", help="only how large a model can be")
    parser.add_argument("--sizes", action="store_true", help="only a few sizes, each profiled")
    parser.add_argument("--timelines", type=Path, default=Path(), help="the folder for those of the sizes")
    parser.add_argument("--compared", action="store_true", help="only the comparisons that need other packages")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU: shows that this runs")
    options = parser.parse_args()
    end, rows = time.monotonic() + options.seconds, []

    def keep(found: list[Row]) -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1), "utf-8")

    if options.largest and not options.dry_run:
        rows = largest(options.seconds, keep)
    if options.sizes:
        machine = (Path() if options.json is None else options.json.parent) / "machine.toml"
        rows = sizes(DRY_SIZES if options.dry_run else SIZES, options.seconds, keep, machine, options.timelines)
    groups: Sequence[Group] = DRY if options.dry_run else GROUPS
    if options.compared:
        groups = carried(DRY_COMPARED if options.dry_run else COMPARED)
    for group in () if options.largest or options.sizes else groups:
        left = end - time.monotonic()
        if left < 40:
            break
        rows += together(group, left)
        show(rows[-len(group.cases) :])
        keep(rows)
    keep(rows)
    print("TABLE training, 8 operations a parameter and token; in turns, within one group")
    show(rows)
    if options.largest:  # where one is to fail
        return int(not any("step_s" in each for each in rows) and not options.dry_run)
    return int(any("failed" in each for each in rows))


if __name__ == "__main__":
    sys.exit(main())
