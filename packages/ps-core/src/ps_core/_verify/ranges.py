"""Track who owns which addresses of a tier, and since when they are free."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TypeAlias

from ps_core._verify.order import Clock, Stamp
from ps_core._verify.plan_fault import Fault

NON_MODEL = -1
"""The owner of non-model data's addresses."""

Owner: TypeAlias = int | Stamp | None
"""A slot's number or `NON_MODEL`; the instruction that released the bytes; None: they had no owner yet."""


class Ranges:
    """The addresses of one tier, cut into pieces with one owner each."""

    def __init__(self, capacity_bytes: int) -> None:
        self._end = capacity_bytes
        self._starts = [0]
        self._owners: list[Owner] = [None]

    def check_free(self, start: int, end: int, clock: Clock, *, but: Owner = None) -> None:
        """Raise `Fault` unless the range is free, in every order, when the clock's owner starts; ``but`` may own it."""
        if start >= end:
            return
        if start < 0 or end > self._end:
            raise Fault(f"addresses below {self._end}", f"{start} to {end}")
        starts, owners = self._starts, self._owners
        for index in range(bisect_right(starts, start) - 1, bisect_left(starts, end)):
            owner = owners[index]
            if owner is None or owner == but:
                continue
            if isinstance(owner, int):
                who = "non-model data" if owner == NON_MODEL else f"slot {owner}"
                raise Fault(f"addresses {start} to {end} free", f"{who} at {starts[index]}")
            if not owner.before(clock):
                raise Fault(
                    f"addresses {start} to {end} free in every order",
                    f"instruction {owner.id}, which gives up those at {starts[index]}, not waited for",
                    others=(owner.id,),
                )

    def paint(self, start: int, end: int, owner: Owner) -> None:
        """Give the range to an owner."""
        if start >= end:
            return
        starts, owners = self._starts, self._owners
        first, stop = bisect_right(starts, start) - 1, bisect_left(starts, end)
        new_starts, new_owners = [start], [owner]
        if starts[first] < start:
            new_starts.insert(0, starts[first])
            new_owners.insert(0, owners[first])
        if end < (starts[stop] if stop < len(starts) else self._end):
            new_starts.append(end)
            new_owners.append(owners[stop - 1])
        starts[first:stop] = new_starts
        owners[first:stop] = new_owners
