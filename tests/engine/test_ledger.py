"""Bytes in use and their peaks, against a list of everything that ever was in use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ps_core.engine._support.counters import ByteLedger

SIZES = st.integers(0, 100)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 1), SIZES),
        st.tuples(st.just("remove"), st.integers(0, 1), st.integers(0, 10)),
        st.tuples(st.just("moment"), st.booleans(), SIZES),
    ),
    max_size=30,
)


@given(events=EVENTS)
def test_peaks_are_the_most_that_ever_was(events: list[tuple[str, int, int]]) -> None:
    ledger, slots = ByteLedger(2), ([], [])
    seen: list[tuple[int, int]] = [(0, 0)]
    nonmodel = 0
    for what, where, size in events:
        if what == "add":
            slots[where].append(size)
            ledger.add(where, size)
        elif what == "remove" and size < len(slots[where]):
            ledger.remove(where, slots[where].pop(size))
        elif what == "moment":
            nonmodel = size
            ledger.end_moment(size)
        seen.append((sum(slots[0]) + nonmodel, sum(slots[1])))
    assert ledger.used_bytes == [sum(slots[0]), sum(slots[1])]
    assert ledger.peak_bytes == [max(row[0] for row in seen), max(row[1] for row in seen)]
    assert ledger.highest_nonmodel_bytes == max([0, *(size for what, _, size in events if what == "moment")])
