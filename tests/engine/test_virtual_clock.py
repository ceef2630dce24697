"""The engine's time on the CUDA that the CPU plays, beside what the simulator says of the plan in force.

Several ranks are in `tests/dist/test_ranks_in_time.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from _runs import HOST
from _timed_training import MACHINE, ROWS, Learner, tokens
from _virtual_clock import TimedDevice, TimedRuntime
from ps_core import AdamW, Budget, Machine, Options
from ps_core._plan import Queue
from ps_core._simulate.clock import Prediction
from ps_core.engine import Profile, chunked, profiled, release, statistics

STEPS = 6


class Timed(NamedTuple):
    """A training's last step, and what was predicted of each."""

    step_s: float
    busy_s: dict[str, float]
    predicted: Prediction
    profile: Profile
    """Of the last three steps."""


def over_disk(folder: Path, device: str, host: str, disk: str) -> Budget:
    return Budget(device=device, host=host, disk=disk, disk_dir=str(folder))


def train(
    folder: Path,
    budget: str,
    *,
    precision: str,
    micro_batches: int = 1,
    clip: float | None = 1.0,
    step: str = "after_backward",
    machine: Machine = MACHINE,
    disk: tuple[str, str] | None = None,
    offloading: bool = False,
    rows: int = ROWS,
    layers: int = 8,
    checkpointing: bool = True,
) -> Timed:
    """Train a language model; the last step is timed from first moment to first moment."""
    torch.manual_seed(0)
    model: Any = Learner(layers=layers, checkpointing=checkpointing, offloading=offloading)
    file = folder / "machine.toml"
    file.write_text(machine.to_toml(), "utf-8")
    runtime = TimedRuntime(machine)
    device = TimedDevice(runtime)
    firsts = []
    with runtime:
        model, optimizer = chunked(
            model,
            AdamW(lr=1e-2),
            precision=precision,
            budget=Budget(device=budget, host=HOST) if disk is None else over_disk(folder, budget, *disk),
            device=device,
            accumulation_steps=micro_batches,
            max_grad_norm=clip,
            options=Options(group_bytes=8192, machine=str(file), step=step),
        )

        def train_steps(indices: range) -> None:
            for index in indices:
                firsts.append(len(device.moments_s))
                for micro in range(micro_batches):
                    optimizer.scale(model(tokens(index * micro_batches + micro, rows))).backward()
                optimizer.step()
                optimizer.zero_grad()

        train_steps(range(STEPS - 3))
        with profiled(model) as profile:
            train_steps(range(STEPS - 3, STEPS))
        found = statistics(model)
        assert found.planned_passes >= (STEPS - 1) * micro_batches
        predicted = model.table.weight._owner.passes.scheduler.planned.prediction
        release(model)
    begin, end = (device.moments_s[place] for place in firsts[-2:])
    busy: dict[str, float] = {}
    for each in runtime.timeline:
        if begin <= each.begin < end:
            busy[each.queue] = busy.get(each.queue, 0.0) + each.end - each.begin
    return Timed(end - begin, busy, predicted, profile)


CASES = [("bf16", 1, 1.0), ("bf16", 1, None), ("fp16", 1, 1.0), ("bf16", 3, 1.0), ("fp32", 1, 1.0), ("fp32", 2, None)]
"""Precision, micro-batches, clipping. The last three have gradients added up in the host's memory, beside copies."""
NEAR = 0.001
"""How near engine and simulator must be."""


@pytest.mark.parametrize("budget_kib", [64, 160, 2048])
@pytest.mark.parametrize(("precision", "micro_batches", "clip"), CASES)
def test_a_step_takes_what_was_predicted(
    budget_kib: int, precision: str, micro_batches: int, clip: float | None, tmp_path: Path
) -> None:
    """The last budget holds everything, so nothing moves."""
    kib = budget_kib * (2 if precision == "fp32" else 1)
    got = train(tmp_path, f"{kib}KiB", precision=precision, micro_batches=micro_batches, clip=clip)
    assert (got.busy_s.keys() == {"compute"}) is (budget_kib == 2048)
    check_times(got)


@pytest.mark.parametrize(
    ("layers", "checkpointing", "precision", "micro_batches", "budget_kib"),
    [(8, False, "bf16", 1, 160), (8, False, "fp32", 2, 400), (2, True, "bf16", 1, 64), (16, True, "bf16", 2, 96)],
)
def test_other_sizes_and_blocks_that_are_not_recomputed(
    layers: int, checkpointing: bool, precision: str, micro_batches: int, budget_kib: int, tmp_path: Path
) -> None:
    told: dict[str, Any] = {"precision": precision, "layers": layers, "checkpointing": checkpointing}
    got = train(tmp_path, f"{budget_kib}KiB", micro_batches=micro_batches, **told)
    assert got.busy_s.keys() > {"compute", "copies 0", "copies 1"}
    check_times(got, 2 * NEAR)


