"""Planning grows little faster than what is planned, counted rather than timed.

`benchmarks/test_planning.py` times the same cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from _growth import CASES, STEEPEST, WIDEST, exponent, streaming, work
from ps_core._plan import Plan
from ps_core._planner import arena, emit, walker

COUNTED = (
    (arena.Arena, "find"),
    (arena.Arena, "rate"),
    (arena._Runs, "add"),  # a piece looked at
    (walker.Walker, "holding"),
    (emit.Emitter, "emit"),
    (emit.Emitter, "last_access"),
)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    found: Counter[str] = Counter()

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return method(*args, **kwargs)

        return counting

    for owner, name in COUNTED:
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    between = arena.Arena._between

    def walked(arena: arena.Arena, begin: int, end: int) -> Any:
        for piece in between(arena, begin, end):
            found["pieces"] += 1
            yield piece

    monkeypatch.setattr(arena.Arena, "_between", walked)
    return found


def waits(plan: Plan) -> int:
    return sum(len(instr.after) for segment in plan.segments for instr in segment.instrs)


@pytest.mark.parametrize("ranks", [1, 8])
def test_operations_grow_with_accesses_and_transfers(counts: Counter[str], ranks: int) -> None:
    rows = []
    for case in CASES:
        problem = streaming(*case, ranks=ranks)
        counts.clear()
        plan = problem.plan()
        rows.append((work(problem.program, plan), counts.total() + waits(plan), dict(counts)))
    efforts = [row[0] for row in rows]
    assert max(efforts) >= WIDEST * min(efforts)
    assert all(done[name] for _, _, done in rows for _, name in COUNTED), "every counter counts"
    assert exponent([row[:2] for row in rows]) <= STEEPEST


def test_the_exponent_is_found() -> None:
    assert exponent([(x, 3 * x**1.5) for x in (1, 10, 400)]) == pytest.approx(1.5)
