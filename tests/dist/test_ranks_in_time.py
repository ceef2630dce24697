"""The time of several ranks on the CUDA that the CPU plays, beside what the simulator says of their plan.

The ranks are of one node, and each has its part of the node's host memory and cores. Rates are slow, so that the hops
of a collective, which no machine file has, are as short beside a step as they are on a node of H200s.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from _runs import HOST
from _threads import Meeting
from _timed_ranks import CountingDevice, TimedTogether, run
from _timed_training import MACHINE, Learner, tokens
from ps_core import AdamW, Budget, Machine, Options
from ps_core._plan import Queue
from ps_core._simulate.clock import Prediction, simulate
from ps_core._simulate.cluster import ring_s
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._sharding.collective_streams import DeviceStaging

STEPS = 5
SLOWER = 1e4


def slowed(machine: Machine) -> Machine:
    """Return a machine whose every rate is so much lower, and whose every delay is so much longer."""
    rates = [each.name for each in fields(machine) if each.name.endswith(("_flops", "_flops_fp32", "_bandwidth"))]
    delays = ("latency_s", "moment_overhead_s")
    changed = {name: getattr(machine, name) / SLOWER for name in rates}
    return replace(machine, **changed, **{name: getattr(machine, name) * SLOWER for name in delays})


NODE = slowed(MACHINE)
"""Links of several ranks want more than the host's memory gives."""
WIDE = replace(NODE, host_dram_bandwidth=8 * (NODE.h2d_bandwidth + NODE.d2h_bandwidth) + NODE.host_bandwidth)
"""The host's memory gives all that links and cores take."""
PCIE = replace(WIDE, collective_bandwidth=NODE.h2d_bandwidth / 2)
"""Besides, accelerators reach each other over the links' bridges alone."""
_MAKING = threading.Lock()
"""Held while a rank draws initial weights: all of them draw from PyTorch's one generator."""


class Timed(NamedTuple):
    """One rank's last step but one, and what is predicted of it."""

    step_s: float
    busy_s: dict[str, float]
    predicted: Prediction
    """Of the plan, with the operations that were counted: the engine has to guess those of a recorded pass."""


class Case(NamedTuple):
    """What is trained."""

    ranks: int
    precision: str
    micro_batches: int
    clip: float | None
    device_kib: int
    machine: Machine
    near: float
    """How near engine and simulator are."""


