"""Protocol of what records when queues work; see `_profiling`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ps_core._plan import Instr, Queue
from ps_core._program import Extent, SegmentName

T = TypeVar("T")


class WorkRecorder(Protocol):
    """Records the times of work while a model is profiled; otherwise there is None in its place."""

    def record(self, queue: Queue, what: Instr | Extent | str, work: Callable[[], T], size_bytes: int = 0) -> T:
        """Call ``work``, which launches work on a queue, and record when the queue does that; return its result."""

    def begin_moment(self, name: str) -> None:
        """Record that the compute queue begins a moment; if one is on, do nothing."""

    def end_moment(self) -> None:
        """Record that the moment ends; without one that is on, do nothing."""

    def follow(self, plan: Any, segment: SegmentName) -> None:
        """Note that what comes is launched by a segment of a plan. (Any: the engine's `EnginePlan`.)"""

    def leave_plan(self) -> None:
        """Note that what comes follows no plan."""

    def stepped(self) -> None:
        """Note that an optimizer step ended."""
