"""Which slots an instruction touches."""

from __future__ import annotations

import pytest

from ps_core._extents import Extent, Kind
from ps_core._plan import (
    Accumulate,
    Cast,
    Copy,
    Decide,
    Gather,
    Norm,
    Op,
    ReduceScatter,
    Release,
    Reserve,
    Run,
    Shift,
    Step,
    slots_of,
)


@pytest.mark.parametrize(
    ("op", "slots"),
    [
        (Reserve(7, 0, 0, 128), (7,)),
        (Release(7), (7,)),
        (Shift(7, 0), (7,)),
        (Norm(0, 7), (7,)),
        (Copy(Extent(Kind.P16, 0), 0, 7, 8, 128), (7, 8)),
        (Cast(0, 7, 8), (7, 8)),
        (Accumulate(0, 7, 8, True), (7, 8)),
        (Gather(0, 7, 8, 0), (7, 8)),
        (ReduceScatter(0, 7, 8, 9, 0), (7, 8, 9)),
        (Run(0, (7, 9), 0), (7, 9)),
        (Step(0, (7, 8, 9)), (7, 8, 9)),
        (Decide(0), ()),
    ],
)
def test_what_an_instruction_touches(op: Op, slots: tuple[int, ...]) -> None:
    assert slots_of(op) == slots
