"""Planning grows little faster than what is planned, counted rather than timed.

`benchmarks/test_planning.py` times the same cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from _growth import CASES, STEEPEST, WIDEST, exponent, streaming, work
from ps_core._command import largest_model
from ps_core._command.advice import advice
from ps_core._command.forecast import Training, bounds, forecast
from ps_core._plan import Plan
from ps_core._planner import arena, arrangement, emit, segment_walker
from ps_core._simulate.cluster import Cluster
from ps_core._simulate.machine import MACHINES
from ps_core._workloads.named_shapes import shape

GIB = 2**30

COUNTED = (
    (arena.Arena, "find"),
    (arena.Arena, "rate"),
    (arena._Runs, "add"),  # a piece looked at
    (segment_walker.Walker, "holding"),
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


# What a whole question costs, in instructions written down and bounds worked out: seconds are the machine's.


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Instructions, by who writes them: for moves that overlap, or one at a time."""
    found: Counter[str] = Counter()
    for owner in (emit.Emitter, arrangement.Arrangement):

        def counting(one: Any, *args: Any, do: Any = owner.emit, name: str = owner.__name__, **named: Any) -> Any:
            found[name] += 1
            return do(one, *args, **named)

        monkeypatch.setattr(owner, "emit", counting)
    return found


@pytest.mark.parametrize(
    ("gpus", "quick", "most"),
    [
        (16, False, 33_000),
        pytest.param(32, False, 62_000, marks=pytest.mark.slow),
        pytest.param(32, True, 51_000, marks=pytest.mark.slow),
        (4096, True, 17_000),
    ],
)
def test_a_search_looks_at_little(written: Counter[str], gpus: int, quick: bool, most: int) -> None:
    """175B with recomputed blocks' inputs kept and offloaded, and advice. On 32 GPUs it wrote 251,000 instructions
    when all ways of training were searched to the end. Once, on 16 GPUs, it wrote 63,000, and 71,000 that move
    extents one at a time, which is no answer where others overlap."""
    cluster = Cluster(gpus=gpus, nodes=gpus // 8, device_memory=40 * GIB, host_memory=1000 * GIB)
    training = Training(cluster=cluster, machine=MACHINES["a100-40"], offload_checkpoints=None, quick=quick)
    advice(shape("gpt-175b"), forecast(shape("gpt-175b"), training))
    assert 0 < written["Emitter"] <= most
    assert not written["Arrangement"]


@pytest.mark.slow
def test_the_largest_model_is_found_with_few_looks(written: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On eight GPUs. Once it took 510,000 instructions, 108 bounds and ten models that were planned."""
    asked: Counter[str] = Counter()

    def bounded(*args: Any) -> Any:
        asked["bounds"] += 1
        return bounds(*args)

    monkeypatch.setattr(largest_model, "bounds", bounded)
    cluster = Cluster(gpus=8, device_memory=40 * GIB, host_memory=1000 * GIB)
    training = Training(
        cluster=cluster, machine=MACHINES["a100-40"], offload_checkpoints=None, chunked_loss=True, quick=True
    )
    heard: list[str] = []
    found = largest_model.largest(training, tell=heard.append)
    assert found is not None
    assert found.shape.parameters > 85e9
    assert heard[-1].endswith(f"; best so far: {found.shape.name}")
    assert all(line.startswith("trying gpt-") for line in heard)
    assert 0 < len(heard) <= 5
    assert 0 < asked["bounds"] <= 70
    assert 0 < written.total() <= 125_000


def test_what_no_rate_allows_is_not_planned(written: Counter[str]) -> None:
    training = Training(
        cluster=Cluster(device_memory=40 * GIB, host_memory=1000 * GIB), machine=MACHINES["a100-40"], quick=True
    )
    with pytest.raises(largest_model.TooFast):
        largest_model.largest(training, min_tflops=500)
    assert not written
