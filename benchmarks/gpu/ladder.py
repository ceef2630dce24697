"""The first thing to run on a card: short checks, each on what those before it have shown to work.

Each rung has a process of its own and a limit in seconds. Those of one row of `ROWS` run at the same time: starting
PyTorch and CUDA takes longer than most of them. One that takes too long says where all its threads are, and is ended.
Those that fail are run once more, with launches that wait and with the stacks of C++. Rows after the first two run all
the same, so that one call finds every fault. ``--dry-run`` runs all of them on the CPU, on the device that the engine's
tests play. Then the first rung has a process, and the others share one.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rung_process import INTERRUPTED, RungProcess

ROOT = Path(__file__).parents[2]
MIB = 2**20
DRY = os.environ.get("PS_FAKE_CUDA") == "1"
WHERE = "cpu" if DRY else "cuda"
SLEEP_CYCLES = 100_000_000
"""About 50 ms: far longer than the copies that must not overtake it."""


def versions() -> None:
    """Name what is there: releases, the card, its memory and the computer's."""
    facts: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "CUDA": torch.version.cuda}
    for name in ("cupy", "numpy"):
        facts[name] = importlib.import_module(name).__version__ if not (DRY and name == "cupy") else None
    if not DRY:
        free, whole = torch.cuda.mem_get_info()
        found = torch.cuda.get_device_properties(0)
        facts |= {"device": found.name, "capability": f"{found.major}.{found.minor}", "free": free, "whole": whole}
        cuda = importlib.import_module("cupy").cuda.runtime
        facts |= {"driver": cuda.driverGetVersion(), "runtime of cupy": cuda.runtimeGetVersion()}
    memory = Path("/proc/meminfo").read_text("ascii").splitlines()
    facts |= dict(line.split(":")[:2] for line in memory if line.startswith(("MemTotal", "MemAvailable")))
    print(json.dumps({key: value.strip() if isinstance(value, str) else value for key, value in facts.items()}))


