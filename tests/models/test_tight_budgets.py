"""Where a plan for tight memory is left half way, what it had lent out or summed up comes back whole."""

from __future__ import annotations

import pytest

from _reference import Settings, differences, plain
from _runs import HOST, managed, stand_in
from ps_core import Budget, Options
from test_under_the_engine import loop


@pytest.mark.parametrize("size", [300_000, 320_000])
def test_a_plan_that_is_left_with_sums_in_borrowed_places(size: int) -> None:
    settings = Settings(precision="fp32", options=Options(poison=True, group_bytes=8192))
    found = managed(loop("llama", "meta"), settings, stand_in, Budget(device=size, host=HOST))
    assert not differences(plain(loop("llama", "cpu"), settings), found)
    assert found.evictions > 0
    assert sum(each.divergences for each in found.statistics) > 0
