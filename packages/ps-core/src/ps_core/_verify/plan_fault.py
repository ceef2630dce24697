"""Describe a rule that the checker of plans finds broken."""

from __future__ import annotations

from ps_core._errors import PlanMismatch


class Fault(PlanMismatch):
    """One broken rule: where, what was expected, what was found.

    ``others`` are the ids of further instructions that take part, such as one that this is not ordered against.
    """

    def __init__(self, expected: str, found: str, *, others: tuple[int, ...] = ()) -> None:
        super().__init__(expected, found)
        self.expected = expected
        self.found = found
        self.others = others
        self.segment = ""
        self.instr = -1
        self.what = ""

    def at(self, segment: str, instr: int = -1, what: str = "") -> Fault:
        """Add the place, unless that is known already."""
        self.segment = self.segment or segment
        if self.instr < 0:
            self.instr, self.what = instr, what
        return self

    def __str__(self) -> str:
        place = f"segment {self.segment}" if self.segment else "the plan"
        if self.instr >= 0:
            place += f", instruction {self.instr}" + (f" ({self.what})" if self.what else "")
        return f"{place}: expected {self.expected}; found {self.found}"
