"""Define the protocol of a recorder of when queues work; see `_profiling`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ps_core._extents import Extent, SegmentName
from ps_core._plan import Instr, Queue

T = TypeVar("T")


class WorkRecorder(Protocol):
    """Record the times of work while a model is profiled; otherwise there is None in its place."""

    def record(self, queue: Queue, what: Instr | Extent | str, work: Callable[[], T], size_bytes: int = 0) -> T:
        """Call ``work``, which launches work on a queue, and record when the queue does it; return its result."""

    def begin_moment(self, name: str) -> None:
        """Record that the compute queue begins a moment; do nothing within another one."""

    def end_moment(self) -> None:
        """Record that the moment ends; do nothing if none is open."""

    def follow(self, plan: Any, segment: SegmentName) -> None:
        """Note that a plan's segment launches the work from here on. (Any: the engine's `EnginePlan`.)"""

    def leave_plan(self) -> None:
        """Note that the work from here on follows no plan."""

    def stepped(self) -> None:
        """Note that an optimizer step ended."""
