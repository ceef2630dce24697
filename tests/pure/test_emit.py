"""The waits an instruction is given: all it needs, none that others imply."""

from __future__ import annotations

from ps_core._plan import Queue, Release
from ps_core._planner.emit import Emitter

OP = Release(0)


def after(emitter):
    return [instr.after for instr in emitter.instrs]


def test_a_reader_waits_for_the_writer_and_a_writer_for_the_readers():
    out = Emitter()
    out.emit(Queue.H2D, OP, writes=(1,))
    out.emit(Queue.COMPUTE, OP, reads=(1,))
    out.emit(Queue.D2H, OP, reads=(1,))
    out.emit(Queue.H2D, OP, writes=(1,))
    assert after(out) == [(), (0,), (0,), (1, 2)]


def test_the_same_queue_and_what_others_imply_need_no_wait():
    out = Emitter()
    out.emit(Queue.H2D, OP, writes=(1,))
    out.emit(Queue.H2D, OP, reads=(1,))
    out.emit(Queue.COMPUTE, OP, reads=(1,))
    out.emit(Queue.D2H, OP, also=(2,))
    out.emit(Queue.D2H, OP, writes=(1,), also=(0, 2, 3, -1))
    assert after(out) == [(), (), (0,), (2,), (1,)]  # 1 is a reader on H2D that 2 did not wait for


def test_reading_and_writing_a_slot_waits_once_and_not_for_itself():
    out = Emitter()
    out.emit(Queue.COMPUTE, OP, writes=(1,))
    out.emit(Queue.CPU, OP, reads=(1,), writes=(1,))
    out.emit(Queue.COMPUTE, OP, reads=(1,))
    assert after(out) == [(), (0,), (1,)]


def test_what_touched_a_slot_last():
    out = Emitter()
    assert out.last_access(1) == -1
    assert out.last_queues(1) == set()
    out.emit(Queue.H2D, OP, writes=(1,))
    assert out.last_access(1) == 0
    out.emit(Queue.COMPUTE, OP, reads=(1,))
    out.emit(Queue.D2H, OP, reads=(1,))
    assert out.last_access(1) == 2
    assert out.last_queues(1) == {Queue.H2D, Queue.COMPUTE, Queue.D2H}
