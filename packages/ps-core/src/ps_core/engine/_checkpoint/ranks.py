"""The processes that save or load one checkpoint together: what fails on one of them fails on all, with its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ps_core._errors import CheckpointDamaged, CheckpointMismatch, InvalidInput, RanksDiverged, TierFailure
from ps_core.engine._execution.components import Ranks

_ERRORS = (InvalidInput, TierFailure, CheckpointDamaged, CheckpointMismatch)
"""Those that are the same on every rank; another is `RanksDiverged` on those that did well."""
_WELL, _OTHER = -1.0, float(len(_ERRORS))
_TOLD_BYTES = 1000
"""Of a message."""


class CheckpointRanks:
    """This process among them; alone, mostly. Every method is called by all of them."""

    def __init__(self, together: Ranks | None) -> None:
        self._together = together
        self.shard, self.shards = (0, 1) if together is None else (together.rank, together.ranks)
        self.rank = self.shard if together is None else self.shard + together.copy * self.shards
        """Among all, copies of the model included."""

    @property
    def leads(self) -> bool:
        """Whether what only one of them does is this one's to do."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there are no others."""
        return self._together is None

    def size(self) -> int:
        """How many they are, copies of the model included."""
        return len(self.rows([0], "how many ranks", count=1))

    def agree(self, name: str, value: str) -> None:
        """`RanksDiverged` unless all have the same."""
        if self._together is not None:
            self._together.agree(name, value)

    def rows(self, values: Sequence[int], what: str, *, count: int, shards_only: bool = False) -> list[list[int]]:
        """What each one gives, up to ``count`` whole numbers."""
        if self._together is None:
            return [list(values)]
        filled = [*map(float, values), *([0.0] * (count - len(values)))]
        return [[int(each) for each in row] for row in self._together.all_values(filled, what, shards_only=shards_only)]

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """A stretch that each does by itself, without a word to the others; at its end all went well, or all raise."""
        try:
            yield
        except RanksDiverged:
            raise
        except BaseException as error:
            self._tell(what, error)
            raise
        self._tell(what, None)

    def _tell(self, what: str, error: BaseException | None) -> None:
        together = self._together
        if together is None:
            return
        kind = _WELL
        if error is not None:
            kind = next((float(i) for i, each in enumerate(_ERRORS) if isinstance(error, each)), _OTHER)
        kinds = [row[0] for row in together.all_values([kind], f"whether all did well: {what}")]
        failed = [rank for rank, each in enumerate(kinds) if each != _WELL]
        if not failed:
            return
        own = "" if error is None else str(error) if kind != _OTHER else f"{type(error).__name__}: {error}"
        shown = own.encode()[:_TOLD_BYTES].ljust(_TOLD_BYTES)
        texts = together.all_values([float(byte) for byte in shown], f"what went wrong: {what}")
        if error is not None and kind == _OTHER:
            return  # an interrupt, or a bug: raised here as it is
        first = self.rank if error is not None else failed[0]
        text = bytes(map(int, texts[first])).decode(errors="replace").strip()
        if kinds[first] == _OTHER:
            raise RanksDiverged(f"{what}: rank {first} failed: {text}") from error
        raise _ERRORS[int(kinds[first])](f"rank {first}: {text}") from error
