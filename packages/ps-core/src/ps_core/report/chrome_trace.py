"""Write pieces of work as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ps_core._plan import Queue
from ps_core._simulate.clock import QUEUE_NAMES
from ps_core._simulate.work_pieces import Piece

_MICROSECONDS = 1e6


def chrome_trace(processes: Mapping[str, Sequence[Piece]]) -> dict[str, object]:
    """Return a trace for JSON, with a process for each name and a thread for each queue.

    The format is Google's "Trace Event Format": complete events (``X``) with begin and duration in microseconds.
    """
    events: list[dict[str, object]] = []
    for pid, (name, pieces) in enumerate(processes.items(), start=1):
        events.append(_named("process_name", pid, 0, name))
        events += [_named("thread_name", pid, queue, QUEUE_NAMES[queue]) for queue in _queues(pieces)]
        events += _events(pid, pieces)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "ts": 0, "pid": pid, "tid": int(tid), "args": {"name": name}}


def _queues(pieces: Sequence[Piece]) -> list[Queue]:
    return sorted({piece.queue for piece in pieces})


def _events(pid: int, pieces: Sequence[Piece]) -> Iterator[dict[str, object]]:
    for piece in pieces:
        begin, end = piece.begin_s * _MICROSECONDS, piece.end_s * _MICROSECONDS
        args: dict[str, object] = {"bytes": piece.bytes, "group": piece.group, "step": piece.step}
        tid = int(piece.queue)
        yield {"ph": "X", "name": piece.name, "ts": begin, "dur": end - begin, "pid": pid, "tid": tid, "args": args}
