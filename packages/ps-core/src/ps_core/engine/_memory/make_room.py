"""Decide whether slots fit on the compute tier, and ask other parts to free memory there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ps_core.engine._memory.tier_store import TierStore


def has_room(store: TierStore, sizes: Iterable[int], *, nonmodel_bytes: int, besides: int = 0) -> bool:
    """Return True if the compute tier has a free range for each size, below the non-model bytes.

    All sizes together, and ``besides`` more bytes, have to fit into the budget with what is in use. Each range is
    looked for by itself. So reserve slots of several sizes one after the other, and expect that one may fail.
    """
    line = store.tiers[0].capacity_bytes - nonmodel_bytes
    total = besides
    for size in sizes:
        if store.arena.lowest_free(size, line) is None:
            return False
        total += size
    return store.ledger.used_bytes[0] + total <= line


def make_room(fits: Callable[[], bool], *sources: Callable[[], object]) -> bool:
    """Ask sources for memory, in order, until ``fits`` is true; return whether it is.

    A source frees some memory, and is asked again as long as it returns something true.
    """
    for source in sources:
        while not fits():
            if not source():
                break
        else:
            return True
    return fits()
