"""Connections between the processes of one computer, which tell each other where in shared memory something lies.

[Note: why Unix sockets]
Two processes tell each other little: where something lies, that it was read, or a few bytes. A Unix socket does that,
because a thread can wait for all other processes at once, without using a processor. The kernel orders what was
written to memory before a message with what is read after it. It also tells when a process has ended, however it ended.
A futex or an ``eventfd`` does none of this for several processes. The sockets have no name in any folder either.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ps_dist._error_text import first_line
from ps_dist._shared_memory import SharedHeap

_HELLO = struct.Struct("<IQ")
"""A rank and the bytes of its heap."""
_HEADER = struct.Struct("<B3xIQQ8x")
"""The kind of a message, its tag, and the first byte and the number of bytes in the sender's heap; 32 bytes."""
_HERE, _THERE, _READ, _FILE = 0, 1, 2, 3
"""Kinds: the bytes follow; they are in the sender's heap; the oldest one of the other direction was read; a file."""
MOST_BYTES_HERE = 4096
"""Bytes that are sent through the socket itself at most."""
_CHECK_S = 0.2
"""Seconds between two checks whether waiting for another process is in vain."""
_PEER_IDS = struct.Struct("3i")
"""What the kernel says of the process at the other end: its number, user and group."""


@dataclass(slots=True)
class Message:
    """One that came, and has not been read to its end."""

    tag: int
    memory: Tensor
    """Its bytes, where the sender has them; or that came with it."""
    waited_for: bool
    """True if the sender waits until it was read."""
    read_bytes: int = 0


