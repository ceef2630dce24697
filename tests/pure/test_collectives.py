"""The protocol names what an implementation must have, and is content with any that does."""

from __future__ import annotations

from array import array

from ps_core._collectives import Collectives


class Alone:
    """A group of one, over standard-library arrays."""

    rank, ranks = 0, 1

    def all_gather(self, into: array[float], shard: array[float]) -> None:
        into[:] = shard

    def reduce_scatter(self, into: array[float], source: array[float]) -> None:
        into[:] = source

    def all_reduce_sum(self, value: float) -> float:
        return value

    def all_reduce_max(self, value: float) -> float:
        return value

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class Speechless:
    """Has a place, but says nothing to anyone."""

    rank, ranks = 0, 1


def gathered(collectives: Collectives[array[float]], shard: array[float]) -> array[float]:
    """As a caller would: knowing the protocol only."""
    whole = array("f", [0.0] * (len(shard) * collectives.ranks))
    collectives.all_gather(whole, shard)
    return whole


def test_any_arrays_will_do() -> None:
    assert gathered(Alone(), array("f", [1.0, 2.0])) == array("f", [1.0, 2.0])


def test_who_has_all_methods_is_one() -> None:
    assert isinstance(Alone(), Collectives)
    assert not isinstance(Speechless(), Collectives)
