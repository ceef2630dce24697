"""What memory of CUDA devices travels by: decided by all processes at once, and tried before it is trusted.

[Note: a trial]
That NCCL works is known once it has: it may refuse cards that look like any others, deliver nothing, or wait for ever
for a process that failed, in calls that nothing ends. So each process connects its card and exchanges a few bytes with
every other, in a thread that can be left behind. Then all tell each other, in the host's memory, how it went; what they
do next depends on that alone, so they all do the same. One that failed leaves a mark in the store, too, so that nobody
waits for it until the deadline. One that has ended is found as ever, see `Watchdog`.

[Note: one process]
It has nobody to send to, so its memory need not leave the card, and no library is needed for that. NCCL would copy it,
after taking memory of the card for itself; by way of the host, it would go down and up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ps_core._errors import InvalidInput
from ps_dist._attempt import Attempt
from ps_dist._bench import Bench
from ps_dist._collectives import TorchCollectives
from ps_dist._direct import CardWire
from ps_dist._roll import ranks_named

_WORDS_BYTES = 320
"""Of what went wrong on a rank."""
_ELSEWHERE = "it had failed on another rank"


class Cards(Protocol):
    """Who makes a group of NCCL's; `Groups`, but in tests."""

    def connect_cards(self) -> Any:
        """The group; it may also raise, or never come back."""

    def drop_cards(self) -> None:
        """Let go of it, if there is any."""


class Choice:
    """Of one connection."""

    def __init__(self, transport: str | None, cards: Cards, store: Any, deadline_s: float) -> None:
        """``transport``: what was asked for. ``store``: torch's (any: its stubs have no base with all methods)."""
        self._transport, self._cards, self._store, self._deadline_s = transport, cards, store, deadline_s
        self._open = transport != "gloo"

    def __call__(self, joined: TorchCollectives, where: torch.device) -> str | None:
        """See `TorchCollectives.reach`."""
        if not self._open:
            return None
        self._open = False
        if self._transport is None and joined.mesh.size == 1:  # see [Note: one process]
            joined.go_by(joined.card_wire(None, where))
            return None
        rows = joined.all_values(own_card(where), "which process has which card")
        why = hindrance(rows) or self._try(joined, where)
        if why is None:
            return None
        if self._transport == "nccl":
            raise InvalidInput(f"transport='nccl': {why}; or leave transport out")
        return f"what processes send from CUDA devices goes by way of the host's memory: {why}"

    def _try(self, joined: TorchCollectives, where: torch.device) -> str | None:
        """Why it did not work, in the same words everywhere; None: from now on it goes so. See [Note: a trial]."""
        made: list[CardWire] = []
        ends: list[str] = []
        try:
            joined.start(partial(self._job, joined, where, made, ends)).wait()
        except BaseException:
            self._cards.drop_cards()
            raise
        if any(ends):
            self._cards.drop_cards()
            return f"NCCL failed on {blamed(ends)} (NCCL_DEBUG=INFO tells more)"
        joined.go_by(made[0])
        return None

    def _job(
        self, joined: TorchCollectives, where: torch.device, made: list[CardWire], ends: list[str], bench: Bench
    ) -> None:
        tag = bench.enter("connecting the cards")
        mark = f"cards/{tag}"
        attempt = Attempt(partial(self._connect, joined, where, tag, made))
        words = attempt.within(self._deadline_s, lambda: bench.hopeless or self._marked(mark))
        if bench.hopeless:
            return
        if attempt.failed:  # who waits too long does so with all others
            self._store.set(mark, "")
        rows = bench.exchange(words.encode()[:_WORDS_BYTES].ljust(_WORDS_BYTES), "how connecting the cards went")
        ends += [row.decode(errors="replace").strip() for row in rows]

    def _connect(self, joined: TorchCollectives, where: torch.device, tag: int, made: list[CardWire]) -> None:
        group = self._cards.connect_cards()  # before anything may fail here alone: torch names groups by their number
        if where.type == "cuda":
            torch.cuda.set_device(where)  # this thread's
        wire = joined.card_wire(group, where)
        wire.greet(tag)
        made.append(wire)

    def _marked(self, mark: str) -> str:
        try:
            return _ELSEWHERE if self._store.check([mark]) else ""
        except RuntimeError:  # the store went with who keeps it: `Watchdog` finds out
            return ""


def own_card(where: torch.device) -> list[float]:
    """Whether PyTorch has NCCL here, and which card this is among all cards of all computers."""
    name = str(torch.cuda.get_device_properties(where).uuid)
    number = int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "little")
    return [float(dist.is_nccl_available()), float(number)]


def hindrance(rows: Sequence[Sequence[float]]) -> str | None:
    """Why NCCL need not be tried. A row a process: whether it has NCCL, and which card."""
    lacking = [rank for rank, (has, _) in enumerate(rows) if not has]
    if lacking:
        return f"torch was built without NCCL on {ranks_named(lacking)}"
    cards = [card for _, card in rows]
    sharing = [rank for rank, card in enumerate(cards) if cards.count(card) > 1]
    if sharing:
        return (
            f"{ranks_named(sharing)} share a card; expected one for each process (call torch.cuda.set_device before "
            "connect)"
        )
    return None


def blamed(ends: Sequence[str]) -> str:
    """Which ranks failed, and of what; a rank's end is empty where all was well."""
    failed = [(rank, words) for rank, words in enumerate(ends) if words]
    _, words = next((each for each in failed if each[1] != _ELSEWHERE), failed[0])
    return f"{ranks_named([rank for rank, each in failed if each == words])}: {words}"
