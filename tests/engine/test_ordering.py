"""Vector clocks against a search for paths: on random programs, the checker raises exactly where it should."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checked_device.device import CheckedDevice
from checked_device.race_check import Access, History
from ps_core import PlanMismatch
from ps_core._plan import Queue
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._devices.device import Event

BYTES = 12


@dataclass(frozen=True)
class Op:
    """One call: ``copy`` and ``work`` touch memory, ``record`` makes the next event, ``wait`` names one."""

    kind: str
    queue: Queue
    reads: tuple[range, ...] = ()
    writes: tuple[range, ...] = ()
    event: int = -1


def launches(queue: Queue) -> st.SearchStrategy[Op]:
    """Something that touches memory."""
    spots = st.integers(0, BYTES - 3).flatmap(lambda at: st.integers(1, 3).map(lambda size: range(at, at + size)))
    ranges = st.lists(spots, max_size=2).map(tuple)
    works = st.builds(lambda reads, writes: Op("work", queue, reads, writes), ranges, ranges)
    halves = st.tuples(st.integers(0, 3), st.integers(6, 9)).flatmap(st.permutations)
    copies = st.builds(
        lambda size, ends: Op("copy", queue, *((range(at, at + size),) for at in ends)), st.integers(1, 3), halves
    )
    return works | copies


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    """A few queues; before each launch, waits for what others did, nearly all or only some of them."""
    used = draw(st.lists(st.sampled_from(Queue), min_size=2, max_size=4, unique=True))
    queues = st.sampled_from(used)
    forgetful = draw(st.sampled_from([0, 1, 5, 10]))
    program: list[Op] = []
    events = 0
    for _ in range(draw(st.integers(2, 12))):
        queue = draw(queues)
        for other in used:
            if other is not queue and draw(st.integers(1, 10)) > forgetful:
                program += [Op("record", other), Op("wait", queue, event=events)]
                events += 1
        if events and draw(st.integers(0, 3)) == 0:
            program.append(Op("wait", draw(queues), event=draw(st.integers(0, events - 1))))
        program.append(draw(launches(queue)))
        if draw(st.integers(0, 15)) == 0:
            program.append(Op("synchronize", Queue.CPU))
    return program


@dataclass
class Graph:
    """The operations of a program, and from each an edge to all that have to come right before it."""

    program: list[Op]
    edges: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        last: dict[Queue, int] = {}
        records = [at for at, op in enumerate(self.program) if op.kind == "record"]
        for at, op in enumerate(self.program):
            before = [last[queue] for queue in (op.queue, Queue.CPU) if queue in last]
            if op.kind == "wait":
                before.append(records[op.event])
            if op.kind == "synchronize":
                before += last.values()
            self.edges.append(before)
            last[op.queue] = at

    def path(self, start: int, end: int) -> bool:
        """Whether ``start`` comes before ``end`` on every day."""
        stack, seen = [end], set()
        while stack:
            at = stack.pop()
            if at == start:
                return True
            if at not in seen:
                seen.add(at)
                stack += self.edges[at]
        return False

    def conflicts(self, at: int) -> list[int]:
        """The earlier operations that an operation is in conflict with."""

        def touched(ranges: tuple[range, ...]) -> set[int]:
            return {each for one in ranges for each in one}

        found = []
        mine, my = touched(self.program[at].writes), touched(self.program[at].reads)
        for other in range(at):
            theirs, their = touched(self.program[other].writes), touched(self.program[other].reads)
            if (mine & (theirs | their)) | (my & theirs) and not self.path(other, at):
                found.append(other)
        return found

    def first(self) -> int | None:
        """The first operation that is in conflict."""
        return next((at for at in range(len(self.program)) if self.conflicts(at)), None)


class Runner:
    """A program on a device, with work that is really done."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self.memory = device.arena(BYTES)
        self.memory.copy_(torch.arange(1, BYTES + 1, dtype=torch.uint8))
        self.events: list[Event] = []

    def views(self, ranges: tuple[range, ...]) -> list[torch.Tensor]:
        return [self.memory[each.start : each.stop] for each in ranges]

    def do(self, at: int, op: Op) -> None:
        reads, writes = self.views(op.reads), self.views(op.writes)
        if op.kind == "copy":
            self.device.copy(op.queue, writes[0], reads[0])
        elif op.kind == "work":
            self.device.declare_access(op.queue, f"work {at}", reads, writes)
            total = sum(int(each.sum()) for each in reads)
            for each in writes:
                each.fill_((total * 3 + at) % 251)
        elif op.kind == "record":
            self.events.append(self.device.record(op.queue))
        elif op.kind == "wait":
            self.device.wait(op.queue, self.events[op.event])
        else:
            self.device.synchronize()


