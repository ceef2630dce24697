"""Answer other ranks' questions for shards, outside of every collective.

A rank that does other than the plan may need weights while the others are in a collective. It cannot join that yet. So
the question goes to a thread of each of them, over a separate connection. Nobody's collectives wait for it.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread

import torch
from torch import Tensor

from ps_core._errors import RanksDiverged

_QUESTION, _SIZE = struct.Struct("<16sqqq"), struct.Struct("<q")
ADDRESS = struct.Struct("<16s48sH")
"""An address as ranks exchange it: a secret, the host, the port."""

_ELSEWHERE = "192.0.2.1"
"""An address of no computer, kept for documentation: the way to it is the way to other networks."""
_QUESTION_S = 5.0
"""Seconds that a connection has to send its question. Questions on other connections wait meanwhile."""
_REFUSES_S = 0.2
"""Seconds in which a computer that runs refuses a connection, if nobody listens there."""

Answer = Callable[[int, int], Tensor | None]
"""Returns the bytes of this rank's shard of a group after so many steps, in host memory; None: not yet."""


class ShardAnswers:
    """One process's thread that answers, and its questions to the others."""

    def __init__(self, reached_by: str, timeout_s: float, *, several_computers: bool = False) -> None:
        """``reached_by``: a host that every rank reaches; the address by which this process reaches it is used.

        On the host itself that may be an address within the computer, which ranks on others cannot reach. With
        ``several_computers`` the address towards other networks is used then, if there is one.
        """
        self._timeout_s, self._secret = timeout_s, secrets.token_bytes(16)
        self._answers: list[Answer] = []
        """By the number of the model that they are about."""
        self._others: Sequence[bytes] = ()
        self._host = _own_address(reached_by)
        if several_computers and is_within_computer(self._host):
            with suppress(OSError):
                self._host = _own_address(_ELSEWHERE)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.create_server((self._host, 0), family=family, backlog=128)
        self._closed = Event()
        self._thread = Thread(target=self._serve, name="ps_dist answers", daemon=True)
        self._thread.start()

    @property
    def address(self) -> bytes:
        """Return what other ranks need to ask."""
        return ADDRESS.pack(self._secret, self._host.encode(), self._socket.getsockname()[1])

    def set_addresses(self, addresses: Sequence[bytes]) -> None:
        """Ask at these addresses from now on, in order of rank."""
        self._others = addresses

    def add(self, answer: Answer) -> int:
        """Answer questions about one more model; return its number, the same on every rank."""
        self._answers.append(answer)
        return len(self._answers) - 1

    def ask(self, model: int, group: int, steps: int, *, me: int) -> list[Tensor]:
        """Return all ranks' shards of a group after so many steps, as bytes in order of rank."""
        found = []
        for rank, address in enumerate(self._others):
            mine = self._answers[model](group, steps) if rank == me else None
            found.append(self._ask(rank, address, (model, group, steps)) if mine is None else mine)
        return found

    def _ask(self, rank: int, address: bytes, question: tuple[int, int, int]) -> Tensor:
        secret, host, port = ADDRESS.unpack(address)
        where = host.rstrip(b"\0").decode(), port
        try:
            with socket.create_connection(where, self._timeout_s) as connection:
                connection.sendall(_QUESTION.pack(secret, *question))
                (size,) = _SIZE.unpack(_receive(connection, _SIZE.size))
                if not size:  # which `frombuffer` refuses
                    return torch.empty(0, dtype=torch.uint8, device="cpu")
                return torch.frombuffer(_receive(connection, size), dtype=torch.uint8)
        except (OSError, EOFError, struct.error) as error:
            raise RanksDiverged(f"rank {rank} does not answer for its shard of group {question[1]}: {error}") from error

    def close(self) -> None:
        """Answer no more."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(self._timeout_s)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection, suppress(Exception):  # who asks in vain says so, and others are still answered
                connection.settimeout(min(_QUESTION_S, self._timeout_s))
                secret, *question = _QUESTION.unpack(_receive(connection, _QUESTION.size))
                shard = self._answered(*question) if secrets.compare_digest(secret, self._secret) else None
                connection.settimeout(self._timeout_s)
                if shard is not None:
                    connection.sendall(_SIZE.pack(shard.numel()))
                    connection.sendall(shard.numpy().data)

    def _answered(self, model: int, group: int, steps: int) -> Tensor | None:
        """Return an answer once there is one; None: this process leaves."""
        while not self._closed.is_set():
            shard = self._answers[model](group, steps)
            if shard is not None:
                return shard
        return None


def refuses(address: bytes, *, several_computers: bool = False) -> bool:
    """Return True if nobody listens at the address: its process has ended. The kernel answers for one that is stopped.

    False also where that cannot be told, as of an address within a computer where there are several.
    """
    _, packed, port = ADDRESS.unpack(address)
    host = packed.rstrip(b"\0").decode()
    try:
        if several_computers and is_within_computer(host):
            return False
        socket.create_connection((host, port), _REFUSES_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def is_within_computer(host: str) -> bool:
    """Return True for an address that means the computer itself on every computer."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _receive(connection: socket.socket, size: int) -> bytearray:
    found, count = bytearray(size), 0
    while count < size:
        more = connection.recv_into(memoryview(found)[count:])
        if not more:
            raise EOFError(f"the connection ended after {count} of {size} bytes")
        count += more
    return found


def _own_address(reached_by: str) -> str:
    """Return the address of this computer from which it reaches a host; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(reached_by, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
