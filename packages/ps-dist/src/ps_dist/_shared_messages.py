"""Messages between the processes of one computer: what is sent is read where its sender has it.

[Note: who may write when]
A rank says where in its heap the bytes are. It waits until every rank that needs them has read them. So a collective
ends on a rank when nobody reads that rank's memory any more. The engine writes to a shard, a gradient or a buffer only
before a collective on it begins, or after it has ended. So no rank reads a shard that is being stepped,
and no rank writes over what another one still reads. The tag of a message is the fingerprint of everything done so far
(see [Note: fingerprints]). It is the version of what is read: a message of another version is never read.

What lies outside the heap is copied into it first, piece by piece. A few bytes travel with the message itself.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from ps_dist._messages import Buffers, ConnectionBroken, PeerMessages, Read
from ps_dist._peer_connections import (
    FILE_MESSAGE,
    MOST_BYTES_HERE,
    READ_MESSAGE,
    Message,
    PeerConnection,
    message_here,
    message_there,
)
from ps_dist._shared_memory import SharedHeap

STAGING_BYTES = 1 << 20
"""Bytes of the heap for pieces of what lies outside it."""


class SharedMessages(PeerMessages):
    """One process's messages to the others of its computer. See [Note: who may write when]."""

    name = "shared"

    def __init__(self, rank: int, heap: SharedHeap, connections: Collection[PeerConnection]) -> None:
        """Use these connections to all other ranks."""
        super().__init__(None, rank)
        self.heap: SharedHeap = heap
        self._connections = {connection.peer: connection for connection in connections}
        self._staging: Tensor | None = None
        """Memory for one piece; made when it is first needed."""
        self._staged_for: Sequence[PeerConnection] = ()
        """Connections to the ranks that read the piece."""
        self._poll = select.poll()
        self._open = {connection.fileno(): connection for connection in connections}
        """Connections that stand, by descriptor."""
        for file in self._open:
            self._poll.register(file, select.POLLIN)

    def rooms(self, peers: Collection[int]) -> int:
        """Return 0: what comes is read where its sender has it."""
        return 0

    def exchange(self, operation: str, tag: int, sends: Buffers, receives: Buffers) -> None:
        """Send and receive pairs of a rank and a buffer; several buffers to one rank are of one size and kind."""
        wanted: dict[int, list[Tensor]] = {}
        for peer, buffer in receives:
            if buffer.numel():
                wanted.setdefault(peer, []).append(buffer.view(torch.uint8))
                self.received_bytes[operation] += buffer.nbytes
        reads = [
            _Reading([self._connections[peer]], sum(each.nbytes for each in buffers), _copier(buffers))
            for peer, buffers in wanted.items()
        ]
        self._transfer(tag, sends, reads)

    def exchange_and_read(
        self, operation: str, tag: int, sends: Buffers, peers: Sequence[int], room: Tensor, read: Read
    ) -> None:
        """Read in place what comes, piece by piece; see `PeerMessages.exchange_and_read`."""
        numel, kind, size = room.shape[1], room.dtype, room.dtype.itemsize

        def read_bytes(piece: slice, parts: list[Tensor]) -> None:
            read(slice(piece.start // size, piece.stop // size), [part.view(kind) for part in parts])

        reading = _Reading([self._connections[peer] for peer in peers], numel * size, read_bytes)
        self.received_bytes[operation] += numel * size * len(peers)
        self._transfer(tag, sends, [reading])

    def share_file(self, file: int) -> int:
        """Return a descriptor of rank 0's ``file``; all ranks call this."""
        if self._rank:
            first = self._connections[0]
            while not first.files:
                self._wait_for({first})
            return first.files.popleft()
        for connection in self._connections.values():
            self._send(connection, FILE_MESSAGE, [file])
        return file

    def cut(self, everyone: Sequence[int]) -> None:
        """Break all connections, so that a thread which waits for another process ends; none works afterwards."""
        for connection in self._connections.values():
            connection.cut()

    def close(self) -> None:
        """Close all connections; memory of this process's heap stays as long as it is used."""
        for connection in self._connections.values():
            connection.close()
        self._staging = None

    def _transfer(self, tag: int, sends: Buffers, reads: Sequence[_Reading]) -> None:
        """Send everything and read everything; no rank reads this one's memory afterwards."""
        outside = self._post(tag, sends)
        while True:
            for reading in reads:
                for connection in reading.advance(tag):
                    self._send(connection, READ_MESSAGE)
            while outside and not any(connection.unread for connection in self._staged_for):
                self._post_piece(tag, outside[0])
                if outside[0].sent_bytes == outside[0].memory.nbytes:
                    outside.popleft()
            if any(reading.can_advance(tag) for reading in reads):  # it came while something was sent
                continue
            late = {connection for reading in reads for connection in reading.missing(tag)}
            late |= {connection for connection in self._connections.values() if connection.unread}
            if not late:
                return
            self._wait_for(late)

    def _post(self, tag: int, sends: Buffers) -> deque[_Outside]:
        """Tell every rank what it can read at once; return what must be copied into the heap first."""
        outside: dict[tuple[int, int], _Outside] = {}
        for peer, buffer in sends:
            if not buffer.numel():
                continue
            connection, memory = self._connections[peer], buffer.view(torch.uint8)
            offset = self.heap.offset(memory)
            if memory.nbytes <= MOST_BYTES_HERE:
                self._send(connection, message_here(tag, memory))
            elif offset is not None:
                connection.unread += 1
                self._send(connection, message_there(tag, offset, memory.nbytes))
            else:  # a gather sends the same to several ranks
                outside.setdefault((memory.data_ptr(), memory.nbytes), _Outside(memory)).connections.append(connection)
        return deque(outside.values())

    def _post_piece(self, tag: int, outside: _Outside) -> None:
        """Copy the next piece into the heap, and tell every rank that needs it."""
        if self._staging is None:
            self._staging = self.heap.allocate(STAGING_BYTES)
        piece = outside.memory[outside.sent_bytes : outside.sent_bytes + STAGING_BYTES]
        staged = self._staging[: piece.nbytes].copy_(piece)
        outside.sent_bytes += piece.nbytes
        offset = self.heap.offset(staged)
        assert offset is not None, "it is in the heap"
        self._staged_for = outside.connections
        for connection in outside.connections:
            connection.unread += 1
            self._send(connection, message_there(tag, offset, staged.nbytes))

    def _send(self, connection: PeerConnection, text: bytes, files: Sequence[int] = ()) -> None:
        """Send a message. While the socket is full, take in what comes: the other rank may be sending too."""
        while not connection.write(text, files):
            self._poll.modify(connection.fileno(), select.POLLIN | select.POLLOUT)
            try:
                self._wait_for({connection})
            finally:
                if connection.fileno() in self._open:
                    self._poll.modify(connection.fileno(), select.POLLIN)

    def _wait_for(self, connections: Collection[PeerConnection]) -> None:
        """Wait until something comes from any rank; raise `ConnectionBroken` if one of ``connections`` has gone."""
        for connection in connections:
            if connection.broken:
                raise ConnectionBroken(connection.peer, connection.broken)
        for file, _ in self._poll.poll():
            connection = self._open[file]
            connection.read()
            if connection.broken:
                self._poll.unregister(file)
                del self._open[file]


class _Outside:
    """Memory outside the heap, on its way to one rank or several."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.sent_bytes = memory, 0
        self.connections: list[PeerConnection] = []


class _Reading:
    """Reads bytes of several ranks side by side. Without any rank, `advance` is over at once."""

    def __init__(
        self, connections: Sequence[PeerConnection], size: int, read: Callable[[slice, list[Tensor]], None]
    ) -> None:
        """``read`` is given bytes from first to last of ``size``, as they come: a slice, and each rank's part of it."""
        self._connections, self._size, self._read = connections, size, read
        self._done = 0

    def missing(self, tag: int) -> list[PeerConnection]:
        """Return the connections from which more must come before anything can be read."""
        if self._done == self._size:
            return []
        return [connection for connection in self._connections if connection.head(tag) is None]

    def can_advance(self, tag: int) -> bool:
        """Return True if something is there that was not read."""
        return self._done < self._size and not self.missing(tag)

    def advance(self, tag: int) -> list[PeerConnection]:
        """Read what is there; return the connections whose senders must be told so."""
        told = []
        while self.can_advance(tag):
            heads = [head for connection in self._connections if (head := connection.head(tag)) is not None]
            width = min([self._size - self._done, *(head.memory.nbytes - head.read_bytes for head in heads)])
            self._read(slice(self._done, self._done + width), [_next_bytes(head, width) for head in heads])
            self._done += width
            told += [each for each, head in zip(self._connections, heads, strict=True) if _is_over(each, head)]
        return told


def _next_bytes(message: Message, width: int) -> Tensor:
    part = message.memory[message.read_bytes : message.read_bytes + width]
    message.read_bytes += width
    return part


def _is_over(connection: PeerConnection, message: Message) -> bool:
    """Return True if the message was read to its end, and its sender must be told; it is forgotten then."""
    return message.read_bytes == message.memory.nbytes and connection.pop()


def _copier(buffers: Sequence[Tensor]) -> Callable[[slice, list[Tensor]], None]:
    """Return what copies bytes that come into buffers of one size, one after the other."""
    size = buffers[0].nbytes

    def copy(piece: slice, parts: list[Tensor]) -> None:
        place, start = divmod(piece.start, size)
        buffers[place][start : start + parts[0].nbytes].copy_(parts[0])

    return copy