def check_times(got: Timed, near: float = NEAR) -> None:
    """The step, and the time that each queue works and that the device idles, are as predicted."""
    predicted = got.predicted
    assert got.step_s == pytest.approx(predicted.step_time_s, rel=near)
    assert got.step_s - got.busy_s["compute"] == pytest.approx(predicted.stalled_s, abs=near * got.step_s)
    moves = {"copies 0": "host->device", "copies 1": "device->host"}
    for ours, theirs in {"compute": "compute", **moves}.items():
        assert got.busy_s.get(ours, 0.0) == pytest.approx(predicted.busy_s[theirs], rel=near)
    check_profile(got, near)


def check_profile(got: Timed, near: float) -> None:
    """The step but one of the profile is the one that was timed."""
    measured, planned = got.profile.summary(1), got.profile.summary(1, planned=True)
    idle_s = sum(measured.idle_s.values())
    assert measured.seconds == pytest.approx(got.step_s, rel=1e-9)
    assert measured.busy_s == pytest.approx(got.busy_s["compute"], rel=1e-9)
    assert idle_s == pytest.approx(measured.seconds - measured.busy_s, rel=1e-9, abs=1e-9 * got.step_s)
    assert idle_s == pytest.approx(got.predicted.stalled_s, abs=near * got.step_s)
    assert planned.seconds == pytest.approx(got.predicted.step_time_s, rel=1e-6)
    assert measured.idle_s == pytest.approx(planned.idle_s, abs=near * got.step_s)
    assert same_work(got.profile)


def same_work(profile: Profile) -> bool:
    """The plan's rows have the work of the measured ones, in its order; nothing else was done."""
    rows: list[dict[Queue, list[str]]] = []
    for pieces in (profile.measured, profile.planned):
        rows.append({})
        for piece in pieces:
            rows[-1].setdefault(piece.queue, []).append(piece.name)
    assert rows[0].keys() == rows[1].keys()
    return rows[0] == rows[1]


MANY_ROWS = 4 * ROWS
FASTER = replace(MACHINE, matmul_flops=MACHINE.matmul_flops * 4, matmul_flops_fp32=MACHINE.matmul_flops_fp32 * 4)
"""A moment of so many rows takes as long as one of `ROWS`."""


@pytest.mark.parametrize("budget_kib", [64, 160, 2048])
@pytest.mark.parametrize(("precision", "micro_batches", "clip"), CASES)
@pytest.mark.parametrize("share", [0.7, 3.0])
def test_launching_takes_its_time(
    share: float, budget_kib: int, precision: str, micro_batches: int, clip: float | None, tmp_path: Path
) -> None:
    """In 16 bits the host thread takes about as long for the model's operators as the device does, by this factor."""
    kib = budget_kib * (2 if precision == "fp32" else 1)
    launching = replace(MACHINE, launch_s=share * 1.5e-8)
    got = train(tmp_path, f"{kib}KiB", precision=precision, micro_batches=micro_batches, clip=clip, machine=launching)
    near = 0.004 if share < 1 else 0.07  # a plan counts one norm a group; the engine joins those of small groups
    assert got.step_s == pytest.approx(got.predicted.step_time_s, rel=near)
    computing_s = got.predicted.busy_s["compute"]
    assert (got.predicted.launching_s > computing_s) is (share > 1 and precision != "fp32")
    if budget_kib == 2048:
        assert got.step_s >= 0.93 * max(got.predicted.launching_s, computing_s)


@pytest.mark.parametrize("budget_kib", [120, 160])
@pytest.mark.parametrize(("precision", "micro_batches"), [("bf16", 1), ("bf16", 3), ("fp32", 1), ("fp32", 3)])
def test_activations_travel_as_was_predicted(
    budget_kib: int, precision: str, micro_batches: int, tmp_path: Path
) -> None:
    kib = budget_kib * (2 if precision == "fp32" else 1)
    got = train(
        tmp_path,
        f"{kib}KiB",
        precision=precision,
        micro_batches=micro_batches,
        machine=FASTER,
        offloading=True,
        rows=MANY_ROWS,
    )
    assert got.step_s == pytest.approx(got.predicted.step_time_s, rel=NEAR)
    for ours, theirs in {"compute": "compute", "copies 0": "host->device", "copies 1": "device->host"}.items():
        assert got.busy_s.get(ours, 0.0) == pytest.approx(got.predicted.busy_s[theirs], rel=NEAR)
    check_profile(got, NEAR)