def links() -> None:
    """Time pinning, and copies up, down, and both at once; what arrives is compared."""
    from ps_kernels import PinnedArena

    size = (8 if DRY else 512) * MIB
    start = time.perf_counter()
    arenas = [PinnedArena(size, pin=not DRY) for _ in range(2)]
    print(f"pinning: {2 * size / (time.perf_counter() - start) / 1e9:.2f} GB/s")
    assert DRY or all(arena.pinned for arena in arenas), "host memory is not pinned"
    up, down = (arena.tensor(0, size, torch.uint8) for arena in arenas)
    torch.arange(size // 8, out=up.view(torch.int64))
    into, of = (torch.zeros(size, dtype=torch.uint8, device=WHERE) for _ in range(2))
    of.copy_(up)
    pairs = {"up": [(into, up)], "down": [(down, of)], "both ways": [(into, up), (down, of)]}
    for name, copies in pairs.items():
        taken = timed(copies)
        print(f"link {name}: {len(copies) * size / taken / 1e9:.1f} GB/s")
    assert torch.equal(into.cpu(), up)
    assert torch.equal(down, up)


def timed(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The best of three times that these copies take, each on a stream of its own."""
    streams = [None if DRY else torch.cuda.Stream() for _ in copies]  # type: ignore[no-untyped-call]
    best = float("inf")
    for _ in range(3):
        wait()
        start = time.perf_counter()
        for stream, (target, source) in zip(streams, copies, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        wait()
        best = min(best, time.perf_counter() - start)
    return best


def wait() -> None:
    if not DRY:
        torch.cuda.synchronize()


def compiling() -> None:
    """Compile all kernels, for the processor and for the card; later rungs load them."""
    import ps_kernels

    found = ps_kernels.backends()
    print("\n".join([*ps_kernels.warm(), f"{found}"]))
    if found["scalar"] != "available":
        print(f"NO COMPILED C, so PyTorch steps on the processor, which is slower: {found['scalar']}")
    assert DRY or found["cuda"] == "available", f"no kernels for CUDA: {found['cuda']}"


def kernels() -> None:
    """Run every kernel on small arrays, the processor's too; a step has the same bits in each instruction set."""
    from exercise import exercise

    import ps_kernels

    for where in {"cpu", WHERE}:
        for length in (1, 1003, 70_001):
            for shift in (0, 1):
                exercise(length, shift, where)
    wait()
    states = ps_kernels.backends().items()
    stepped = {name: one_step(name) for name, state in states if state == "available" and name != "numpy"}
    for name, values in stepped.items():
        same = [torch.equal(*pair) for pair in zip(values, stepped.get("scalar", stepped["torch"]), strict=True)]
        print(name, same)
        assert all(same), f"{name}: other bits than the plainest instruction set"


def one_step(backend: str) -> list[torch.Tensor]:
    """Return what Adam, and a norm, make of the same numbers."""
    import ps_kernels

    where, generator = WHERE if backend == "cuda" else "cpu", torch.Generator().manual_seed(5)
    p, m, v, grad = (torch.rand(70_001, generator=generator).to(where) for _ in range(4))
    out, norm = torch.zeros(70_001, dtype=torch.bfloat16, device=where), torch.zeros(2, device=where)
    ps_kernels.sumsq_finite(grad, norm, backend=backend)
    ps_kernels.adam_step(p, m, v, grad, out, step=3, lr=1e-2, weight_decay=0.1, backend=backend)
    return [each.cpu() for each in (p, m, v, out, norm)]


def plain_loop() -> None:
    """Train a tiny model without the engine, twice: the bits are the same, so what rungs compare can be."""
    on = of_tests()
    for precision in ("bf16", "fp32"):
        runs = [on.train_plain(on.ADAMW, precision, max_grad_norm=0.5) for _ in range(2)]
        wrong = runs[0].differs(runs[1])
        print(precision, runs[0].losses)
        assert not wrong, wrong
        assert runs[0].losses[-1] < runs[0].losses[0]


def order() -> None:
    """Check the engine's own device: an arena, pinned slots, copies that wait for events behind a busy stream."""
    on = of_tests()
    from ps_core._plan import Queue
    from ps_core.engine._devices.cuda.device import CudaDevice

    runtime = on.new_runtime()
    with runtime if DRY else nullcontext():
        device = CudaDevice(runtime)
        size = MIB
        arena, source, target = device.arena(4 * size), device.host(size), device.host(size)
        assert DRY or source.is_pinned()
        arena.mul_(1)  # the first launch of a kernel loads it, which may wait for the whole card
        device.synchronize()
        at_once = DRY or os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
        for value in range(1, 9):
            source.fill_(value)
            target.zero_()
            part = arena[size : 2 * size]
            if not DRY:
                with device.on(Queue.H2D):
                    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            device.copy(Queue.H2D, part, source)
            arrived = device.record(Queue.H2D)
            device.wait(Queue.COMPUTE, arrived)
            device.declare_access(Queue.COMPUTE, "doubling", (part,), (part,))
            with torch.no_grad():
                part.mul_(2)
            device.wait(Queue.D2H, device.record(Queue.COMPUTE))
            device.copy(Queue.D2H, target, part)
            done = device.record(Queue.D2H)
            assert at_once or not bool(target.any()), "the copy down did not wait for the copy up"
            device.wait(Queue.CPU, done)
            assert bool((target == 2 * value).all()), f"expected {2 * value} everywhere, found {target.unique()}"
        del source, target, part, arena
        device.close()


def of_tests() -> Any:
    """The small models that the engine's tests train on a card."""
    sys.path.append(str(ROOT / "tests" / "engine"))
    on = importlib.import_module("_on_cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    if not DRY:
        on.warm_up()
    return on


ROOMY = 16 * MIB


def tiny() -> None:
    """Train a tiny model: steps by a plan, once a card's memory is known; the losses are a plain loop's."""
    on = of_tests()
    run = on.train(on.ADAMW, ROOMY, steps=7, precision="bf16", max_grad_norm=0.5)
    plain = on.train_plain(on.ADAMW, "bf16", max_grad_norm=0.5, steps=7)
    print(run.statistics.planned_passes, run.losses)
    assert run.statistics.planned_passes >= 4, "four steps by a plan"
    assert run.losses == plain.losses, f"a plain loop: {plain.losses}"


def tight() -> None:
    """Train it in hardly any memory: the bits are a plain loop's."""
    on = of_tests()
    check_tight(on, on.tight(), "bf16", 1, checkpointing=False)


def accumulated() -> None:
    """Train it so in fp32, and with recomputed blocks and several passes a step."""
    on = of_tests()
    for precision, micro_batches, checkpointing in (("fp32", 1, False), ("bf16", 2, True)):
        size = on.tight(precision, micro_batches, checkpointing=checkpointing)
        check_tight(on, size, precision, micro_batches, checkpointing=checkpointing)


def check_tight(on: Any, size: int, precision: str, micro_batches: int, *, checkpointing: bool) -> None:
    """Compare a training with a plain loop, in which no block is recomputed."""
    how = {"precision": precision, "micro_batches": micro_batches, "max_grad_norm": 0.5}
    run = on.train(on.ADAMW, size, checkpointing=checkpointing, **how)
    plain = on.train_plain(on.ADAMW, **how)
    wrong = plain.differs(run)
    print(how, f"{size:,} bytes", run.statistics.moved_bytes)
    assert not wrong, wrong
    assert run.statistics.evictions > 0, "nothing was evicted"


def in_backward() -> None:
    """Step groups within backward: the bits are those of steps behind it."""
    on = of_tests()
    expected = on.train(on.ADAMW, ROOMY, precision="bf16", steps=6)
    for on_device in (False, True):
        run = on.train_early("in_backward", on.tight(), on_device=on_device, precision="bf16", steps=6)
        print(run.early, run.early_on_device, run.losses)
        run.norms = expected.norms  # it keeps no gradient to measure them
        wrong = expected.differs(run)
        assert not wrong, wrong


def undone_steps() -> None:
    """Step groups within backward and undo that where gradients are clipped: the bits are those of steps behind it."""
    on = of_tests()
    how: dict[str, Any] = {"precision": "bf16", "steps": len(on.LIMITS), "max_grad_norm": on.LIMITS}
    expected = on.train(on.ADAMW, ROOMY, **how)
    run = on.train_early("speculative", on.tight(), on.LIMITS.index(on.STRICT), **how)
    wrong = expected.differs(run)
    print(run.early, "undone:", run.statistics.undone_group_steps, run.losses)
    assert not wrong, wrong
    on.check_undone(run)


def torch_optimizer() -> None:
    """Train with an optimizer of PyTorch's: states on the card are stepped there, others on the processor."""
    on = of_tests()
    from ps_core import TorchOptimizer

    spec = TorchOptimizer(torch.optim.NAdam, lr=1e-3)
    roomy, tight = (on.train(spec, size, precision="bf16", max_grad_norm=0.5) for size in (ROOMY, on.tight()))
    print(roomy.losses, tight.losses, roomy.on_device, tight.on_device)
    assert roomy.on_device > tight.on_device
    apart = max(abs(one - other) for one, other in zip(roomy.losses, tight.losses, strict=True))
    assert apart < 0.02 * roomy.losses[0], f"the losses are {apart:.3f} apart: a card only rounds otherwise"


def profile() -> None:
    """Profile steps of a plan: every queue has the plan's work, and the trace is there to be opened."""
    on = of_tests()
    from ps_core.engine import profiled

    torch.manual_seed(3)
    with on.managed(on.Model(), on.ADAMW, on.tight(), precision="bf16") as (model, optimizer, _):
        for index in range(3):
            on.train_step(model, optimizer, index)
        with profiled(model) as seen:
            for index in range(3, 6):
                on.train_step(model, optimizer, index)
        times = seen.summary(1), seen.summary(1, planned=True)
        for name, found in zip(("measured", "planned"), times, strict=True):
            print(f"{name}: {found.seconds:.5f} s a step, of which the device idles {found.idle_share:.0%}")
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            seen.chrome_trace(trace)
            events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"measured", "planned"}
    rows = [{queue: [each.name for each in pieces if each.queue is queue] for queue in {p.queue for p in pieces}}
            for pieces in (seen.measured, seen.planned)]  # fmt: skip
    assert rows[0] == rows[1], "the work is the plan's, in its order"
    assert all(piece.end_s >= piece.begin_s for piece in seen.measured)


def out_of_memory() -> None:
    """Ask for more than there is, in forward and in backward: the step is lost, and training goes on."""
    on = of_tests()
    torch.manual_seed(3)
    with on.managed(on.Model(), on.ADAMW, on.tight(), precision="bf16") as (model, optimizer, device):
        runtime = device._runtime
        for index in range(3):
            on.train_step(model, optimizer, index)
        for where in ("forward", "backward"):
            if DRY:
                runtime.allocator.limit_bytes = 10 * MIB
            model.appetite[where] = 20 * MIB if DRY else 2 * runtime.free_bytes()[1]
            try:
                on.train_step(model, optimizer, 3)
            except torch.OutOfMemoryError as error:
                print(where, str(error).splitlines()[0])
            else:
                raise AssertionError(f"{where}: memory did not run out")
            model.appetite.clear()
            if DRY:
                runtime.allocator.limit_bytes = 1 << 40
            optimizer.zero_grad()
            assert on.train_step(model, optimizer, 3) > 0


def side_stream() -> None:
    """Train on streams that take turns: the losses are those of one stream."""
    on = of_tests()
    expected = on.train(on.ADAMW, on.tight(), precision="bf16").losses
    losses, runtime = [], on.new_runtime()
    streams = [runtime.stream(), runtime.stream(), runtime.current()]
    if DRY:
        for index, stream in enumerate(streams):
            stream.name = f"compute {index}"  # work of PyTorch's, which the played device does at once
    else:
        on.warm_up(*streams)  # cuBLAS has a workspace for each
    torch.manual_seed(3)
    with on.managed(on.Model(), on.ADAMW, on.tight(), precision="bf16", runtime=runtime) as (model, optimizer, _):
        for index in range(on.STEPS):
            stream = streams[index % 3]
            if not DRY:
                stream.wait_stream(torch.cuda.current_stream())
            with runtime.using(stream):
                if not DRY:
                    torch.cuda._sleep(SLEEP_CYCLES // 50)  # type: ignore[no-untyped-call]
                losses.append(on.train_step(model, optimizer, index))
    assert losses == expected, (losses, expected)


def gpt() -> None:
    """Train a GPT of 125M parameters, and a plain loop: near losses, and the step times of both."""
    from trainer import Case, turn, with_engine, with_plain

    shape: dict[str, Any] = {"layers": 12, "hidden": 768, "batch": 4, "length": 512, "on": "cuda"}
    if DRY:
        shape = {"layers": 2, "hidden": 64, "batch": 2, "length": 32, "vocabulary": 128, "on": "emulated"}
    case = Case(name="GPT", how="engine", device_bytes=(2 if DRY else 2048) * MIB, **shape)
    losses, steps_s = [], []
    for make in (with_engine, with_plain):
        generator, where = torch.Generator().manual_seed(1), torch.device(WHERE)
        training = make(case, where)
        rows = [turn(training, case, where, count, generator) for count in (case.warm_ups, 2, 2, 2)]
        losses.append([loss for row in rows for loss in row["losses"]])
        steps_s.append(median(row["step_s"] for row in rows[1:]))
        print(f"{make.__name__}: {steps_s[-1] * 1e3:.1f} ms a step, losses {losses[-1]}")
        del training
    print(f"a step of the engine takes {steps_s[0] / steps_s[1]:.2f} times as long as the plain loop's")
    apart = max(abs(one - other) for one, other in zip(*losses, strict=True))
    assert apart < 0.1, f"the losses are {apart:.3f} apart"


RUNGS: dict[str, tuple[Callable[[], None], int]] = {
    "versions": (versions, 60),  # CuPy and the driver are read from the disk
    "links": (links, 40),
    "compiling": (compiling, 90),
    "kernels": (kernels, 40),
    "plain loop": (plain_loop, 60),  # cuBLAS is read from the disk
    "order": (order, 40),
    "tiny": (tiny, 40),
    "tight": (tight, 40),
    "accumulated": (accumulated, 40),
    "in backward": (in_backward, 40),
    "undone steps": (undone_steps, 40),
    "torch optimizer": (torch_optimizer, 40),
    "profile": (profile, 40),
    "out of memory": (out_of_memory, 40),
    "side stream": (side_stream, 40),
    "GPT": (gpt, 60),
}
"""Each rung, and the most seconds it may take: 40, of which most are for reading PyTorch and CUDA from a cold disk."""
ROWS = (
    ("versions", "compiling"),
    ("links",),
    ("kernels", "plain loop", "order"),
    ("tiny", "tight", "accumulated", "in backward", "undone steps", "torch optimizer", "profile", "side stream"),
    ("out of memory",),
    ("GPT",),
)
"""Rungs that run at the same time. Those that measure time, or use all memory, run alone."""
NEEDED = {"versions", "compiling", "links"}
"""Rungs that all others need: if one of these fails, the others are not run."""


def climb(dry: bool, rungs: list[str]) -> int:
    """Run rungs, row by row; run those that fail again so that they say more. Return the exit status."""
    environment, failed = os.environ | ({"PS_FAKE_CUDA": "1"} if dry else {}), list[str]()
    for row in rows_of(dry, rungs):
        print("; ".join(f"{', '.join(names)}, at most {limit_s(names, dry)} s" for names in row), flush=True)
        start = time.monotonic()
        ended = attempt(row, dry, environment)
        for names, (status, said) in zip(row, ended, strict=True):
            print(f"{'FAILED' if status else 'ok'} {', '.join(names)}")
            print(indented(said[-40:] if status else said[-3 * len(names) :]))
        print(f"took {time.monotonic() - start:.1f} s", flush=True)
        if any(status == INTERRUPTED for status, _ in ended):
            return 1
        bad = [names for names, (status, _) in zip(row, ended, strict=True) if status]
        if bad:
            print(f"{'; '.join(map(', '.join, bad))} again, with launches that wait and stacks of C++", flush=True)
            more = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_SHOW_CPP_STACKTRACES": "1"}
            for names, (status, said) in zip(bad, attempt(bad, dry, environment | more, 2), strict=True):
                print(f"{'FAILED again' if status else 'ok this time'}: {', '.join(names)}")
                print(indented(said[-60:]), flush=True)
        failed += [name for names in bad for name in names]
        if NEEDED.intersection(failed):
            break
    print(f"ladder: {'FAILED: ' + ', '.join(failed) if failed else f'all {len(rungs)} rungs hold'}")
    return int(bool(failed))


def rows_of(dry: bool, rungs: list[str]) -> list[list[list[str]]]:
    """Return the rows; of each, what every process runs."""
    if dry:
        return [[names] for names in (rungs[:1], rungs[1:]) if names]
    rows = [[[name] for name in row if name in rungs] for row in ROWS]
    return [row for row in rows if row]


def limit_s(names: list[str], dry: bool) -> int:
    return sum(RUNGS[name][1] for name in names) * (20 if dry else 1)


def attempt(
    row: list[list[str]], dry: bool, environment: dict[str, str], patience: int = 1
) -> list[tuple[int, list[str]]]:
    """Run rungs at the same time, each for at most ``patience`` times its limit; return statuses and outputs."""
    ended: list[tuple[int, list[str]]] = []
    for process in [RungProcess(__file__, names, patience * limit_s(names, dry), environment) for names in row]:
        ended.append(process.end(at_once=any(status == INTERRUPTED for status, _ in ended)))
    return ended


def indented(lines: list[str]) -> str:
    return "\n".join(f"    {line[:300]}" for line in lines)


def interrupt_once(*_: object) -> None:
    """Raise KeyboardInterrupt, but not again: ``timeout`` sends its signal twice."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU")
    parser.add_argument("--rung", nargs="+", choices=RUNGS, help="these alone, in this process")
    parser.add_argument("--only", nargs="+", choices=RUNGS, help="these rungs")
    told = parser.parse_args()
    signal.signal(signal.SIGINT, interrupt_once)
    if told.rung is None:
        return climb(told.dry_run, told.only or list(RUNGS))
    faulthandler.register(signal.SIGUSR1, chain=True)
    for name in told.rung:
        RUNGS[name][0]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
