"""Compare what every rank must do alike between collectives, where the ranks meet next.

[Note: what ranks compare]
A rank applies to its own shard what the program sets, loads, writes, scales or forgets. If one rank does otherwise than
the others, the model's parts no longer belong together, and no rank would notice. So each notes what it does. The notes
are compared when a load or assignment is whole, before a state is read, before a step and as a pass begins. An
evaluation compares written values alone. Gradients change nothing in it, and without a plan one rank may evaluate while
the others do not. `RanksDiverged` says who did what. A rank without notes compares nothing. If others have some, its
next collective differs from theirs, which is found too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain, groupby, repeat

from ps_core._errors import RanksDiverged
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._parameters.state_transitions import GradientPlace
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives

_SHOWN = 2
"""Notes that a message tells in words."""


class RankComparison:
    """Notes of one rank, compared with the others'."""

    def __init__(self, together: AsyncCollectives) -> None:
        self._together = together
        self._wants_plan = False
        self.agreed_to_plan = False
        """True: a rank wanted that when the last step was compared."""
        self._wanted_free_bytes = 0
        """Bytes that this rank wants the next plan to leave free besides; it has not told the others."""
        self._agreed_free_bytes = 0
        """The most of these that any rank told since the last plan with more left free."""
        self._clear()

    def _clear(self) -> None:
        self._notes = blake2b(digest_size=6)
        self._count, self._shown = 0, list[str]()
        self._first = ""
        self.has_writes = False
        """True if values were written since the ranks last compared."""

    def before_write(self) -> None:
        """Meet the other ranks before values are written: until then one may be in a pass, and ask for the old ones."""
        if not self.has_writes:
            self._together.agree("what is done between passes", "values are written")
            self.has_writes = True

    def note(self, what: str, how: str) -> None:
        """Note something that this rank did."""
        self._notes.update(f"{what}: {how}\n".encode())
        self._count += 1
        self._first = self._first or what
        if len(self._shown) < _SHOWN:
            self._shown.append(f"{what}: {how}")

    def propose_plan(self, *, wanted: bool) -> None:
        """Tell the other ranks, with the next step, whether this one recorded a pass that is to be planned."""
        self._wants_plan = wanted

    def propose_free_bytes(self, size_bytes: int) -> None:
        """Tell the other ranks, with the next comparison, how much more the next plan is to leave free."""
        self._wanted_free_bytes = max(self._wanted_free_bytes, size_bytes)

    def compare_free_bytes(self, mine: float, what: str) -> list[float]:
        """Return a number of every rank; with it, ranks tell what `propose_free_bytes` noted."""
        rows = self._together.all_values([mine, float(self._wanted_free_bytes)], what)
        self._agree_on_free_bytes(row[1] for row in rows)
        return [row[0] for row in rows]

    def _agree_on_free_bytes(self, told: Iterable[float]) -> None:
        self._wanted_free_bytes, self._agreed_free_bytes = 0, max(self._agreed_free_bytes, *map(int, told))

    def take_free_bytes(self) -> int:
        """Return how much more the next plan is to leave free, the same on all ranks, and forget it."""
        found, self._agreed_free_bytes = self._agreed_free_bytes, 0
        return found

    def compare(self) -> None:
        """Raise `RanksDiverged` unless all ranks noted the same; without notes do nothing."""
        if self._count:
            first, text = self._first, self._text()
            self._clear()
            what = f"what was done between passes, first: {first}"
            if len(set(self.compare_free_bytes(_number(text), what))) > 1:
                self._together.agree(what, text)

    def compare_step(
        self,
        records: Sequence[ParamState],
        settings_of: SettingsOf,
        max_norm: float | None,
        loss_scale: float,
        told: Sequence[float],
    ) -> list[list[float]]:
        """Raise `RanksDiverged` unless all ranks noted the same, and step by the same numbers.

        Return what every rank ``told`` besides, which may differ.
        """
        neighbours = [list(run) for _, run in groupby(map(settings_of, records), key=id)]
        settings = [(run[0].values_by_name(), len(run)) for run in neighbours]  # which share an object
        items = {
            **{
                name: _runs(chain.from_iterable(repeat(row[name], count) for row, count in settings))
                for name in settings[0][0]
            },
            "max_grad_norm": str(max_norm),
            "the loss scale": str(loss_scale),
            "steps so far": _runs(record.steps for record in records),
            "requires_grad": _runs(record.parameter.requires_grad for record in records),
            "which parameters have gradients": _runs(record.gradient is not GradientPlace.NONE for record in records),
            "what was done between passes": self._text(),
        }
        self._clear()
        mine = [_number(repr(items)), float(self._wants_plan), float(self._wanted_free_bytes)]
        rows = self._together.all_values([*mine, *told], "what optimizer.step() goes by")
        self.agreed_to_plan = any(row[1] for row in rows)
        self._agree_on_free_bytes(row[2] for row in rows)
        if len({row[0] for row in rows}) == 1:
            return [row[3:] for row in rows]
        for name, value in items.items():
            self._together.agree(f"when optimizer.step() is called, {name}", value)
        raise RanksDiverged("what optimizer.step() goes by must be the same on all ranks")

    def _text(self) -> str:
        more = f", and {self._count - len(self._shown)} more" if self._count > len(self._shown) else ""
        return f"{'; '.join(self._shown)}{more} [{self._notes.hexdigest()}]" if self._count else "nothing"


def _number(text: str) -> float:
    """Return a hash of a text that a number of a message holds exactly."""
    return float(int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "little"))


def _runs(values: Iterable[object]) -> str:
    """Tell the values of all parameters, in their order."""
    found = [(value, len(list(run))) for value, run in groupby(values)]
    if len(found) == 1:
        return str(found[0][0])
    return ", ".join(f"{value} for {count}" for value, count in found)
