"""The one rule for room on the compute tier: what fits, and who is asked for memory in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from _runs import stand_in
from ps_core._plan import Tier
from ps_core.engine._memory.make_room import has_room, make_room
from ps_core.engine._memory.tier_store import TierStore


def test_sources_are_asked_in_order_and_as_long_as_they_give() -> None:
    asked: list[str] = []
    free = 0

    def once() -> None:
        nonlocal free
        asked.append("once")
        free += 1

    def twice() -> bool:
        nonlocal free
        asked.append("twice")
        free += 1
        return asked.count("twice") < 2

    assert not make_room(lambda: free > 3, once, twice)
    assert asked == ["once", "twice", "twice"], "nothing is asked again that gave nothing, or says so"
    free = 0
    asked.clear()
    assert make_room(lambda: free > 1, once, twice, once)
    assert asked == ["once", "twice"], "nobody is asked for more than is wanted"
    assert make_room(lambda: True, once)
    assert len(asked) == 2


@given(taken=st.lists(st.booleans(), min_size=8, max_size=8), size=st.integers(0, 8), nonmodel=st.integers(0, 8))
def test_what_fits(taken: list[bool], size: int, nonmodel: int) -> None:
    """Eight units of 128 bytes, some of which slots have: by trying every address."""
    store = TierStore(stand_in(), (Tier("device", 1024), Tier("host", 1024)), poison=False)
    for unit, is_taken in enumerate(taken):
        if is_taken:
            store.reserve(0, 128, unit * 128)
    end = 8 - nonmodel
    fits = any(not any(taken[start : start + size]) for start in range(end - size + 1))
    for besides in range(9):
        expected = fits and sum(taken) + size + besides <= end
        assert has_room(store, [size * 128], nonmodel_bytes=nonmodel * 128, besides=besides * 128) == expected
    assert store.ledger.used_bytes == [128 * sum(taken), 0]