def run(device: CpuDevice, program: list[Op]) -> tuple[int, str] | list[int]:
    """Which operation the device refused and why, or the bytes at the end."""
    runner = Runner(device)
    for at, op in enumerate(program):
        try:
            runner.do(at, op)
        except PlanMismatch as error:
            return at, str(error)
    device.synchronize()
    return runner.memory.tolist()


seen = {"refused": 0, "clean": 0, "ordered": 0}


@settings(max_examples=300)
@given(programs(), st.integers(0, 1000))
def check_a_program(program: list[Op], seed: int) -> None:
    graph = Graph(program)
    expected = graph.first()
    result = run(CheckedDevice(check=True, seed=seed), program)
    if expected is None:
        assert result == run(CpuDevice(), program), "delays changed what waits had ordered"
        touching = [at for at, op in enumerate(program) if op.writes]
        seen["clean"] += 1
        seen["ordered"] += len(touching) >= 3 and len({program[at].queue for at in touching}) >= 2
        return
    assert isinstance(result, tuple)
    at, message = result
    assert at == expected
    seen["refused"] += 1
    sides = re.match(
        r"unordered: '(.+?)' \(operation (\d+) on (\w+)\).* while '(.+?)' \(operation (\d+) on (\w+)\)", message
    )
    assert sides is not None
    assert (side(program, at)) == (sides[1], int(sides[2]), sides[3])
    assert (sides[4], int(sides[5]), sides[6]) in [side(program, other) for other in graph.conflicts(at)]


def side(program: list[Op], at: int) -> tuple[str, int, str]:
    """How a message names an operation."""
    op = program[at]
    number = sum(each.kind in ("copy", "work") and each.queue is op.queue for each in program[: at + 1])
    return ("copy" if op.kind == "copy" else f"work {at}", number, op.queue.name)


def test_the_checker_agrees_with_a_search_for_paths() -> None:
    check_a_program()
    # Both kinds were tried, and so were programs whose order was not trivial.
    assert seen["refused"] >= 60
    assert seen["clean"] >= 60
    assert seen["ordered"] >= 50


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8), st.booleans(), st.sampled_from(Queue)), max_size=40))
def test_history_keeps_what_it_must(uses: list[tuple[int, int, bool, Queue]]) -> None:
    """Byte by byte: the last write, and the reads since; all accesses on clocks that cover nothing else."""
    history = History()
    writers: dict[int, Access] = {}
    readers: dict[int, set[Access]] = {}
    for number, (start, size, writes, queue) in enumerate(uses, 1):
        access = Access(queue, number, "use", start, start + size, writes)
        nothing = [0] * len(Queue)
        others = {writers[at] for at in range(start, start + size) if at in writers}
        if writes:
            others |= {each for at in range(start, start + size) for each in readers.get(at, ())}
        found = history.conflict(access, nothing)
        assert (found in others) if others else (found is None)
        for other in others:  # a clock that covers everything but what came since it on its queue
            clock = [number] * len(Queue)
            clock[other.queue] = other.number - 1
            found = history.conflict(access, clock)
            assert found is not None
            assert found.queue is other.queue
            assert found.number >= other.number
        history.enter(access, nothing)
        for at in range(start, start + size):
            if writes:
                writers[at], readers[at] = access, set()
            else:
                readers.setdefault(at, set()).add(access)


