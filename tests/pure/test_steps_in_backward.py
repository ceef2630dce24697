"""Steps that begin while backward goes on: which, when, and what they gain."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

from ps_core import Setup, Tier, analytic_trace, find_plan, machine
from ps_core._errors import InvalidInput
from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import Copy, Instr, Norm, Queue, Release, Reserve, Run, Segment, Step
from ps_core._simulate.clock import simulate
from ps_core._simulate.steps_in_backward import early_steps, newest_first, overwritten_bytes, with_room
from ps_core._simulate.timeline import Timeline
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.traces_from_shapes import Workload
from ps_core.cli import main
from test_engine_timing import Row, forward, step, timeline

GRADIENT = Extent(Kind.GRAD, 0)
HOMES = 4
STEP = Instr(0, Queue.CPU, Step(0, (0,)))


def found(last_pass: Segment, *steps: Row) -> dict[int, list[int]]:
    early = early_steps(HOMES, last_pass, step(*steps))
    return {behind: [instr.id for instr in rows] for behind, rows in early.items()}


def gradient(target: int) -> Row:
    return Queue.D2H, Copy(GRADIENT, 0, 10, target, 0), ()


def of(*slots: int, queue: Queue = Queue.CPU, after: tuple[int, ...] = ()) -> Row:
    return queue, Step(0, slots), after


def test_a_step_begins_behind_the_last_instruction_that_touches_its_memory() -> None:
    backward = forward(gradient(0), gradient(1), (Queue.COMPUTE, Run(0, (), 0), ()), gradient(0))
    assert found(backward, of(0), of(1, 2)) == {3: [0], 1: [1]}
    assert found(backward, of(2)) == {}, "no gradient came"


@pytest.mark.parametrize(
    "row",
    [of(0, queue=Queue.COMPUTE), of(0, 7), of(0, after=(0,)), (Queue.CPU, Norm(0, 0), ())],
    ids=["on the device", "a slot of the segment's own", "waits", "no step"],
)
def test_what_is_no_step_of_the_processor_alone_stays(row: Row) -> None:
    first: Row = (Queue.CPU, Norm(0, 3), ())
    assert found(forward(gradient(0), gradient(1)), first, row, of(1)) == {1: [2]}
    assert found(forward(gradient(0), gradient(1)), first, row, of(1, 0)) == {}, "what came before touches its memory"


@pytest.mark.parametrize(("queue", "op"), [(Queue.D2H, Release(0)), (Queue.D2H, Reserve(0, 1, 0, 64))])
def test_memory_that_the_pass_lends_is_left_alone(queue: Queue, op: Release | Reserve) -> None:
    assert found(forward(gradient(0), (queue, op, ()), gradient(1)), of(0), of(1)) == {2: [1]}
    assert found(forward(gradient(0), (queue, op, ()), gradient(1)), of(1, 0)) == {}, "its other memory is lent"


def test_a_weight_that_is_read_after_its_gradient_is_stepped_later() -> None:
    fetch: Row = (Queue.H2D, Copy(Extent(Kind.P32, 0), 0, 1, 11, 64), ())
    both: Row = (Queue.COMPUTE, Run(0, (10, 11), 0), ())
    again: Row = (Queue.COMPUTE, Run(1, (11,), 0), ())
    assert found(forward(fetch, both, gradient(0)), of(0, 1)) == {2: [0]}
    assert found(forward(fetch, again, both, gradient(0)), of(0, 1)) == {3: [0]}
    assert found(forward(fetch, both, again, gradient(0)), of(0, 1)) == {}
    assert found(forward(fetch, both, gradient(0), again), of(0, 1)) == {}


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [(1.0, [0, 1, 2, 3, 4, 5]), (2.0, [0, 1, 2, 3, 4, 5]), (3.0, [0, 1, 3, 4, 5]), (5.0, [0, 2, 5]), (99.0, [0, 5])],
)
def test_a_slow_processor_takes_the_newest(seconds: float, taken: list[int]) -> None:
    """Gradients come every 2 s. What is passed over is left for the step segment; the last one is never."""
    backward = forward(*(gradient(place) for place in range(6)))
    every = early_steps(6, backward, step(*(of(place) for place in range(6))))
    found = newest_first(every, backward, [2.0 * place for place in range(6)], [seconds] * 6, inf)
    assert [row.id for rows in found.values() for row in rows] == taken
    assert all(row.op.slots == (behind,) for behind, rows in found.items() for row in rows)


@pytest.mark.parametrize(
    ("share", "seconds", "taken"),
    [
        (0.0, 3.0, {0: [0], 2: [2, 1], 4: [4, 3]}),
        (0.5, 3.0, {0: [0], 2: [2, 1], 4: [4, 3]}),
        (1.0, 3.0, {0: [0], 2: [2], 4: [4, 3]}),
        (1.0, 2.5, {0: [0], 2: [2, 1], 4: [4, 3]}),
        (inf, 2.5, {0: [0], 2: [2], 4: [4]}),
    ],
)
def test_an_idle_processor_comes_back_to_older_ones(share: float, seconds: float, taken: dict[int, list[int]]) -> None:
    """The second step waits when the third is over at 6.5 s; the next gradient comes at 9 s."""
    backward = forward(*(gradient(place) for place in range(5)), (Queue.COMPUTE, Run(0, (), 0), ()))
    every = early_steps(5, backward, step(*(of(place) for place in range(5))))
    ends = [0.0, 1.0, 1.0, 9.0, 9.0, 12.0]
    found = newest_first(every, backward, ends, [1.5, seconds, 5.0, 1.0, 2.0], share)
    assert {behind: [row.id for row in rows] for behind, rows in found.items()} == taken


def test_a_step_is_not_moved_behind_another_queue() -> None:
    """No event of the other queue says that the step's own gradient has arrived."""
    backward = forward(gradient(0), gradient(1), (Queue.CPU, Norm(2, 2), ()), (Queue.COMPUTE, Run(0, (), 0), ()))
    every = early_steps(3, backward, step(of(0), of(1), of(2)))
    found = newest_first(every, backward, [0.0, 1.0, 1.0, 9.0], [1.5, 1.0, 1.0], 0.0)
    assert {behind: [row.id for row in rows] for behind, rows in found.items()} == {0: [0], 2: [2]}


