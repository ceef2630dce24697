"""Why a wait ends: whom a rank names, and when, of all that it can know of the others."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_dist._collective_history import CollectiveHistory
from ps_dist._failure_reasons import Failure, Names, PeerState, Reason, Wait, reason_to_stop
from ps_dist._timeouts import AwakeClock, Timeouts

LIMITS = Timeouts(timeout_s=120)
NAMES = Names({rank: f"node{rank}" for rank in range(4)}, store_rank=0)


def history(*entries: str) -> CollectiveHistory:
    made = CollectiveHistory()
    for each in entries:
        made.add(each)
    return made


MINE = history("gather", "sum")
HERE = PeerState(number=2, doing="sum", tail=MINE.tail())
BEHIND = PeerState(number=1, tail=history("gather").tail())


def wait(
    waited_s: float = 5.0,
    peers: Mapping[int, PeerState] | None = None,
    **known: object,
) -> Wait:
    """Of rank 3."""
    found = {0: HERE, 1: HERE, 2: HERE} if peers is None else peers
    return Wait(rank=3, number=MINE.last.number, waited_s=waited_s, tail=MINE.tail(), peers=found, **known)  # type: ignore[arg-type]


def judged(given: Wait) -> str | None:
    found = reason_to_stop(given, LIMITS, NAMES)
    return None if found is None else found.text


@pytest.mark.parametrize("waited_s", [5.0, 60.0, 119.0])
def test_who_says_nothing_has_the_whole_timeout(waited_s: float) -> None:
    silent = PeerState(silent_s=waited_s)
    assert judged(wait(waited_s, {0: HERE, 1: silent, 2: BEHIND})) is None
    assert judged(wait(waited_s, {}, store_silent_s=waited_s)) is None


def test_who_is_silent_or_behind_when_the_time_is_over() -> None:
    silent = PeerState(silent_s=118.2, number=2, doing="sum")
    assert judged(wait(121, {0: HERE, 1: silent, 2: HERE})) == (
        "rank 3 on node3 waited over 120 s: rank 1 on node1 has not answered for 118 s"
    )
    assert judged(wait(121, {0: HERE, 1: HERE, 2: BEHIND})) == (
        "rank 3 on node3 waited over 120 s: rank 2 on node2 is at number 1 (between collectives)"
    )
    held_up = PeerState(number=1, doing="gather")
    assert "rank 0" not in str(judged(wait(121, {0: held_up, 1: silent, 2: HERE}))), "it waits itself"
    assert "rank 0" not in str(judged(wait(121, {0: held_up, 1: HERE, 2: BEHIND})))
    assert str(judged(wait(121, {0: held_up, 1: HERE, 2: HERE}))).endswith("rank 0 on node0 is at number 1 (gather)")
    assert str(judged(wait(121))).endswith("no other rank is behind")


def test_the_store_that_does_not_answer() -> None:
    late = "rank 3 on node3 waited over 120 s; {} has not answered for 90 s"
    known = wait(121, {0: HERE, 1: BEHIND, 2: PeerState(silent_s=90)}, store_silent_s=90.0)
    assert judged(known) == late.format("rank 0 on node0, which keeps the store,")
    by_torchrun = reason_to_stop(known, LIMITS, Names(NAMES.hosts, None))
    assert by_torchrun == Reason(late.format("the store that torchrun keeps"))


def test_what_ends_a_wait_at_once() -> None:
    broken = Failure("connection closed", 2)
    gone = "rank 2 on node2 ended or cannot be reached"
    assert judged(wait(0.1, failure=broken)) == f"{gone} (connection closed)"
    assert judged(wait(0.1, ended={2})) == gone
    assert (
        judged(wait(0.1, heard="rank 1 on node1 raised ValueError", failure=broken))
        == "rank 1 on node1 raised ValueError"
    )
    left = {0: HERE, 1: HERE, 2: PeerState(number=1, left=True)}
    assert judged(wait(0.1, left, failure=broken, ended={2})) == "rank 2 on node2 left the group"
    kept = "rank 0 on node0, which keeps the store, ended or cannot be reached (reset)"
    assert judged(wait(0.1, store_error="reset", ended={0})) == kept
    assert judged(wait(0.1, store_error="reset", ended={0, 2}, ended_before_store={0, 2})) == f"{kept}; {gone}"
    assert judged(wait(0.1, store_error="reset", ended={0, 2}, ended_before_store={0})) == kept, "rank 2 gave up"
    assert judged(wait(0.1, store_error="reset", failure=broken, ended_before_store=())) == kept
    parted = {0: HERE, 1: PeerState(tail=history("gather", "norm").tail()), 2: HERE}
    assert "rank 0 did sum, rank 1 did norm" in str(judged(wait(0.1, parted)))


def test_who_gave_up_because_the_store_is_silent_is_not_to_blame() -> None:
    known = {"ended": {2}, "failure": Failure("connection closed", 2), "failed_s": 6.0}
    store = "rank 0 on node0, which keeps the store, has not answered for {} s"
    for silent_s in (61, 119):
        assert judged(wait(silent_s, store_silent_s=silent_s, **known)) == (
            f"the transport of rank 3 on node3 failed (connection closed); {store.format(silent_s)}"
        ), "on a busy machine its clock may be this far ahead"
    assert judged(wait(59, store_silent_s=59.0, **known)) == (
        f"rank 2 on node2 ended or cannot be reached (connection closed); {store.format(59)}"
    ), "it ended long before the timeout"
    gone = f"rank 0 on node0 ended or cannot be reached; {store.format(3)}"
    assert judged(wait(3, store_silent_s=3.0, ended={0, 2})) == gone, "rank 2 may have lost the store first"
    assert judged(wait(3, ended={0, 2})) == "rank 0 on node0 and rank 2 on node2 ended or cannot be reached"


def test_who_left_after_the_collective_is_not_to_blame() -> None:
    left = {0: HERE, 1: HERE, 2: PeerState(number=2, left=True)}
    assert judged(wait(60, left, ended={2})) is None


def test_a_failure_that_names_nobody_gives_the_others_time_to_explain() -> None:
    peers = {0: HERE, 1: PeerState(silent_s=6), 2: HERE}
    known = {"failure": Failure("no memory")}
    assert judged(wait(5, peers, failed_s=4.9, **known)) is None
    assert judged(wait(6, peers, failed_s=5.1, **known)) == (
        "the transport of rank 3 on node3 failed (no memory); rank 1 on node1 has not answered for 6 s"
    )


states = st.builds(
    PeerState,
    silent_s=st.floats(0, 200),
    number=st.integers(0, 3),
    doing=st.sampled_from(["", "sum"]),
    left=st.booleans(),
)


@given(
    waited_s=st.floats(0, 200),
    peers=st.dictionaries(st.integers(0, 2), states),
    ended=st.sets(st.integers(0, 2)),
    broken=st.none() | st.integers(0, 2),
    store_silent_s=st.just(0.0) | st.floats(11, 200),
)
def test_whatever_is_known(
    waited_s: float, peers: dict[int, PeerState], ended: set[int], broken: int | None, store_silent_s: float
) -> None:
    """Only an end is evidence before the timeout, which no wait outlives; only ranks with a fault are named."""
    failure = None if broken is None else Failure("closed", broken)
    found = reason_to_stop(
        wait(waited_s, peers, ended=ended, failure=failure, store_silent_s=store_silent_s), LIMITS, NAMES
    )
    left = {rank for rank, peer in peers.items() if peer.left and (peer.doing or peer.number < 2)}
    gone = {rank for rank in ended if rank not in peers or not peers[rank].left} | (
        set() if broken is None else {broken}
    )
    if store_silent_s > LIMITS.timeout_s / 2:
        gone &= {0}
    assert (found is not None) == (bool(left or gone) or waited_s >= LIMITS.timeout_s)
    if found is None:
        return
    silent = {rank for rank, peer in peers.items() if peer.silent_s > LIMITS.answer_s}
    behind = {rank for rank, peer in peers.items() if peer.number < 2}
    named = {rank for rank in range(3) if f"rank {rank} on node{rank}" in found.text}
    faulty = left or gone or silent | behind
    assert named <= faulty | ({0} if store_silent_s else set())
    assert ("ended" in found.text) == bool(gone and not left)


@given(steps=st.lists(st.floats(0, 100), max_size=20))
def test_the_clock_stands_still_while_the_process_does(steps: list[float]) -> None:
    time_s = 7.0
    clock = AwakeClock(2.0, lambda: time_s)
    for step in steps:
        before, time_s = clock(), time_s + step
        assert clock() - before == pytest.approx(min(step, 2.0))
        assert clock() == clock()
