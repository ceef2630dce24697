"""Find what must stay in its place from one moment to the next, because its memory is still referenced.

[Note: ground]
A tier can be compacted only around extents that must not move. So before an extent is held it is put on *ground*: the
lowest address that those held already leave free. They have no gaps between them if the last one is released first, as
blocks recomputed in backward are. Then as much room can be made as if everything could move. If they are released in
another order, there are gaps. A plan is then surely found only with so many more bytes on the compute tier:
`gap_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ps_core._address_ranges import Span, lowest
from ps_core._extents import Extent, SegmentName
from ps_core._program import Program


class Holds:
    """The extents that are held in one segment's moments."""

    def __init__(self, program: Program, segment: SegmentName) -> None:
        self._rows = [
            frozenset(use.extent for use in program.uses(segment, visit) if use.held)
            for visit in program.segment_visits(segment)
        ]

    def into(self, moment: int) -> frozenset[Extent]:
        """Return the extents that may not have moved since the moment before this one."""
        return self._rows[moment] if moment < len(self._rows) else frozenset()

    def starting(self, moment: int) -> list[Extent]:
        """Return the extents held from this moment on, the one held longest first."""
        found = self.into(moment + 1) - self.into(moment)
        return sorted(found, key=lambda extent: (-self._until(moment + 1, extent), extent))

    def _until(self, moment: int, extent: Extent) -> int:
        while extent in self.into(moment):
            moment += 1
        return moment


def gap_bytes(program: Program) -> int:
    """Return the most bytes in gaps between held extents; see [Note: ground]."""
    segments = (name for name in program.segments if name in (SegmentName.MICRO_LAST, SegmentName.EVAL))
    return max((_gaps(program, name) for name in segments), default=0)


def _gaps(program: Program, segment: SegmentName) -> int:
    holds, most = Holds(program, segment), 0
    taken: dict[Extent, Span] = {}
    for place in range(len(program.segment_visits(segment))):
        taken = {extent: span for extent, span in taken.items() if extent in holds.into(place)}
        most = max(most, _between(taken.values()))
        for extent in holds.starting(place):
            size = program.bytes_of(extent)
            start = lowest(sorted(taken.values()), size)
            taken[extent] = start, start + size
        most = max(most, _between(taken.values()))
    return most


def _between(spans: Iterable[Span]) -> int:
    rows = list(spans)
    return max((end for _, end in rows), default=0) - sum(end - start for start, end in rows)
