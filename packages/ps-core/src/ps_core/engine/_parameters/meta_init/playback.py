"""Carry out what is on a tape, tensor by tensor, with the random numbers that the original order gives.

See [Note: the tape] in `tape`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ps_core.engine._parameters.meta_init.tape_entries import TapedCall, TapedCalls, ViewSpec


class TapePlayer:
    """Compute tensors from the calls on a tape."""

    def __init__(self, tape: TapedCalls) -> None:
        self.position = 0
        """Draws of calls before this one have been made."""
        self._tape = tape
        self._users: dict[int, int] | None = None
        """How often each call's draw will still be asked for; None: unknown."""
        self._kept: dict[int, Tensor] = {}
        """The generator's state before each draw that may be asked for later, or again."""

    def expect(self, places: Iterable[ViewSpec]) -> None:
        """Announce the tensors that are asked for from now on, each once; generator states of others are dropped."""
        self._users = defaultdict(int)
        for place in places:
            for index in self._tape.matter(place.memory):
                self._users[index] += 1
        self._kept = {index: state for index, state in self._kept.items() if self._users[index]}

    def value(self, place: ViewSpec) -> Tensor:
        """Return a tensor with real memory, filled by the calls that its contents depend on."""
        memories: dict[int, torch.UntypedStorage] = {}
        for index in self._tape.matter(place.memory):
            note = self._tape.notes[index]
            if note.random:
                self._draw_in_turn(index, note, memories)
            else:
                self._run(note, memories)
        return place.on(self._memory(place, memories))

    def rewind(self, position: int) -> None:
        """Go back to an earlier ``position``: undo what was recorded since then."""
        self.position = position

    def finish(self) -> None:
        """Set the generators to their state after all recorded draws in order."""
        self._pass_over(len(self._tape.notes))

    def _draw_in_turn(self, index: int, note: TapedCall, memories: dict[int, torch.UntypedStorage]) -> None:
        generator = _generator(note)
        if index >= self.position:
            self._pass_over(index)
            self._keep(index, note)
            self._run(note, memories)
            self.position = index + 1
        else:
            now = generator.get_state()
            generator.set_state(self._kept[index])
            self._run(note, memories)
            generator.set_state(now)
        if self._users is not None:
            self._users[index] -= 1
            if not self._users[index]:
                del self._kept[index]

    def _keep(self, index: int, note: TapedCall) -> None:
        if self._users is None or self._users[index]:
            self._kept[index] = _generator(note).get_state()

    def _pass_over(self, end: int) -> None:
        for index in range(self.position, end):
            note = self._tape.notes[index]
            if note.random:
                self._keep(index, note)
                _throw_away(note)
        self.position = max(self.position, end)

    def _run(self, note: TapedCall, memories: dict[int, torch.UntypedStorage]) -> None:
        def real(place: ViewSpec) -> Tensor:
            return place.on(self._memory(place, memories))

        result = note.func(*tree_map_only(ViewSpec, real, note.args), **tree_map_only(ViewSpec, real, note.kwargs))
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)] if note.makes else []
        for place, each in zip(note.makes, made, strict=True):
            if (each.stride(), each.storage_offset()) != (place.stride, place.offset):
                each = torch.empty_strided(place.size, place.stride, dtype=place.dtype, device="cpu").copy_(each)
            memories[place.memory] = each.untyped_storage()

    def _memory(self, place: ViewSpec, memories: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        if place.memory not in memories:
            captured = self._tape.captured.get(place.memory)
            if captured is None:
                captured = torch.empty(place.memory_bytes, dtype=torch.uint8, device="cpu")
            else:
                captured = captured.clone()
            memories[place.memory] = captured.untyped_storage()
        return memories[place.memory]


def _throw_away(note: TapedCall) -> None:
    """Make a draw whose result is not used, to advance the generator."""
    written = {place.memory for place in note.writes}

    def scratch(place: ViewSpec) -> Tensor:
        like = torch.empty_strided(place.size, place.stride, dtype=place.dtype, device="cpu")
        # Values do not change how many numbers are drawn. One half is valid as a mean and as a probability.
        return like if place.memory in written else like.fill_(0.5)

    note.func(*tree_map_only(ViewSpec, scratch, note.args), **tree_map_only(ViewSpec, scratch, note.kwargs))


def _generator(note: TapedCall) -> torch.Generator:
    given = note.kwargs.get("generator")
    return torch.default_generator if given is None else given
