"""What has to be the same on all processes from the start."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import torch

import ps_core
from ps_core._errors import RanksDiverged
from ps_dist._version import __version__

_LOOK_S = 0.02
_STAY_S = 5.0


def own_facts(*, ranks: int, replicate: int) -> dict[str, str]:
    """This process's."""
    return {
        "ps-core": ps_core.__version__,
        "ps-dist": __version__,
        "torch": torch.__version__,
        "the byte order": sys.byteorder,
        "the number of processes": str(ranks),
        "replicate": str(replicate),
    }


def compare_facts(store: Any, facts: Mapping[str, str], *, rank: int, ranks: int, timeout_s: float) -> None:
    """`RanksDiverged` unless every process comes in time, with the same facts.

    ``store``: torch's (any: its stubs have no base with all of these methods).
    """
    store.set(f"facts/{rank}", json.dumps(dict(facts)))
    deadline = monotonic() + timeout_s
    missing = [other for other in range(ranks) if other != rank]
    while missing:
        for other in [other for other in missing if store.check([f"facts/{other}"])]:
            found = _difference(rank, facts, other, json.loads(store.get(f"facts/{other}")))
            if found is not None:
                _let_read(store, rank, other)
                raise RanksDiverged(found)
            missing.remove(other)
        if missing and monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise RanksDiverged(f"rank {rank} of {ranks}: rank {names} did not come within {timeout_s:g} s")
        if missing:
            sleep(_LOOK_S)


def _difference(rank: int, mine: Mapping[str, str], other: int, theirs: Mapping[str, str]) -> str | None:
    for name in dict.fromkeys((*mine, *theirs)):
        if mine.get(name) != theirs.get(name):
            return (
                f"{name} must be the same on all ranks: rank {rank} has {mine.get(name)}, rank {other} has "
                f"{theirs.get(name)}; install and start the same everywhere"
            )
    return None


def _let_read(store: Any, rank: int, other: int) -> None:
    """Stay until the other process has seen it too: the store may end with this one."""
    store.set(f"told/{rank}", "")
    deadline = monotonic() + _STAY_S
    with suppress(RuntimeError):  # it has seen that we know, and is gone, with the store
        while not store.check([f"told/{other}"]) and monotonic() < deadline:
            sleep(_LOOK_S)