def test_forgotten_ranges_are_cut_out() -> None:
    history, nothing = History(), [0] * len(Queue)
    history.enter(Access(Queue.H2D, 1, "copy", 0, 100, writes=True), nothing)
    history.forget(40, 60)
    assert history.conflict(Access(Queue.D2H, 1, "copy", 40, 60, writes=True), nothing) is None
    for start, end in ((39, 41), (59, 61), (0, 100)):
        found = history.conflict(Access(Queue.D2H, 1, "copy", start, end, writes=False), nothing)
        assert found is not None
        assert (found.start, found.end) == (0, 100)


def test_a_read_of_the_whole_replaces_earlier_reads_of_parts() -> None:
    history, all_of_them = History(), [100] * len(Queue)
    for number in range(8):
        history.enter(Access(Queue.H2D, number, "copy", 10 * number, 10 * number + 10, writes=False), all_of_them)
    assert len(history) == 8
    history.enter(Access(Queue.COMPUTE, 1, "forward", 0, 80, writes=False), all_of_them)
    assert len(history) == 1


@pytest.mark.parametrize("queue", [each for each in Queue if each is not Queue.CPU])
def test_launching_comes_after_the_host_and_the_host_after_waiting(queue: Queue) -> None:
    device = CheckedDevice(check=True)
    memory, other = device.arena(64), device.host(64)
    device.declare_access(Queue.CPU, "fill", [], [other])
    device.copy(queue, memory, other)
    with pytest.raises(PlanMismatch, match=rf"CPU has waited for an event recorded on {queue.name}"):
        device.declare_access(Queue.CPU, "read", [memory], [])
    device.wait(Queue.CPU, device.record(queue))
    device.declare_access(Queue.CPU, "read", [memory], [])
    device.copy(queue, memory, other)
    device.synchronize()
    device.declare_access(Queue.CPU, "read", [memory], [other])


def test_waiting_takes_in_what_the_other_had_waited_for() -> None:
    device = CheckedDevice(check=True)
    memory, other = device.arena(64), device.host(64)
    device.copy(Queue.H2D, memory, other)
    device.wait(Queue.COMPUTE, device.record(Queue.H2D))
    device.wait(Queue.D2H, device.record(Queue.COMPUTE))
    device.copy(Queue.D2H, other, memory)
    device.wait(Queue.H2D, device.record(Queue.D2H))
    device.copy(Queue.H2D, memory, other)


@pytest.mark.parametrize(("waited", "forgotten"), [(Queue.D2H, Queue.COMPUTE), (Queue.COMPUTE, Queue.D2H)])
def test_a_write_waits_for_every_reader(waited: Queue, forgotten: Queue) -> None:
    device = CheckedDevice(check=True)
    memory, other = device.arena(64), device.host(64)
    device.declare_access(Queue.COMPUTE, "forward", [memory], [])
    device.copy(Queue.D2H, other, memory)
    device.wait(Queue.H2D, device.record(waited))
    with pytest.raises(
        PlanMismatch, match=f"perhaps still reads arena.*\n.*H2D has waited for an event recorded on {forgotten.name}"
    ):
        device.copy(Queue.H2D, memory, device.host(64))


def test_an_event_does_not_cover_what_is_launched_after_it() -> None:
    device = CheckedDevice(check=True)
    memory, other = device.arena(64), device.host(64)
    event = device.record(Queue.H2D)
    device.copy(Queue.H2D, memory, other)
    device.wait(Queue.COMPUTE, event)
    with pytest.raises(PlanMismatch, match="waited for H2D up to operation 0"):
        device.declare_access(Queue.COMPUTE, "forward", [memory], [])
