"""Choose what memory of CUDA devices travels by. All ranks decide at once, and NCCL is tried before it is used.

[Note: a trial]
Whether NCCL works is known once it has worked. It may refuse devices that look like any others, or deliver nothing. It
may wait for ever for a process that failed, in calls that nothing ends. So each rank connects its device and exchanges
a few bytes with every other. A thread does this that can be left behind. Then all ranks tell each other, in the host's
memory, how it went. What they do next depends on that alone, so all do the same. A rank that failed also leaves a mark
in the store, so nobody waits for it until the deadline. A rank that has ended is found by `Watchdog`.

[Note: one process]
It sends nothing, so its memory can stay on the device, and needs no library for that. NCCL would copy it, after taking
memory of the device. Through the host's memory it would be copied twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from ps_core._errors import InvalidInput
from ps_dist._abandonable_call import AbandonableCall
from ps_dist._collectives import TorchCollectives
from ps_dist._error_text import FAILED_ELSEWHERE, failed_ranks, name_ranks
from ps_dist._nccl import NcclMessages
from ps_dist._process_groups import ProcessGroups
from ps_dist._session import CollectiveSession

_BY_HOST = "what processes send from CUDA devices goes by way of the host's memory"
_SHOWN_BYTES = 320
"""Bytes of the error message of a rank."""


class TransportChoice:
    """The decision of one connection, made once; see `TorchCollectives.reach`."""

    def __init__(self, transport: str | None, groups: ProcessGroups, store: Any, deadline_s: float) -> None:
        """``transport``: what the user asked for. ``store``: torch's (any: its stubs have no base with all methods)."""
        self._transport, self._groups, self._store, self._deadline_s = transport, groups, store, deadline_s
        self._open = transport != "gloo"

    def __call__(self, joined: TorchCollectives, device: torch.device, why_by_host: str = "") -> str | None:
        """Decide on the first call; return why it is host memory, where the user did not ask for it.

        ``why_by_host``: why shared host memory is faster than NCCL, by this process's figures; empty: it is not.
        """
        if not self._open:
            return None
        self._open = False
        if self._transport is None and joined.mesh.size == 1:  # see [Note: one process]
            joined.use_nccl(joined.nccl_messages(None, device))
            return None
        faster = bool(why_by_host) and self._transport is None and joined.host_memory is not None
        rows = joined.all_values([*own_card(device), float(faster)], "which process has which card")
        if all(by_host for *_, by_host in rows):
            return f"{_BY_HOST}: {why_by_host}"
        why = why_not_nccl([card for *card, _ in rows]) or self._try(joined, device)
        if why is None:
            return None
        if self._transport == "nccl":
            raise InvalidInput(f"transport='nccl': {why}; or leave transport out")
        return f"{_BY_HOST}: {why}"

    def _try(self, joined: TorchCollectives, device: torch.device) -> str | None:
        """Use NCCL if it works on all ranks; else return why not, the same text on each. See [Note: a trial]."""
        try:
            messages, reports = joined.start(partial(self._run_trial, joined, device)).wait()
        except BaseException:
            self._groups.abort_nccl()
            raise
        if any(reports):
            self._groups.abort_nccl()
            return f"NCCL failed on {failed_ranks(reports)} (NCCL_DEBUG=INFO tells more)"
        joined.use_nccl(messages)
        return None

    def _run_trial(
        self, joined: TorchCollectives, device: torch.device, session: CollectiveSession
    ) -> tuple[NcclMessages | None, list[str]]:
        """Return messages that were tried, and what went wrong on each rank."""
        tag = session.enter("connecting the cards")
        mark = f"cards/{tag}"
        call = AbandonableCall(partial(self._connect, joined, device, tag))
        failure = call.wait(self._deadline_s, lambda: session.error or self._marked(mark))
        if session.error:
            return None, []
        if call.error is not None:  # a rank that waits too long does so with all others
            self._store.set(mark, "")
        rows = session.exchange(failure.encode()[:_SHOWN_BYTES].ljust(_SHOWN_BYTES), "how connecting the cards went")
        return call.result, [row.decode(errors="replace").strip() for row in rows]

    def _connect(self, joined: TorchCollectives, device: torch.device, tag: int) -> NcclMessages:
        group = self._groups.connect_nccl()  # before anything may fail here alone: torch numbers groups
        if device.type == "cuda":
            torch.cuda.set_device(device)  # this thread's
        messages = joined.nccl_messages(group, device)
        messages.warm_up(tag)
        return messages

    def _marked(self, mark: str) -> str:
        try:
            return FAILED_ELSEWHERE if self._store.check([mark]) else ""
        except RuntimeError:  # the store ended with the process that keeps it: `Watchdog` finds out
            return ""


def own_card(device: torch.device) -> list[float]:
    """Return whether PyTorch has NCCL here, and a number that tells this device from those of all computers."""
    name = str(torch.cuda.get_device_properties(device).uuid)
    number = int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "little")
    return [float(dist.is_nccl_available()), float(number)]


def why_not_nccl(rows: Sequence[Sequence[float]]) -> str | None:
    """Return why NCCL need not be tried, or None; ``rows``: each rank's `own_card`."""
    lacking = [rank for rank, (has, _) in enumerate(rows) if not has]
    if lacking:
        return f"torch was built without NCCL on {name_ranks(lacking)}"
    cards = [card for _, card in rows]
    sharing = [rank for rank, card in enumerate(cards) if cards.count(card) > 1]
    if sharing:
        return (
            f"{name_ranks(sharing)} share a card; expected one for each process (call torch.cuda.set_device before "
            "connect)"
        )
    return None
