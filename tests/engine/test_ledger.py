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
        st.tuples(st.just("promoted"), st.just(0), SIZES),
    ),
    max_size=30,
)


@given(events=EVENTS)
def test_peaks_are_the_most_that_ever_was(events: list[tuple[str, int, int]]) -> None:
    ledger, slots = ByteLedger(2), ([], [])
    seen: list[tuple[int, int, int]] = [(0, 0, 0)]
    nonmodel = promoted = rise = 0
    for what, where, size in events:
        if what == "add":
            slots[where].append(size)
            ledger.add(where, size)
        elif what == "remove" and size < len(slots[where]):
            ledger.remove(where, slots[where].pop(size))
        elif what == "moment":
            rise = max(rise, size - nonmodel) if where else rise
            nonmodel = size
            ledger.end_moment(size, backward=bool(where))
        elif what == "promoted":
            slots[0].append(size)
            promoted += size
            ledger.note_promoted(size)
            ledger.add(0, size)
        seen.append((sum(slots[0]) + nonmodel, sum(slots[1]), sum(slots[0]) + nonmodel - promoted))
    assert ledger.used_bytes == [sum(slots[0]), sum(slots[1])]
    assert ledger.peak_bytes == [max(row[0] for row in seen), max(row[1] for row in seen)]
    assert ledger.peak_besides_bytes == max(row[2] for row in seen)
    assert ledger.highest_rise_bytes == rise
    assert ledger.highest_nonmodel_bytes == max([0, *(size for what, _, size in events if what == "moment")])