def train(each: TimedTogether, folder: Path, case: Case, *, layers: int = 4) -> Timed:
    with _MAKING:
        torch.manual_seed(0)
        made = Learner(layers=layers, checkpointing=True)
    file = folder / f"machine-{each.rank}.toml"
    file.write_text(case.machine.to_toml(), "utf-8")
    device = CountingDevice(each.runtime)
    model, optimizer = chunked(
        made,
        AdamW(lr=1e-2),
        precision=case.precision,
        budget=Budget(device=f"{case.device_kib}KiB", host=HOST),
        device=device,
        accumulation_steps=case.micro_batches,
        max_grad_norm=case.clip,
        collectives=each,
        options=Options(group_bytes=8192, machine=str(file)),
    )
    assert optimizer is not None
    firsts = []
    for step in range(STEPS):
        firsts.append(len(device.moments_s))
        for micro in range(case.micro_batches):
            batch = (step * case.micro_batches + micro) * each.ranks + each.rank
            optimizer.scale(model(tokens(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
    told = statistics(model)
    assert told.divergences == 0, told.last_divergence
    assert told.planned_passes == STEPS * case.micro_batches
    planned = hooks_of(model).engine.passes.scheduler.planned
    assert planned is not None
    trace = planned.program.trace
    counts = device.counts[firsts[-2] : firsts[-2] + len(trace.moments)]
    moments = [replace(row, **count._asdict()) for row, count in zip(trace.moments, counts, strict=True)]
    program = replace(planned.program, trace=replace(trace, moments=tuple(moments)))
    predicted = simulate(program, planned.plan, case.machine)
    release(model)
    begin, end = (device.moments_s[place] for place in firsts[-2:])
    busy: dict[str, float] = {}
    for work in each.runtime.timeline:
        if begin <= work.begin < end:
            busy[work.queue] = busy.get(work.queue, 0.0) + work.end - work.begin
    return Timed(end - begin, busy, predicted)


NEAR, SCARCE = 0.005, 0.07
"""How near engine and simulator are; the simulator is cautious where memory is too slow for the links."""
MATRIX = [
    Case(2, "bf16", 1, 1.0, 80, WIDE, NEAR),
    Case(2, "bf16", 1, None, 80, PCIE, NEAR),
    Case(2, "bf16", 1, 1.0, 2048, WIDE, NEAR),
    Case(2, "bf16", 3, 1.0, 120, WIDE, NEAR),
    Case(2, "fp16", 1, None, 120, NODE, SCARCE),
    Case(2, "fp32", 1, 1.0, 280, WIDE, NEAR),
    Case(2, "fp32", 2, None, 240, PCIE, NEAR),
    Case(4, "bf16", 1, 1.0, 80, NODE, SCARCE),
    Case(4, "bf16", 2, None, 120, PCIE, NEAR),
    Case(4, "fp32", 1, 1.0, 200, WIDE, NEAR),
    Case(8, "bf16", 1, 1.0, 64, NODE, SCARCE),
    Case(8, "fp32", 2, 1.0, 200, WIDE, NEAR),
]


@pytest.mark.parametrize("case", MATRIX)
def test_ranks_take_what_was_predicted(case: Case, tmp_path: Path) -> None:
    """The third case holds everything, so nothing but collectives moves."""
    found = run(case.ranks, case.machine, lambda each: train(each, tmp_path, case))
    for got in found:
        predicted = got.predicted
        assert got.step_s == pytest.approx(found[0].step_s, rel=1e-9)
        assert got.step_s == pytest.approx(predicted.step_time_s, rel=case.near)
        assert got.step_s - got.busy_s["compute"] == pytest.approx(predicted.stalled_s, abs=case.near * got.step_s)
        assert got.busy_s["compute"] == pytest.approx(predicted.busy_s["compute"], rel=NEAR)
        sent_s = predicted.busy_s["collectives"] - case.machine.latency_s  # the rest is a message about norms
        assert got.busy_s["copies 2"] == pytest.approx(sent_s, rel=NEAR)
        if case.near == NEAR:
            for ours, theirs in {"copies 0": "host->device", "copies 1": "device->host"}.items():
                assert got.busy_s.get(ours, 0.0) == pytest.approx(predicted.busy_s[theirs], rel=NEAR)


def test_times_do_not_depend_on_when_threads_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def timed(each: TimedTogether) -> Timed:
        return train(each, tmp_path, case, layers=2)

    case = Case(3, "bf16", 2, 1.0, 120, NODE, SCARCE)
    wanted = run(case.ranks, NODE, timed)[0].step_s
    draw, exchange = random.Random(0), Meeting.exchange

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(draw.choice((0.0, 0.0, 0.003)))
        return exchange(*args, **kwargs)

    monkeypatch.setattr(Meeting, "exchange", late)
    for got in run(case.ranks, NODE, timed):
        assert got.step_s == pytest.approx(wanted, rel=1e-9)


def test_collectives_and_messages_join_the_ranks_by_hand() -> None:
    """Rank 0 comes to the gather at 1 s and rank 1 at 3 s; what either does besides goes on."""
    machine = replace(NODE, latency_s=0.5, collective_bandwidth=100.0, h2d_bandwidth=50.0)
    found: dict[int, tuple[float, ...]] = {}

    def meets(each: TimedTogether) -> None:
        runtime, device = each.runtime, CountingDevice(each.runtime)
        carrier = DeviceStaging(device, torch.empty(0, dtype=torch.uint8, device="cpu"))
        stream: Any = device._streams[Queue.COLL]
        stream.take(1.0 + 2 * each.rank, "work before")
        shard, whole = torch.full((200,), each.rank, dtype=torch.uint8), torch.empty(400, dtype=torch.uint8)

        def gather(session: Any) -> None:
            session.on_device(carrier).all_gather(whole, shard, "layer")

        pending = each.start(gather)
        pending.wait()
        assert whole.tolist() == [0] * 200 + [1] * 200
        runtime.compute.take(10.0, "beside")
        runtime.host_waits(4.0 if each.rank else 2.0)
        assert each.all_values([each.rank], "norms") == [[0], [1]]
        found[each.rank] = stream.free_s, runtime.compute.free_s, runtime.now_s

    run(2, machine, meets)
    over = 3.0 + 0.5 + 200 / 100 + ring_s(2, 2)
    assert found == {rank: (pytest.approx(over), 10.0, pytest.approx(4.5)) for rank in range(2)}