def test_it_runs_beside_the_rest_of_backward_and_the_next_copy_waits_for_it() -> None:
    line = timeline()
    backward = forward((Queue.D2H, Copy(GRADIENT, 0, 10, 0, 0), ()), (Queue.COMPUTE, Run(0, (), 0), ()))
    _, ends = line.run(backward, [2.0, 10.0], {0: [(STEP, 5.0)]})
    assert ends == [2.0, 10.0]
    assert line.run(step(), [], {}) == (10.0, []), "where the rest is stepped, nobody waits for the worker"
    upward = forward((Queue.H2D, Copy(GRADIENT, 0, 0, 10, 0), ()), (Queue.COMPUTE, Run(0, (), 0), (0,)))
    _, ends = line.run(upward, [1.0, 1.0], {1: [(STEP, 30.0)]})
    assert ends == [11.0, 12.0]
    assert line.finish() == 42.0


def test_of_the_workers_own_work_it_comes_behind() -> None:
    line = timeline()
    backward = forward((Queue.CPU, Norm(0, 0), ()), (Queue.COMPUTE, Run(0, (), 0), ()))
    line.run(backward, [3.0, 1.0], {0: [(STEP, 5.0)]})
    assert line.finish() == 8.0


def test_without_a_worker_nothing_begins_early() -> None:
    line = Timeline(HOMES, worker=False, bandwidth=1.0, launching_s=lambda _: 0.0)
    line.run(forward(gradient(0)), [1.0], {0: [(STEP, 5.0)]})
    assert line.finish() == 1.0


@pytest.mark.slow
def test_plans_are_chosen_and_timed_for_it() -> None:
    """Most of the processor's time hides behind backward, and no plan is slower for it."""
    trace, rates = analytic_trace(shape("gpt-24x2048"), Workload(batch=8)), machine("h200")
    gains = []
    for size in (8, 12, 16, 64):
        tiers = (Tier("device", size << 30), Tier("host", 1 << 38))
        after = find_plan(trace, tiers, rates, setup=Setup())
        early = find_plan(trace, tiers, rates, setup=Setup(step_in_backward=True))
        told = early.prediction
        same = simulate(after.program, after.plan, rates, step_in_backward=True)
        assert told.step_time_s <= same.step_time_s * 1.0001
        assert same.step_time_s <= after.prediction.step_time_s * 1.0001
        assert told.forward_s + told.backward_s + told.update_s == pytest.approx(told.step_time_s, rel=1e-6)
        gains.append(after.prediction.step_time_s / told.step_time_s)
    assert max(gains) > 1.2
    assert gains[-1] == pytest.approx(1.0, abs=0.02), "where everything fits there is nothing to hide"


@pytest.mark.parametrize(("room", "taken"), [(0, []), (9, []), (10, [2]), (29, [2]), (30, [2, 1]), (60, [2, 1, 0])])
def test_as_many_steps_as_there_is_room_for_begin_before_the_decision(room: int, taken: list[int]) -> None:
    steps = {place: (replace(STEP, id=place),) for place in range(3)}
    found = with_room(steps, [3.0, 2.0, 1.0], {0: 30, 1: 20, 2: 10}, room)
    assert [row.id for rows in found.values() for row in rows] == taken