class PeerConnection:
    """The connection to one other process of this computer, used by the thread of collectives alone."""

    def __init__(self, peer: int, unix_socket: socket.socket, memory: Tensor) -> None:
        """``memory``: the other process's heap."""
        self.peer, self._socket, self._memory = peer, unix_socket, memory
        self._inbox: deque[Message] = deque()
        self.unread = 0
        """Messages in this process's heap that the other one has not read yet."""
        self.broken = ""
        """Why nothing comes any more; empty while the connection stands."""
        self.files: deque[int] = deque()
        """Descriptors of received files, until some code takes one out. That code must close it."""
        unix_socket.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def head(self, tag: int) -> Message | None:
        """Return the oldest message if it has this tag; else None: wait for it."""
        return self._inbox[0] if self._inbox and self._inbox[0].tag == tag else None

    def pop(self) -> bool:
        """Forget the oldest message, which was read; return True if its sender waits until it is told so."""
        return self._inbox.popleft().waited_for

    def write(self, text: bytes, files: Sequence[int] = ()) -> bool:
        """Send a message; return False if the socket is full: try again when it can be written to."""
        try:
            if files:
                socket.send_fds(self._socket, [text], files, socket.MSG_NOSIGNAL)
            else:
                self._socket.send(text, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            self.broken = self.broken or first_line(error)
        return True

    def read(self) -> None:
        """Take in one message, if there is one."""
        try:
            text, files, _, _ = socket.recv_fds(self._socket, _HEADER.size + MOST_BYTES_HERE, 1)
        except (BlockingIOError, ConnectionResetError):  # after a reset comes what was sent before, and the end
            return
        except OSError as error:
            self.broken = self.broken or first_line(error)
            return
        if not text:
            self.broken = self.broken or "its connection was closed"
            return
        kind, tag, offset, size = _HEADER.unpack_from(text)
        if kind == _READ:
            self.unread -= 1
        elif kind == _FILE:
            self.files += files
        elif kind == _THERE:
            self._inbox.append(Message(tag, self._memory[offset : offset + size], waited_for=True))
        else:
            memory = torch.frombuffer(bytearray(text), dtype=torch.uint8, offset=_HEADER.size)
            self._inbox.append(Message(tag, memory, waited_for=False))

    def cut(self) -> None:
        """Break the connection, so that a thread which waits for the other process goes on; any thread may call it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, and drop the other process's memory."""
        self._socket.close()
        self._memory = self._memory.new_empty(0)


def message_here(tag: int, memory: Tensor) -> bytes:
    """Return a message that carries the bytes of this memory."""
    return _HEADER.pack(_HERE, tag, 0, memory.nbytes) + ctypes.string_at(memory.data_ptr(), memory.nbytes)


def message_there(tag: int, offset: int, size: int) -> bytes:
    """Return a message that says where in the sender's heap the bytes are."""
    return _HEADER.pack(_THERE, tag, offset, size)


READ_MESSAGE = _HEADER.pack(_READ, 0, 0, 0)
"""A message that says that the oldest one of the other direction was read."""
FILE_MESSAGE = _HEADER.pack(_FILE, 0, 0, 0)
"""A message with which a file comes."""


class PeerListener:
    """Waits for the other processes of this computer, which know its address."""

    def __init__(self, heap: SharedHeap, rank: int, ranks: int) -> None:
        """Listen; raises `OSError` or `AttributeError` where there are no such sockets."""
        self.heap, self._rank = heap, rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.address = secrets.token_bytes(16)
        self._socket.bind(b"\0ps_dist " + self.address.hex().encode())
        self._socket.listen(ranks)

    def connect(
        self, addresses: Mapping[int, bytes], give_up: Callable[[], bool], limit_s: float
    ) -> list[PeerConnection]:
        """Connect with every other rank; raise `OSError` if that fails, takes too long or ``give_up`` returns True."""
        found = []
        with ExitStack() as opened:
            for peer in sorted(addresses):
                if peer < self._rank:
                    unix_socket = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    unix_socket.settimeout(limit_s)
                    unix_socket.connect(b"\0ps_dist " + addresses[peer].hex().encode())
                else:
                    _wait_for(self._socket, give_up, limit_s)
                    unix_socket = opened.enter_context(self._socket.accept()[0])
                self._send_heap(unix_socket)
                found.append(self._receive_heap(unix_socket, give_up, limit_s))
            if {each.peer for each in found} != set(addresses):
                raise OSError(f"expected ranks {sorted(addresses)}, found {sorted(each.peer for each in found)}")
            opened.pop_all()
        return found

    def close(self) -> None:
        """Listen no more, and close the descriptor of the heap; mapped memory stays."""
        self._socket.close()
        self.heap.close_file()

    def _send_heap(self, unix_socket: socket.socket) -> None:
        """Send this process's heap to a process of the same user."""
        found = unix_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_IDS.size)
        user = _PEER_IDS.unpack(found)[1]
        if user != os.geteuid():
            raise OSError(f"a process of user {user} answered; expected user {os.geteuid()}")
        text = _HELLO.pack(self._rank, self.heap.size_bytes)
        socket.send_fds(unix_socket, [text], [self.heap.file])

    def _receive_heap(self, unix_socket: socket.socket, give_up: Callable[[], bool], limit_s: float) -> PeerConnection:
        """Map the heap that the other process sends."""
        _wait_for(unix_socket, give_up, limit_s)
        text, files, _, _ = socket.recv_fds(unix_socket, _HELLO.size, 1)
        if len(text) != _HELLO.size or len(files) != 1:
            raise ConnectionResetError("another process closed its connection before it sent its memory")
        peer, size = _HELLO.unpack(text)
        try:
            memory = torch.frombuffer(mmap.mmap(files[0], size), dtype=torch.uint8)
        finally:
            os.close(files[0])
        return PeerConnection(peer, unix_socket, memory)


def _wait_for(unix_socket: socket.socket, give_up: Callable[[], bool], limit_s: float) -> None:
    """Wait until there is something to read."""
    left_s, poll = limit_s, select.poll()  # which takes any descriptor; select.select takes none from 1,024 on
    poll.register(unix_socket, select.POLLIN)
    while not poll.poll(1000 * min(_CHECK_S, left_s)):
        left_s -= _CHECK_S
        if give_up() or left_s <= 0:
            raise TimeoutError(f"another process did not connect within {limit_s:g} s")