@pytest.mark.parametrize("budget_kib", [64, 160])
@pytest.mark.parametrize(("precision", "micro_batches"), [("bf16", 1), ("bf16", 3)])
def test_memory_may_give_more_than_its_cores_take(
    budget_kib: int, precision: str, micro_batches: int, tmp_path: Path
) -> None:
    few_cores = replace(MACHINE, host_bandwidth=MACHINE.host_bandwidth / 4, host_dram_bandwidth=MACHINE.host_bandwidth)
    got, narrow = (
        train(tmp_path, f"{budget_kib}KiB", precision=precision, micro_batches=micro_batches, machine=each)
        for each in (few_cores, replace(few_cores, host_dram_bandwidth=0.0))
    )
    assert got.step_s == pytest.approx(got.predicted.step_time_s, rel=4 * NEAR)
    assert got.step_s < narrow.step_s


@pytest.mark.parametrize(
    ("precision", "micro_batches", "device_kib", "host_kib"),
    [("bf16", 1, 160, 400), ("bf16", 1, 64, 320), ("bf16", 3, 160, 400), ("fp32", 1, 160, 500)],
)
def test_steps_over_a_disk(precision: str, micro_batches: int, device_kib: int, host_kib: int, tmp_path: Path) -> None:
    got = train(
        tmp_path,
        f"{device_kib}KiB",
        precision=precision,
        micro_batches=micro_batches,
        disk=(f"{host_kib}KiB", "8MiB"),
    )
    assert got.step_s == pytest.approx(got.predicted.step_time_s, rel=10 * NEAR)
    for ours, theirs in {"DISK_R": "disk->host", "DISK_W": "host->disk"}.items():
        assert got.busy_s[ours] == pytest.approx(got.predicted.busy_s[theirs], rel=10 * NEAR)
        assert got.busy_s[ours] > 0


@pytest.mark.parametrize(("precision", "micro_batches", "device_kib"), [("bf16", 3, 160), ("fp32", 1, 240)])
def test_activations_beside_a_disk(precision: str, micro_batches: int, device_kib: int, tmp_path: Path) -> None:
    """The second case has them go on to the disk."""
    got = train(
        tmp_path,
        f"{device_kib}KiB",
        precision=precision,
        micro_batches=micro_batches,
        machine=FASTER,
        offloading=True,
        rows=MANY_ROWS,
        disk=("300KiB", "8MiB"),
    )
    assert got.step_s == pytest.approx(got.predicted.step_time_s, rel=15 * NEAR)
    written = [piece.name for piece in got.profile.measured if piece.queue is Queue.DISK_W and "(act)" in piece.name]
    assert bool(written) is (precision == "fp32")


def test_streams_the_host_and_its_memory_by_hand() -> None:
    machine = replace(MACHINE, latency_s=0.0, host_bandwidth=100.0, h2d_bandwidth=40.0, d2h_bandwidth=20.0)
    runtime = TimedRuntime(machine)
    up, down = runtime.stream(), runtime.stream()
    event = runtime.event()
    up.take(2.0, "first")
    up.take(1.0, "second")
    event.record(up)
    assert (up.free_s, runtime.now_s) == (3.0, 0.0)  # launching takes the host no time
    down.wait_event(event)
    assert runtime.copied_by(down.name, down.free_s, 80, machine.d2h_bandwidth) == 7.0
    down.take(4.0, "behind both")
    assert down.free_s == 7.0
    event.synchronize()
    assert (runtime.now_s, runtime.waited_s) == (3.0, 3.0)
    runtime.compute.take(1.0, "launched now")
    assert runtime.compute.free_s == 4.0  # not from 0 on, when the stream was free
    # 400 bytes: for 4 seconds 80 a second, beside the copy down; then 100.
    runtime.host_works(400, "a step")
    assert runtime.now_s == pytest.approx(3.0 + 4.0 + 0.8)
    runtime.synchronize()
    assert runtime.now_s == pytest.approx(7.8)
    assert [each.what for each in runtime.timeline] == ["first", "second", "behind both", "launched now", "a step"]


def test_copies_both_ways_share_what_memory_gives() -> None:
    machine = replace(MACHINE, latency_s=0.0, host_bandwidth=50.0, h2d_bandwidth=40.0, d2h_bandwidth=30.0)
    runtime = TimedRuntime(machine)
    assert runtime.copied_by("copies 0", 1.0, 80, machine.h2d_bandwidth) == 3.0
    # 10 a second for 2 seconds beside the copy up; then 30.
    assert runtime.copied_by("copies 1", 1.0, 80, machine.d2h_bandwidth) == 5.0
    # Nothing is left for a copy up but what the copy down does not take: 40 a second until 3.0, then 20, then 40.
    assert runtime.copied_by("copies 0", 3.0, 100, machine.h2d_bandwidth) == 6.5