@pytest.mark.slow
def test_steps_that_can_be_undone_are_faster_where_host_memory_has_room() -> None:
    """At H200 rates; copies of old values take the processor as long as a step."""
    trace, rates = analytic_trace(shape("gpt-32x2560"), Workload(batch=8, chunked_loss=True)), machine("h200")
    seconds, kept = [], []
    for host, setup in (
        (64, Setup()),
        (27, Setup(step_in_backward=True, speculative=True)),
        (64, Setup(step_in_backward=True, speculative=True)),
        (64, Setup(step_in_backward=True)),
    ):
        found = find_plan(trace, (Tier("device", 16 << 30), Tier("host", host << 30)), rates, setup=setup)
        seconds.append(found.prediction.step_time_s)
        sizes = overwritten_bytes(found.plan.home, found.plan.segment(SegmentName.STEP))
        kept.append(sum(sizes[row.id] for rows in found.early.values() for row in rows))
        assert not found.speculative or kept[-1] + found.prediction.peak_bytes["host"] <= host << 30
    assert sorted(seconds, reverse=True) == seconds
    assert seconds[2] < 0.9 * seconds[0]
    assert 0 < kept[1] < kept[2]


@pytest.mark.parametrize(
    ("name", "gib", "part"), [("gpt-24x2048", 12, 0.99), ("gpt-32x2560", 16, 0.97), ("gpt-32x4096", 24, 0.95)]
)
@pytest.mark.slow
def test_how_near_steps_come_to_what_compute_or_memory_takes(name: str, gib: int, part: float) -> None:
    """At H200 rates. Copies and steps share the host's memory, which takes the largest model longer than compute."""
    trace, rates = analytic_trace(shape(name), Workload(batch=8, chunked_loss=True)), machine("h200")
    tiers = (Tier("device", gib << 30), Tier("host", 1 << 39))
    told = find_plan(trace, tiers, rates, setup=Setup(step_in_backward=True)).prediction
    memory_s = told.busy_s["cpu"] + sum(told.moved_bytes.values()) / rates.host_bandwidth
    assert max(memory_s, *told.busy_s.values()) > part * told.step_time_s
    assert (memory_s > told.busy_s["compute"]) is (name == "gpt-32x4096")


def test_an_evaluation_steps_nothing() -> None:
    trace = analytic_trace(shape("gpt-10m"), Workload(batch=1, seq=64))
    tiers = (Tier("device", 1 << 24), Tier("host", 1 << 32))
    made = [
        find_plan(trace, tiers, machine("h200"), setup=Setup(training=False, step_in_backward=early))
        for early in (False, True)
    ]
    assert made[0].prediction == made[1].prediction
    assert made[1].early == {}


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt-24x2048", "--machine", "h200", "--gpus", "1", "--batch", "8", "--json"]
    words += ["--device-memory", "12GiB", "--host-memory", "256GiB"]
    told = []
    for flag in ([], ["--step-in-backward"], ["--step-speculative", "--precision", "fp16"]):
        assert main([*words, *flag]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [each["step_in_backward"] for each in told] == [False, True, True]
    assert [each["speculative"] for each in told] == [False, False, True]
    assert told[1]["step_time_s"] < 0.85 * told[0]["step_time_s"]
    assert told[1]["step_time_s"] < told[2]["step_time_s"] < 0.9 * told[0]["step_time_s"]
    for more in (["--accumulate", "2"], ["--precision", "fp16"], ["--gpus", "2"]):
        assert main([*words, "--step-in-backward", *more]) == 2
        assert "--step-in-backward needs one GPU (--gpus 1), one micro-batch a step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("early", "says"),
    [
        (
            {"step_in_backward": True},
            "one micro-batch a step, .* found 1 processes and accumulate=2",
        ),
        ({"speculative": True}, "speculative is for steps within backward: give step_in_backward=True too"),
    ],
)
def test_what_cannot_be_stepped_within_backward_is_not_simulated(early: dict[str, bool], says: str) -> None:
    trace = analytic_trace(shape("gpt-10m"), Workload(batch=1, seq=64))
    tiers = (Tier("device", 1 << 28), Tier("host", 1 << 32))
    found = find_plan(trace, tiers, machine("h200"), setup=Setup(accumulate=2))
    with pytest.raises(InvalidInput, match=says):
        simulate(found.program, found.plan, machine("h200"), **early)
