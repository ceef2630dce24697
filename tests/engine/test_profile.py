"""`profiled`: what is recorded on each device, how it is written down, and that recording changes nothing."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from _fake_cuda import FakeRuntime, TimingEvent
from _runs import HOST
from checked_device.device import CheckedDevice
from ps_core import AdamW, Budget, InvalidInput, Options
from ps_core._plan import Queue
from ps_core.engine import Profile, chunked, profiled, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from test_virtual_clock import Learner, same_work, tokens

TIGHT = {"device": "64KiB", "host": HOST}
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "emulated": ("emulated", TIGHT),
    "emulated, everything fits": ("emulated", {"device": "2MiB", "host": HOST}),
    "emulated, disk": ("emulated", {"device": "64KiB", "host": "100KiB", "disk": "64MiB"}),
    "cpu": ("cpu", {"host": "64MiB"}),
    "cpu, disk": ("cpu", {"host": "160KiB", "disk": "64MiB"}),
    "played CUDA": ("cuda", TIGHT),
    "played CUDA, disk": ("cuda", {"device": "64KiB", "host": "100KiB", "disk": "64MiB"}),
}
LINKS = {
    Queue.H2D: "host->device",
    Queue.D2H: "device->host",
    Queue.DISK_R: "disk->host",
    Queue.DISK_W: "host->disk",
}


class Trainer:
    """A language model that recomputes its blocks, and batches for it."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def train(self, steps: int, rows: int = 4) -> None:
        for index in range(steps):
            self.model(tokens(index)[:rows]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@contextmanager
def trainer(way: str, folder: Path) -> Iterator[Trainer]:
    where, amounts = WAYS[way]
    runtime = FakeRuntime(0) if where == "cuda" else None
    device: Any = where if runtime is None else CudaDevice(runtime)
    disk = {"disk_dir": str(folder)} if "disk" in amounts else {}
    torch.manual_seed(0)
    with runtime if runtime is not None else nullcontext():
        made = chunked(
            Learner(layers=4, checkpointing=True),
            AdamW(lr=1e-2),
            device=device,
            precision="bf16",
            budget=Budget(**amounts, **disk),
            options=Options(group_bytes=8192),
        )
        try:
            yield Trainer(*made)
        finally:
            release(made[0])


def check_order(profile: Profile) -> None:
    """No queue does two things at once."""
    for pieces in (profile.measured, profile.planned):
        reached: dict[Queue, float] = defaultdict(float)
        for piece in pieces:
            assert reached[piece.queue] - 1e-12 <= piece.begin_s <= piece.end_s
            reached[piece.queue] = piece.end_s


def moved(profile: Profile) -> Counter[str]:
    """Bytes by link."""
    found: Counter[str] = Counter()
    for piece in profile.measured:
        if piece.queue in LINKS:
            found[LINKS[piece.queue]] += piece.bytes
    return found


@pytest.mark.parametrize("way", WAYS)
def test_every_piece_of_work_is_recorded(way: str, tmp_path: Path) -> None:
    with trainer(way, tmp_path) as run:
        run.train(2)
        before = Counter(statistics(run.model).moved_bytes)
        with profiled(run.model) as profile:
            run.train(3)
        after = statistics(run.model)
        run.train(1)  # which is not recorded
    assert profile.steps == 3
    check_order(profile)
    assert +moved(profile) == Counter(after.moved_bytes) - before
    found = profile.summary()
    assert sum(found.idle_s.values()) == pytest.approx(found.seconds - found.busy_s)
    assert after.idle_s == {cause.value: seconds / 3 for cause, seconds in found.idle_s.items()}
    assert {f"idle_s.{cause.value}" for cause in found.idle_s} <= after.as_dict().keys()
    if way == "cpu":
        assert {piece.run for piece in profile.measured} == {-1}
        assert {piece.queue for piece in profile.measured} == {Queue.COMPUTE}
        with pytest.raises(InvalidInput, match="nothing followed a plan"):
            profile.summary(planned=True)
    else:
        assert after.divergences == 0
        assert same_work(profile)
        assert any("blocks.1.wide (" in piece.name for piece in profile.measured) is ("fits" not in way)


def test_names_and_arguments_of_a_trace(tmp_path: Path) -> None:
    """The keys and types that chrome://tracing and Perfetto ask for."""
    path = tmp_path / "trace.json"
    with trainer("played CUDA", tmp_path) as run:
        run.train(2)
        with profiled(run.model) as profile:
            run.train(2)
    profile.chrome_trace(path)
    document = json.loads(path.read_text("utf-8"))
    names = {}
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert [type(event[key]) for key in ("name", "ph", "pid", "tid", "args")] == [str, str, int, int, dict]
        assert isinstance(event["ts"], int | float)
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert isinstance(event["dur"], float)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert [type(event["args"][key]) for key in ("bytes", "group", "step")] == [int, str, int]
        rows[event["pid"], event["tid"]].append(event)
    assert [names["process_name", pid, 0] for pid in (1, 2)] == ["measured", "planned"]
    threads = {key[1:]: name for key, name in names.items() if key[0] == "thread_name"}
    assert threads.keys() == rows.keys()
    assert {threads[1, tid] for tid in range(7) if (1, tid) in threads} == {
        *("compute", "host->device", "device->host", "cpu")
    }
    for (pid, tid), events in rows.items():
        assert [event["name"] for event in events] == [event["name"] for event in rows[3 - pid, tid]]
        for first, second in pairwise(events):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-6
    fetch = next(event for event in rows[1, int(Queue.H2D)] if event["name"] == "fetch blocks.1.wide (p16)")
    assert fetch["args"] == {"bytes": 4224, "group": "blocks.1.wide", "step": 0}


def test_a_picture_of_one_step(tmp_path: Path) -> None:
    path = tmp_path / "step.svg"
    with trainer("played CUDA", tmp_path) as run:
        run.train(2)
        with profiled(run.model) as profile:
            run.train(2)
    profile.svg(path, step=1)
    names = Counter(each.text for each in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}title"))
    wanted = Counter(piece.name for pieces in (profile.measured, profile.planned) for piece in pieces if piece.step)
    assert names["Learner: one step"] == 1
    # Moments cannot be missing; the processor's work of the step before may be there too.
    moments = {piece.name for piece in profile.measured if piece.queue is Queue.COMPUTE}
    assert all(names[name] == wanted[name] for name in moments)
    with pytest.raises(InvalidInput, match="a step from 0 to 1, found 2"):
        profile.svg(path, step=2)


def test_passes_without_a_plan_are_measured_only(tmp_path: Path) -> None:
    with trainer("emulated", tmp_path) as run:
        run.train(2, rows=2)
        before = Counter(statistics(run.model).moved_bytes)
        with profiled(run.model) as profile:
            run.train(1, rows=2)
            run.train(1, rows=4)  # larger than what the plan is for
            run.train(1, rows=4)
        after = Counter(statistics(run.model).moved_bytes)
    check_order(profile)
    assert +moved(profile) == after - before
    runs = [[piece.run for piece in profile.measured if piece.step == step] for step in range(3)]
    assert -1 not in runs[0] + runs[2]
    assert set(runs[1]) >= {-1}
    assert any(piece.name == "fetch blocks.1.wide (p16)" and piece.run < 0 for piece in profile.measured)
    assert {piece.run for piece in profile.planned} == {run for row in runs for run in row} - {-1}


def test_passes_that_begin_before_the_block_or_go_on_behind_it(tmp_path: Path) -> None:
    with trainer("played CUDA", tmp_path) as run:
        run.train(2)
        loss = run.model(tokens(2))
        with profiled(run.model) as profile:
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            with torch.no_grad():
                run.model(tokens(3))
            loss = run.model(tokens(3))
        loss.backward()
        run.optimizer.step()
        assert statistics(run.model).divergences == 0
    check_order(profile)
    names = [piece.name for piece in profile.measured if piece.run < 0]
    assert names
    assert all(name.startswith(("backward of", "forward of")) for name in names)
    step, evaluation = ([piece.name for piece in profile.measured if piece.run == run] for run in (0, 1))
    planned = [[piece.name for piece in profile.planned if piece.run == run] for run in (0, 1)]
    assert sorted(step) == sorted(planned[0])
    assert sorted(evaluation) == sorted(planned[1])
    assert "step of blocks.1.wide" in step
    assert "fetch blocks.1.wide (p16)" in evaluation


def learned(way: str, folder: Path, profile: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    with trainer(way, folder) as run:
        for _ in range(2):
            with profile(run.model):
                run.train(2)
        return {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize("way", WAYS)
def test_recording_changes_no_bit(way: str, tmp_path: Path) -> None:
    plain = learned(way, tmp_path, lambda model: nullcontext())
    recorded = learned(way, tmp_path, profiled)
    assert all(torch.equal(value, recorded[name]) for name, value in plain.items())


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_unordered_while_work_is_recorded(seed: int) -> None:
    torch.manual_seed(0)
    device = CheckedDevice(check=True, seed=seed)
    model, optimizer = chunked(
        Learner(layers=4, checkpointing=True),
        AdamW(lr=1e-2),
        device=device,
        precision="bf16",
        budget=Budget(device="64KiB", host=HOST),
        options=Options(group_bytes=8192),
    )
    run = Trainer(model, optimizer)
    run.train(2)
    with profiled(model) as profile:
        run.train(2)
    release(model)
    assert same_work(profile)


def test_timing_events_are_used_again_and_one_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    make, wait = FakeRuntime.timing_event, TimingEvent.synchronize
    monkeypatch.setattr(FakeRuntime, "timing_event", lambda self: calls.update(made=1) or make(self))
    monkeypatch.setattr(TimingEvent, "synchronize", lambda self: calls.update(waits=1) or wait(self))
    with trainer("played CUDA", tmp_path) as run:
        run.train(2)
        assert not calls
        for count in (1, 2):
            with profiled(run.model) as profile:
                run.train(2)
            streams = [piece for piece in profile.measured if piece.queue in (Queue.COMPUTE, Queue.H2D, Queue.D2H)]
            assert calls == {"made": 2 * len(streams) + 1, "waits": count}  # one that the others are read against


def test_a_block_that_raises_ends_the_recording(tmp_path: Path) -> None:
    with trainer("emulated", tmp_path) as run:
        run.train(2)
        with pytest.raises(KeyError), profiled(run.model) as profile:
            raise KeyError
        with pytest.raises(InvalidInput, match="nothing was recorded yet"):
            profile.summary()
        with profiled(run.model), pytest.raises(InvalidInput, match="being profiled already"), profiled(run.model):
            pass
        with profiled(run.model) as profile:
            run.train(1)
        assert profile.steps == 1
        assert str(profile.summary()).startswith("1 step in ")
