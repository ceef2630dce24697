"""The disk tier's file and its streams: any piece of any slot, in order, and what stays when the disk fails."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps_core import InvalidInput, TierFailure
from ps_core._plan import Queue
from ps_core.engine._devices.disk import file as _disk
from ps_core.engine._devices.disk.file import BLOCK_BYTES, DiskFile, FileExtent
from ps_core.engine._devices.disk.queues import DiskStreams


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DiskFile]:
    made = DiskFile(str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def streams(file: DiskFile) -> Iterator[DiskStreams]:
    made = DiskStreams(file)
    yield made
    made.close()


def numbers(size: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def ignore() -> None:
    """Nobody is told."""


# The file.


def test_nobody_else_may_read_it_and_it_has_no_name(tmp_path: Path) -> None:
    file = DiskFile(str(tmp_path))
    try:
        found = os.fstat(file._file)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_nlink == 0
        assert list(tmp_path.iterdir()) == []
        assert file.name.startswith(str(tmp_path))
        file.prepare(10 * BLOCK_BYTES)
        assert os.fstat(file._file).st_blocks * 512 >= 10 * BLOCK_BYTES
    finally:
        file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._file)


def test_a_directory_that_is_not_there_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"Budget.disk_dir: cannot make a file in .*nowhere.*No such file"):
        DiskFile(str(tmp_path / "nowhere"))


def test_without_direct_reads_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    file = DiskFile(str(tmp_path))
    assert not file.direct
    place, found = file.reserve(10_001), torch.empty(77, dtype=torch.uint8)
    file.write(place, 0, numbers(10_001))
    file.read(place, 5_000, found)
    assert torch.equal(found, numbers(10_001)[5_000:5_077])
    file.close()


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["reserve", "free", "write", "read"]), st.integers(0, 10**6), st.floats(0, 1)),
    max_size=40,
)


@settings(max_examples=40)
@given(actions=ACTIONS, shift=st.integers(0, 200), small=st.booleans())
def test_slots_keep_their_bytes_whatever_is_done_to_others(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, float]], shift: int, small: bool
) -> None:
    """Any range of any slot, from and to any address; and room is used again, in pieces if need be."""
    file, slots, most = DiskFile(str(tmp_path_factory.mktemp("disk"))), list[tuple[FileExtent, Tensor]](), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_disk, "_PIECE_BYTES", 2 * BLOCK_BYTES if small else 2**21)
        for seed, (action, number, part) in enumerate(actions):
            if action == "reserve":
                size = 1 + int(part * 30_000)
                place = file.reserve(size)
                assert sum(each for _, each in place.ranges) == -(-size // BLOCK_BYTES) * BLOCK_BYTES
                file.write(place, 0, numbers(size, seed))
                slots.append((place, numbers(size, seed)))
                most = max(most, sum(-(-each.bytes // BLOCK_BYTES) for each, _ in slots))
            elif slots and action == "free":
                file.free(slots.pop(number % len(slots))[0])
            elif slots:
                place, right = slots[number % len(slots)]
                start = number % place.bytes
                memory = numbers(shift + place.bytes - start, seed)[
                    shift : shift + 1 + int(part * (place.bytes - start - 1))
                ]
                if action == "write":
                    file.write(place, start, memory)
                    right[start : start + memory.numel()] = memory
                else:
                    file.read(place, start, memory)
                    assert torch.equal(memory, right[start : start + memory.numel()])
        for place, right in slots:
            found = torch.empty(place.bytes, dtype=torch.uint8)
            file.read(place, 0, found)
            assert torch.equal(found, right)
        assert file.bytes == most * BLOCK_BYTES
    file.close()


# The streams.


class InterruptedQueue:
    """A queue whose `put` is interrupted before it takes anything."""

    def __init__(self, jobs: Any) -> None:
        self.put_job = jobs.put

    def put(self, job: object) -> None:
        signal.raise_signal(signal.SIGINT)
        self.put_job(job)


def test_an_interrupt_as_a_write_is_launched_loses_nothing(file: DiskFile, streams: DiskStreams) -> None:
    """The interrupt waits until the thread has the write; the main thread would wait for a lost one for ever."""
    place, jobs = file.reserve(100_000), streams._jobs[Queue.DISK_W]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        streams._jobs[Queue.DISK_W] = InterruptedQueue(jobs)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            streams.write(place, 0, numbers(100_000))
    finally:
        streams._jobs[Queue.DISK_W] = jobs
        signal.signal(signal.SIGINT, before)
    job = streams._last[Queue.DISK_W]
    assert job is not None
    assert job.done.wait(60), "the thread was given the write"
    found = torch.zeros(100_000, dtype=torch.uint8)
    file.read(place, 0, found)
    assert torch.equal(found, numbers(100_000))


def test_reads_follow_the_writes_they_wait_for(file: DiskFile, streams: DiskStreams) -> None:
    places = [file.reserve(100_000) for _ in range(8)]
    found = [torch.zeros(100_000, dtype=torch.uint8) for _ in places]
    for turn, (place, target) in enumerate(zip(places, found, strict=True)):
        streams.write(place, 0, numbers(100_000, turn))
        streams.wait(Queue.DISK_R, streams.record(Queue.DISK_W))
        streams.read(target, place, 0, ignore)
    event = streams.record(Queue.DISK_R)
    event.block()
    assert event.done
    assert all(torch.equal(target, numbers(100_000, turn)) for turn, target in enumerate(found))


def test_what_waits_for_something_else_waits_on_the_streams_own_thread(file: DiskFile, streams: DiskStreams) -> None:
    place, found, gate = file.reserve(5000), torch.zeros(5000, dtype=torch.uint8), threading.Event()
    streams.write(place, 0, numbers(5000))
    streams.synchronize()
    streams.wait_for(Queue.DISK_R, gate.wait)
    streams.read(found, place, 0, ignore)
    event = streams.record(Queue.DISK_R)
    assert not event.done
    gate.set()
    event.block()
    assert torch.equal(found, numbers(5000))


def test_a_wait_that_fails_ends_the_streams(streams: DiskStreams, file: DiskFile) -> None:
    """Waiting for an event of a failed card raises; the disk's streams then end, so the host thread does not hang."""

    def fail() -> None:
        raise RuntimeError("the card failed")

    streams.wait_for(Queue.DISK_W, fail)
    streams.write(file.reserve(5000), 0, numbers(5000))
    event = streams.record(Queue.DISK_W)
    assert event.job is not None
    assert event.job.done.wait(20.0)
    with pytest.raises(TierFailure, match="RuntimeError: the card failed"):
        event.block()


