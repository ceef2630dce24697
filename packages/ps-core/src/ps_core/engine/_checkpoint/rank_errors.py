"""Raise an error of one rank on all that save or load a checkpoint together, with that rank's number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ps_core._errors import CheckpointDamaged, CheckpointMismatch, InvalidInput, RanksDiverged, TierFailure
from ps_core.engine._execution.build_components import Ranks

_ERRORS = (InvalidInput, TierFailure, CheckpointDamaged, CheckpointMismatch)
"""Errors that are raised as they are on every rank; other errors become `RanksDiverged` on the other ranks."""
_WELL, _OTHER = -1.0, float(len(_ERRORS))
_TOLD_BYTES = 1000
"""Bytes of an error's message that the other ranks get."""


class OneRank:
    """Stand for the ranks of a process that has a model for itself: rank 0 of 1."""

    rank, ranks, copy, process, processes = 0, 1, 0, 0, 1

    def all_values(self, values: Sequence[float], what: str = "", *, shards_only: bool = False) -> list[list[float]]:
        """Return the values of this rank, which is the only one."""
        return [list(values)]

    def agree(self, name: str, value: str) -> None:
        """Do nothing: there is nothing to compare with."""


class CheckpointRanks:
    """Compare and exchange values among the ranks; all ranks call every method."""

    def __init__(self, together: Ranks | None) -> None:
        self._ranks: Ranks = OneRank() if together is None else together
        self.several = together is not None
        """True if there may be other ranks, so that values must be compared."""
        self.shard, self.shards = self._ranks.rank, self._ranks.ranks
        self.rank = self.shard + self._ranks.copy * self.shards
        """This rank among all, copies of the model included."""

    @property
    def leads(self) -> bool:
        """Return True on the one rank that does shared work, such as making the folder."""
        return self.rank == 0

    @property
    def size(self) -> int:
        """Return the number of ranks, copies of the model included."""
        return self._ranks.processes

    def agree(self, name: str, value: str) -> None:
        """Raise `RanksDiverged` unless all ranks give the same value."""
        self._ranks.agree(name, value)

    def rows(self, values: Sequence[int], what: str, *, count: int, shards_only: bool = False) -> list[list[int]]:
        """Return every rank's integers, up to ``count`` each, padded with zeros."""
        filled = [*map(float, values), *([0.0] * (count - len(values)))]
        return [[int(each) for each in row] for row in self._ranks.all_values(filled, what, shards_only=shards_only)]

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Run the block on each rank, without collectives; at its end either all ranks go on or all raise."""
        try:
            yield
        except RanksDiverged:
            raise
        except BaseException as error:
            self._compare(what, error)
            raise
        self._compare(what, None)

    def _compare(self, what: str, error: BaseException | None) -> None:
        """Raise the first error of any rank; a single process raises its own error unchanged."""
        kind = _WELL
        if error is not None:
            kind = next((float(i) for i, each in enumerate(_ERRORS) if isinstance(error, each)), _OTHER)
        kinds = [row[0] for row in self._ranks.all_values([kind], f"whether all did well: {what}")]
        failed = [rank for rank, each in enumerate(kinds) if each != _WELL]
        if not failed or not self.several:
            return
        own = "" if error is None else str(error) if kind != _OTHER else f"{type(error).__name__}: {error}"
        shown = own.encode()[:_TOLD_BYTES].ljust(_TOLD_BYTES)
        texts = self._ranks.all_values([float(byte) for byte in shown], f"what went wrong: {what}")
        if error is not None and kind == _OTHER:
            return  # an interrupt, or a bug: raised here as it is
        first = self.rank if error is not None else failed[0]
        text = bytes(map(int, texts[first])).decode(errors="replace").strip()
        if kinds[first] == _OTHER:
            raise RanksDiverged(f"{what}: rank {first} failed: {text}") from error
        raise _ERRORS[int(kinds[first])](f"rank {first}: {text}") from error
