"""One budget, several models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core import Budget, InvalidInput

SIZES = st.none() | st.integers(0, 2**60)
PARTS = st.integers(1, 10**6) | st.floats(1e-6, 1e6)


@given(SIZES, SIZES, st.lists(PARTS, min_size=2, max_size=5))
def test_parts_together_are_the_whole(device: int | None, host: int | None, parts: list[float]) -> None:
    whole = Budget(device=device, host=host)
    split = whole.split(*parts)
    assert len(split) == len(parts)
    for name in ("device", "host", "disk"):
        size = getattr(whole, name)
        sizes = [getattr(part, name) for part in split]
        if size is None:
            assert sizes == [None] * len(parts)
            continue
        assert size - len(parts) < sum(sizes) <= size
        for one, part in zip(sizes, parts, strict=True):
            assert one == pytest.approx(size * part / sum(parts), rel=1e-6, abs=1)


def test_texts_and_folders() -> None:
    student, teacher = Budget(device="4GiB", host="1GB", disk="10GB", disk_dir="scratch").split(3, 1)
    assert student == Budget(device=3 * 2**30, host=750_000_000, disk=7_500_000_000, disk_dir="scratch")
    assert teacher == Budget(device=2**30, host=250_000_000, disk=2_500_000_000, disk_dir="scratch")


@pytest.mark.parametrize("parts", [(), (1,), (1, 0), (1, -1), (1, float("inf")), (1, float("nan")), (1, "2")])
def test_parts_that_are_none(parts: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"split\(3, 1\)"):
        Budget(device="4GiB").split(*parts)
