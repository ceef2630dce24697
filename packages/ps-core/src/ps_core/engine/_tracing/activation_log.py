"""Note which activations a pass offloads: in which moment each one is made, and in which moments it is taken back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ps_core._trace import Activation, Moment


class TracedActivations(NamedTuple):
    """The activations of a trace, and each moment's tuples of them."""

    activations: tuple[Activation, ...]
    makes: list[tuple[int, ...]]
    takes: list[tuple[int, ...]]


@dataclass(slots=True)
class ActivationLog:
    """The activations of one pass by name, which says how many were made before. Moments are numbers from 0 on."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes."""
    made: dict[str, int] = field(default_factory=dict)
    """The moment that was on when the offload was launched."""
    taken: dict[str, dict[int, None]] = field(default_factory=dict)
    """The moments that were on when backward asked for it."""

    def make(self, size_bytes: int, moment: int) -> str:
        """Note an offload in a moment; return the activation's name."""
        name = f"activation {len(self.made)}"
        self.sizes[name], self.made[name], self.taken[name] = size_bytes, moment, {}
        return name

    def note_taken(self, name: str, moment: int) -> None:
        """Note that an activation is copied back in a moment."""
        self.taken[name][moment] = None

    def in_trace(self, backward: Sequence[bool]) -> TracedActivations:
        """Return what a trace says of them; ``backward``: of each moment.

        Left out are those that are taken before backward's first moment has begun, or never: no plan can move them.
        """
        names = [
            name
            for name, moments in self.taken.items()
            if moments and not backward[self.made[name]] and all(backward[moment] for moment in moments)
        ]
        makes: list[tuple[int, ...]] = [()] * len(backward)
        takes = list(makes)
        for index, name in enumerate(names):
            makes[self.made[name]] += (index,)
            for moment in self.taken[name]:
                takes[moment] += (index,)
        return TracedActivations(tuple(Activation(name=name, bytes=self.sizes[name]) for name in names), makes, takes)

    def to_json(self) -> list[tuple[str, int, int, list[int]]]:
        """Return for each activation its name, bytes, the moment that made it, and those that take it back."""
        return [(name, self.sizes[name], self.made[name], list(self.taken[name])) for name in self.made]

    @classmethod
    def from_json(cls, rows: Iterable[tuple[str, int, int, list[int]]]) -> ActivationLog:
        """Return the log whose `to_json` this is."""
        log = cls()
        for name, size_bytes, made, taken in rows:
            log.sizes[name], log.made[name], log.taken[name] = size_bytes, made, dict.fromkeys(taken)
        return log

    @classmethod
    def of_trace(cls, activations: Sequence[Activation], moments: Iterable[tuple[int, Moment]]) -> ActivationLog:
        """Return the log that a trace comes from; ``moments``: each with its number here."""
        log = cls({each.name: each.bytes for each in activations}, {}, {each.name: {} for each in activations})
        for number, moment in moments:
            log.made.update({activations[index].name: number for index in moment.makes})
            for index in moment.takes:
                log.note_taken(activations[index].name, number)
        return log
