"""Decide whether the ranks talk through shared memory, and connect them: all ranks decide alike.

Each rank tries, and tells the others how it went, by gloo. So no rank uses shared memory that another one cannot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import TypeVar

import torch

from ps_dist._computer_messages import ComputersMessages
from ps_dist._error_text import FAILED_ELSEWHERE, failed_ranks, first_line
from ps_dist._local_ranks import Location
from ps_dist._messages import PeerMessages
from ps_dist._peer_connections import PeerListener
from ps_dist._shared_memory import SharedHeap
from ps_dist._shared_messages import STAGING_BYTES, SharedMessages

_T = TypeVar("_T")
_ROW = Struct("200s16s")
"""Two texts that a rank sends the others: its error, or none; the address at which it listens."""
_TAG = 0
"""Of messages before the first collective."""
_NONE_TOGETHER = "no two ranks are known to run on one computer"
_MOST_CONNECT_S = 30.0
"""Seconds in which all ranks connect, if they do: all are there. Or half of the timeout, if that is less."""
_ERRORS = (OSError, AttributeError, ValueError, MemoryError)
"""What a system without shared memory raises: a call that fails or is missing, or a size that is refused."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What all ranks decided."""

    computers: Sequence[tuple[int, ...]]
    """The ranks of each computer."""
    messages: SharedMessages | ComputersMessages | None = None
    """Messages through shared memory, at least between ranks of one computer; None: there are none."""
    why_not: str = ""
    """Why there are none, where they were wanted and would have been of use."""

    def ranks_on_computer_of(self, rank: int) -> int:
        """Return how many ranks run on a rank's computer; all, if no two are known to run on one."""
        ranks = sum(map(len, self.computers))
        if len(self.computers) == ranks:
            return ranks
        return next(len(computer) for computer in self.computers if rank in computer)


def share_memory(
    control: PeerMessages,
    computers: Sequence[tuple[int, ...]],
    rank: int,
    give_up: Callable[[], bool],
    timeout_s: float,
) -> Sharing:
    """Connect the ranks of each computer through shared memory, if it works on all computers.

    ``control``: messages of all ranks; those to other computers go on by it. ``give_up`` returns True once waiting for
    another rank is in vain.
    """
    ranks = sum(map(len, computers))
    if ranks == 1:
        return Sharing(computers)
    if len(computers) == ranks:
        return Sharing(computers, why_not=_NONE_TOGETHER)
    here = next(computer for computer in computers if rank in computer)

    def tell(error: str, address: bytes = b"") -> list[tuple[str, bytes]]:
        own = torch.frombuffer(bytearray(_ROW.pack(error.encode(), address)), dtype=torch.uint8)
        everyone = own.new_empty(ranks * _ROW.size)
        control.gather("connecting", _TAG, range(ranks), everyone, own)
        rows = [_ROW.unpack(row.numpy().tobytes()) for row in everyone.view(ranks, -1)]
        return [(text.rstrip(b"\0").decode(errors="replace"), there) for text, there in rows]

    listener, error = _attempt(lambda: PeerListener(SharedHeap(), rank, len(here)))
    rows = tell(error, b"" if listener is None else listener.address)
    connections, why_not = None, _first_error(rows)
    if listener is not None:
        if not why_not:
            addresses = {peer: rows[peer][1] for peer in here if peer != rank}
            limit_s = min(timeout_s / 2, _MOST_CONNECT_S)
            connections, error = _attempt(partial(listener.connect, addresses, give_up, limit_s))
            why_not = _first_error(tell(error))
        listener.close()
    if listener is None or connections is None or why_not:
        for connection in connections or ():
            connection.close()
        return Sharing(computers, why_not=why_not)
    shared = SharedMessages(rank, listener.heap, connections)
    return Sharing(computers, shared if len(computers) == 1 else ComputersMessages(rank, computers, shared, control))


def ranks_by_computer(locations: Mapping[int, Location]) -> list[tuple[int, ...]]:
    """Return the ranks of each computer; a rank whose computer is not known has one of its own."""
    found: dict[object, tuple[int, ...]] = {}
    for rank, location in sorted(locations.items()):
        computer = location.machine or rank
        found[computer] = (*found.get(computer, ()), rank)
    return list(found.values())


def make_common_file(exchange: Callable[[bytes], list[bytes]], messages: SharedMessages, rank: int) -> int | None:
    """Return a descriptor of an empty file that rank 0 makes in memory; None on all ranks if it cannot.

    ``exchange`` returns the bytes of all ranks.
    """
    file = -1
    with suppress(*_ERRORS):
        if rank == 0:
            file = os.memfd_create("ps_dist")
    made = any(exchange(bytes([file >= 0]))[0])
    return messages.share_file(file) if made else None


def shared_memory_error() -> str | None:
    """Try shared memory between two threads of this process; return why it fails, or None if it works."""
    listeners: list[PeerListener] = []

    def send_some(rank: int) -> None:
        connections = listeners[rank].connect({1 - rank: listeners[1 - rank].address}, lambda: False, _MOST_CONNECT_S)
        messages = SharedMessages(rank, listeners[rank].heap, connections)
        some = messages.heap.allocate(STAGING_BYTES).fill_(rank)
        messages.exchange("trial", _TAG, [(1 - rank, some)], [(1 - rank, torch.empty_like(some))])
        messages.close()

    def send_all() -> None:
        listeners.extend(PeerListener(SharedHeap(), rank, 2) for rank in range(2))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(send_some, range(2)))

    _, error = _attempt(send_all)
    for listener in listeners:
        listener.close()
    return error or None


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, str]:
    """Return what the work returns, and an empty text; or None, and why this system cannot share memory."""
    try:
        return work(), ""
    except (ConnectionResetError, BrokenPipeError):
        return None, FAILED_ELSEWHERE  # another rank ended the connection
    except _ERRORS as error:
        return None, first_line(error)


def _first_error(rows: list[tuple[str, bytes]]) -> str:
    """Name the ranks that failed, with their error; empty: none did."""
    reports = [error for error, _ in rows]
    return f"shared memory failed on {failed_ranks(reports)}" if any(reports) else ""
