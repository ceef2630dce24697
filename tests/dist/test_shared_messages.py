"""Ranks that are threads and read each other's heaps: what comes, when a rank goes on, and what is given back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from _crew import exit_status
from ps_dist import Mesh
from ps_dist._messages import ConnectionBroken
from ps_dist._peer_connections import MOST_BYTES_HERE, PeerListener
from ps_dist._reduce import OrderedReduceScatter
from ps_dist._shared_memory import SharedHeap
from ps_dist._shared_messages import STAGING_BYTES, SharedMessages

PAGE = os.sysconf("SC_PAGE_SIZE")
WAIT_S = 60.0
SIZES = (0, 1, 31, MOST_BYTES_HERE // 4, MOST_BYTES_HERE // 4 + 1, 50_003, STAGING_BYTES // 4 * 2 + 7)
"""Elements of fp32: nothing, what goes with the message, what does not, and what is staged in pieces."""


class Ranks:
    """Threads, each with messages to all others."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.pool = ranks, ThreadPoolExecutor(ranks)
        heaps = [SharedHeap(64 << 20) for _ in range(ranks)]
        listeners = [PeerListener(heap, rank, ranks) for rank, heap in enumerate(heaps)]

        def join(rank: int) -> SharedMessages:
            addresses = {peer: each.address for peer, each in enumerate(listeners) if peer != rank}
            return SharedMessages(rank, heaps[rank], listeners[rank].connect(addresses, lambda: False, WAIT_S))

        self.messages: list[SharedMessages] = self.run(join)
        for listener in listeners:
            listener.close()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What ``work(rank)`` returns on each rank."""
        futures = [self.pool.submit(work, rank) for rank in range(self.ranks)]
        return [future.result(WAIT_S) for future in futures]

    def close(self) -> None:
        for each in self.messages:
            each.cut(())
        self.pool.shutdown()
        for each in self.messages:
            each.close()


@pytest.fixture(params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.close()


def drawn(rank: int, numel: int, kind: torch.dtype, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)).to(kind)


def placed(messages: SharedMessages, values: Tensor, *, shared: bool) -> Tensor:
    """The values in the heap, or elsewhere."""
    return messages.heap.allocate(values.nbytes).view(values.dtype).copy_(values) if shared else values.clone()


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_gathers_and_sums_of_any_memory(data: st.DataObject) -> None:
    """Each rank's memory is in its heap or not."""
    count = data.draw(st.sampled_from([2, 3]))
    everyone = RANKS.get(count) or RANKS.setdefault(count, Ranks(count))
    shared = [data.draw(st.booleans()) for _ in range(count)]
    numel, kind = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    seed = data.draw(st.integers(0, 99))

    def work(rank: int) -> tuple[Tensor, Tensor]:
        messages, mesh = everyone.messages[rank], Mesh(rank, count, 1)
        shard = placed(messages, drawn(rank, numel, kind, seed), shared=shared[rank])
        whole = torch.full((count * numel,), torch.nan, dtype=kind)
        messages.gather("all_gather", 2 * seed, range(count), whole, shard)
        total = OrderedReduceScatter(messages, mesh)
        assert total.scratch_bytes(numel, kind) == 0
        source = placed(messages, drawn(rank, count * numel, kind, seed), shared=shared[-1 - rank])
        into, nothing = torch.full((numel,), torch.nan), torch.empty(0, dtype=torch.uint8)
        total(2 * seed + 1, into, source, nothing)
        return whole, into

    found = everyone.run(work)
    wanted = torch.cat([drawn(rank, numel, kind, seed) for rank in range(count)])
    for rank, (whole, into) in enumerate(found):
        assert torch.equal(whole, wanted)
        parts = [drawn(giver, count * numel, kind, seed).view(count, numel)[rank].float() for giver in range(count)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert torch.equal(into, total), "in rank order and single precision"


RANKS: dict[int, Ranks] = {}
"""Made once for all examples."""


@pytest.fixture(scope="module", autouse=True)
def end_ranks() -> Iterator[None]:
    yield
    for each in RANKS.values():
        each.close()
    RANKS.clear()


def test_versions_follow_each_other(ranks: Ranks) -> None:
    """A shard is stepped as soon as its gather is over; nobody ever reads one that is stepped already, or not yet."""
    numel, steps = 40_000, 60

    def work(rank: int) -> None:
        messages = ranks.messages[rank]
        shard = messages.heap.allocate(4 * numel).view(torch.int32)
        whole = torch.empty(ranks.ranks * numel, dtype=torch.int32)
        for step in range(steps):
            shard.fill_(step * ranks.ranks + rank)
            messages.gather("all_gather", step, range(ranks.ranks), whole, shard)
            rows = whole.view(ranks.ranks, numel)
            for other, row in enumerate(rows):
                assert bool((row == step * ranks.ranks + other).all())
            shard.fill_(-1)

    ranks.run(work)


def test_a_file_of_rank_0_reaches_every_rank(ranks: Ranks) -> None:
    """The others take it in while they wait for bytes that come later."""

    def work(rank: int) -> bytes:
        messages = ranks.messages[rank]
        if rank == 0:
            file = os.memfd_create("test")
            os.write(file, b"bytes")
            messages.share_file(file)
            sleep(0.1)
        numbers = torch.empty(ranks.ranks, dtype=torch.uint8)
        messages.gather("all_gather", 1, range(ranks.ranks), numbers, torch.tensor([rank], dtype=torch.uint8))
        if rank:
            file = messages.share_file(-1)
        found = os.pread(file, 9, 0)
        os.close(file)
        return found

    assert ranks.run(work) == [b"bytes"] * ranks.ranks


@pytest.mark.parametrize("shared", [True, False])
def test_nobody_goes_on_while_another_one_reads(pair: Ranks, shared: bool) -> None:
    over, numel = Event(), 50_000
    kept: list[Tensor] = []

    def write(rank: int) -> None:
        source = placed(pair.messages[0], torch.ones(numel), shared=shared)
        pair.messages[0].exchange("sum", 1, [(1, source)], [])
        over.set()
        source.fill_(torch.nan)

    def read(piece: slice, parts: Sequence[Tensor]) -> None:
        assert not over.wait(0.2), "its memory is being read"
        kept.append(parts[0].clone())

    def reader(rank: int) -> None:
        pair.messages[1].exchange_and_read("sum", 1, [], [0], torch.empty(0, numel), read)

    pair.run(lambda rank: (write, reader)[rank](rank))
    assert torch.equal(torch.cat(kept), torch.ones(numel))
    assert over.is_set()


def test_what_is_of_another_version_is_never_read(pair: Ranks) -> None:
    """Both wait, until the connection is cut."""
    buffers = [torch.zeros(9000), torch.zeros(9000)]
    waiting = [
        pair.pool.submit(
            pair.messages[rank].gather, "all_gather", 7 + rank, range(2), torch.zeros(18_000), buffers[rank]
        )
        for rank in range(2)
    ]
    with pytest.raises(TimeoutError):
        waiting[0].result(0.5)
    assert not waiting[1].done()
    pair.messages[0].cut(())
    for rank, each in enumerate(waiting):
        with pytest.raises(ConnectionBroken) as caught:
            each.result(WAIT_S)
        assert caught.value.peer == 1 - rank


@pytest.mark.parametrize("sends", [True, False])
def test_a_rank_that_ends_is_named_while_others_go_on(sends: bool) -> None:
    """It ends before it read what the others sent, or before it sent what they need."""
    everyone = Ranks(3)
    try:
        everyone.messages[2].close()
        shard = everyone.messages[0].heap.allocate(40_000)

        def work(rank: int) -> None:
            messages, whole = everyone.messages[rank], torch.zeros(80_000, dtype=torch.uint8)
            if rank < 2:
                messages.gather("all_gather", 1, range(2), whole, shard if rank == 0 else shard + 1)
                assert whole[0] == 0
                assert whole[-1] == 1
            if rank == 0:
                other = [(2, shard)]
                messages.exchange("all_gather", 2, other if sends else [], [] if sends else other)

        with pytest.raises(ConnectionBroken) as caught:
            everyone.run(work)
        assert caught.value.peer == 2
    finally:
        everyone.close()


def test_many_small_messages_ahead_of_the_reader(pair: Ranks) -> None:
    """More than a socket holds, both ways at once: nobody waits for ever."""
    count = 400

    def work(rank: int) -> None:
        messages, mine = pair.messages[rank], torch.full((MOST_BYTES_HERE,), rank, dtype=torch.uint8)
        for index in range(count):
            messages.exchange("agreement", index, [(1 - rank, mine)], [])
        theirs = torch.full((MOST_BYTES_HERE,), 9, dtype=torch.uint8)
        for index in range(count):
            messages.exchange("agreement", index, [], [(1 - rank, theirs)])
            assert bool((theirs == 1 - rank).all())

    pair.run(work)


def test_what_comes_while_a_rank_answers_another_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone, first_read = Ranks(3), Event()
    reader = everyone.messages[0]
    send = reader._send

    def send_late(connection: Any, text: bytes) -> None:
        first_read.set()
        while reader._connections[2].head(5) is None and connection.peer == 1:
            reader._wait_for({reader._connections[2]})
        send(connection, text)

    monkeypatch.setattr(reader, "_send", send_late)

    def work(rank: int) -> Tensor | None:
        messages, received = everyone.messages[rank], torch.zeros(2, 9000, dtype=torch.uint8)
        if rank == 0:
            messages.exchange("gather", 5, [], [(2, received[1]), (1, received[0])])
            return received
        assert rank == 1 or first_read.wait(WAIT_S)
        messages.exchange("gather", 5, [(0, messages.heap.allocate(9000).fill_(rank))], [])
        return None

    try:
        received = everyone.run(work)[0]
        assert torch.equal(received, torch.tensor([[1], [2]], dtype=torch.uint8).expand(2, 9000))
    finally:
        everyone.close()


# The heap.


def pages(heap: SharedHeap) -> int:
    """Pages of memory that the heap takes."""
    return os.fstat(heap.file).st_blocks * 512 // PAGE


def test_memory_goes_back_with_its_last_view() -> None:
    heap = SharedHeap(100 * PAGE)
    first, second = heap.allocate(30 * PAGE), heap.allocate(3 * PAGE - 5)
    assert pages(heap) == 0, "nothing was written yet"
    first.fill_(1)
    second.fill_(2)
    assert pages(heap) == 33
    assert (heap.offset(first), heap.offset(second), heap.offset(second[7:])) == (0, 30 * PAGE, 30 * PAGE + 7)
    assert heap.offset(torch.empty(5)) is None
    part = first[:5]
    del first
    assert pages(heap) == 33, "a view is left"
    del part
    assert pages(heap) == 3
    again = heap.allocate(30 * PAGE)
    assert heap.offset(again) == 0
    assert not again.any()
    del again, second
    assert heap.offset(heap.allocate(100 * PAGE)) == 0, "free spans are one again"


def test_memory_outlives_its_heap_and_the_file() -> None:
    heap = SharedHeap(8 * PAGE)
    kept = heap.allocate(PAGE).fill_(3)
    heap.close_file()
    del heap
    assert bool((kept == 3).all())


def test_a_full_heap_says_so() -> None:
    heap = SharedHeap(4 * PAGE)
    kept = heap.allocate(3 * PAGE)
    with pytest.raises(MemoryError, match=f"has no {2 * PAGE} in one piece"):
        heap.allocate(PAGE + 1)
    assert heap.allocate(PAGE).numel() == PAGE
    assert kept.numel() == 3 * PAGE


def test_a_fork_has_no_memory_of_the_heap() -> None:
    heap = SharedHeap(4 * PAGE)
    child = os.fork()
    if not child:
        try:
            heap.allocate(PAGE)
        except MemoryError:
            os._exit(0)
        finally:  # whatever happened, the child goes no further
            os._exit(1)
    assert exit_status(child) == 0


def test_a_fork_that_drops_memory_does_not_take_it_from_its_owner() -> None:
    heap = SharedHeap(4 * PAGE)
    kept = heap.allocate(PAGE).fill_(3)
    child = os.fork()
    if not child:
        del kept
        os._exit(0)
    assert exit_status(child) == 0
    assert bool((kept == 3).all())