def test_nothing_keeps_a_stream_that_nobody_wants(tmp_path: Path) -> None:
    file = DiskFile(str(tmp_path))
    streams = DiskStreams(file)
    streams.write(file.reserve(5000), 0, numbers(5000))
    threads, descriptor, gone = streams._threads, file._file, weakref.ref(file)
    del streams, file
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert gone() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# When the disk fails.


def full(after: int) -> Callable[..., int]:
    """Write so often, then no more."""
    real, left = os.pwritev, [after]

    def write(file: int, buffers: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, buffers, offset)

    return write


@pytest.mark.parametrize("after", [0, 1, 2])
def test_what_could_not_be_written_stays_in_memory(
    file: DiskFile, streams: DiskStreams, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The fourth slot is read into the memory that the first is written from, as a plan has it."""
    places, lost = [file.reserve(100_000) for _ in range(4)], list[str]()
    sources = [numbers(100_000, turn) for turn in range(3)]
    file.write(places[3], 0, numbers(100_000, 3))
    monkeypatch.setattr(os, "pwritev", full(after))
    for place, source in zip(places, sources, strict=False):
        streams.write(place, 0, source)
    streams.wait(Queue.DISK_R, streams.record(Queue.DISK_W))
    streams.read(sources[0], places[3], 0, lambda: lost.append("the read"))
    with pytest.raises(TierFailure) as caught:
        streams.record(Queue.DISK_R).block()
    assert lost == ["the read"]
    assert file.name in str(caught.value)
    assert "No space left on device" in str(caught.value)
    sources[0].fill_(0)  # whoever goes on may use the memory
    for turn, place in enumerate(places):
        found = torch.empty(100_000, dtype=torch.uint8)
        streams.read(found, place, 0, ignore)
        assert torch.equal(found, numbers(100_000, turn)), turn
        part = torch.empty(1000, dtype=torch.uint8)
        streams.read(part, place, 50_001, ignore)
        assert torch.equal(part, numbers(100_000, turn)[50_001:51_001]), turn
    with pytest.raises(TierFailure, match="No space left"):
        streams.write(places[0], 0, sources[1])


def test_a_short_write_is_gone_on_with_or_said(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    real, place, found = os.pwritev, file.reserve(3 * BLOCK_BYTES), torch.empty(3 * BLOCK_BYTES, dtype=torch.uint8)

    def one_block(descriptor: int, buffers: Any, offset: int) -> int:
        return real(descriptor, [memoryview(buffers[0])[:BLOCK_BYTES]], offset)

    monkeypatch.setattr(os, "pwritev", one_block)
    file.write(place, 0, numbers(3 * BLOCK_BYTES))
    file.read(place, 0, found)
    assert torch.equal(found, numbers(3 * BLOCK_BYTES))
    monkeypatch.setattr(os, "pwritev", lambda descriptor, buffers, offset: 0)
    with pytest.raises(TierFailure, match=r"cannot write 12,288 bytes at byte 0: a short write, of 0 bytes"):
        file.write(place, 0, numbers(3 * BLOCK_BYTES))


def cut(file: DiskFile, size: int) -> None:
    os.truncate(f"/proc/self/fd/{file._file}", size)


def test_a_truncated_file_is_said(file: DiskFile) -> None:
    place, size = file.reserve(3 * BLOCK_BYTES), os.fstat(file._file).st_size
    cut(file, BLOCK_BYTES)
    with pytest.raises(
        TierFailure, match=rf"of 12,288 bytes at byte 0 the file has 4,096 bytes, expected {size:,}: it w"
    ):
        file.read(place, 0, torch.empty(3 * BLOCK_BYTES, dtype=torch.uint8))


@pytest.mark.parametrize("last", [False, True])
def test_a_write_that_makes_a_truncated_file_longer_again_is_said(file: DiskFile, last: bool) -> None:
    """Behind the cut there is a hole, which would be read as zeros; also where the write is to the very last slot."""
    first, other = file.reserve(5 * BLOCK_BYTES), file.reserve(5 * BLOCK_BYTES)
    file.write(first, 0, numbers(5 * BLOCK_BYTES))
    cut(file, 2 * BLOCK_BYTES)
    with pytest.raises(TierFailure, match=r"after a write of 20,480 bytes at byte .* it was truncated"):
        file.write(other if last else first, 0, numbers(5 * BLOCK_BYTES))
    with pytest.raises(TierFailure, match="it was truncated"):
        file.read(first, 0, torch.empty(5 * BLOCK_BYTES, dtype=torch.uint8))
    with pytest.raises(TierFailure, match="it was truncated"):
        file.reserve(5 * BLOCK_BYTES)
    assert file.failure is not None


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_file_that_was_cut_and_made_as_long_again_is_said(file: DiskFile, kept: float) -> None:
    place, size = file.reserve(2**20), os.fstat(file._file).st_size
    file.write(place, 0, numbers(2**20))
    cut(file, int(kept * size))
    cut(file, size)
    with pytest.raises(TierFailure, match=rf"bytes on the disk, expected {size:,}: a part of it was cut out"):
        file.read(place, 0, torch.empty(2**20, dtype=torch.uint8))


def test_a_file_system_that_does_not_count_blocks_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some count them late, or not at all."""
    monkeypatch.setattr(os, "posix_fallocate", lambda file, start, size: os.ftruncate(file, start + size))
    file = DiskFile(str(tmp_path))
    place, found = file.reserve(2**20), torch.empty(2**20, dtype=torch.uint8)
    file.write(place, 0, numbers(2**20))
    file.read(place, 0, found)
    assert torch.equal(found, numbers(2**20))
    cut(file, BLOCK_BYTES)
    with pytest.raises(TierFailure, match="it was truncated"):
        file.read(place, 0, found)
    file.close()


def test_a_vanished_file_is_said(file: DiskFile, streams: DiskStreams) -> None:
    place = file.reserve(5000)
    replaced = os.dup(file._file)
    os.close(file._file)
    try:
        streams.write(place, 0, numbers(5000))
        with pytest.raises(TierFailure, match="Bad file descriptor"):
            streams.record(Queue.DISK_W).block()
    finally:
        os.dup2(replaced, file._file)
        os.close(replaced)


def test_no_room_shows_when_it_is_asked_for(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    place = file.reserve(5000)

    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(TierFailure, match=r"cannot allocate .* bytes more than the 8,192 it has: No space left"):
        file.reserve(10**6)
    file.write(place, 0, numbers(5000))  # what is there still works
    assert file.failure is None
