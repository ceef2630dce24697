"""States of a parameter and of a chunk: the table, random events against an independent model, and the pure states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from ps_core import IllegalTransition
from ps_core._extents import Extent, Kind
from ps_core._states import Event, StateBook, Uses
from ps_core.engine._memory.chunk import Chunk, Slot
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.state_transitions import (
    TRANSITIONS,
    GradientPlace,
    ParamEvent,
    SlotContents,
    legal_events,
)

WEIGHT, GRADIENT, UNDEFINED = SlotContents
NONE, OWN, IN_SLOT, IN_SUM, ON_ITS_WAY = GradientPlace
TENSOR = torch.zeros(4)
METHODS: dict[ParamEvent, Callable[[ParamState], None]] = {
    ParamEvent.KEPT: lambda record: record.keep_gradient(TENSOR),
    ParamEvent.SUM_EXPECTED: ParamState.expect_sum,
    ParamEvent.OVERWRITTEN: ParamState.mark_overwritten,
    ParamEvent.SUMMED: ParamState.mark_summed,
    ParamEvent.SLOT_TAKEN: ParamState.mark_slot_taken,
    ParamEvent.REBUILT: ParamState.mark_rebuilt,
    ParamEvent.DISCARDED: ParamState.mark_discarded,
    ParamEvent.STEPPED: ParamState.mark_stepped,
}


def parameter(name: str = "block.weight") -> ParamState:
    made = nn.Parameter(torch.zeros(4))
    record = ParamState(0, name, made, made.shape, made.stride(), made.dtype, 4, True, (nn.Parameter, made.dtype))
    ParamGroup(0, Kind.P16, made.dtype, trainable=True).add(record)
    return record


def reached(*events: ParamEvent) -> ParamState:
    record = parameter()
    for event in events:
        METHODS[event](record)
    return record


def snapshot(record: ParamState) -> tuple[Any, ...]:
    return (
        record.contents,
        record.gradient,
        record.own_gradient,
        record.overwrite_pending,
        record.norm_part,
        record.steps,
        record.update_count,
        record.factor,
    )


def walks() -> Iterator[tuple[ParamEvent, ...]]:
    """A shortest way to every state that can be reached."""
    ways: dict[Any, tuple[ParamEvent, ...]] = {(WEIGHT, NONE): ()}
    waiting = [(WEIGHT, NONE)]
    while waiting:
        state = waiting.pop(0)
        yield ways[state]
        for event in legal_events(*state):
            after = TRANSITIONS[event, *state]
            if after not in ways:
                ways[after] = (*ways[state], event)
                waiting.append(after)


def test_what_can_be_reached() -> None:
    states = {(reached(*way).contents, reached(*way).gradient) for way in walks()}
    usual = {(contents, place) for contents in (WEIGHT, UNDEFINED) for place in (NONE, OWN, IN_SUM, ON_ITS_WAY)}
    assert states == usual | {(GRADIENT, IN_SLOT)}, "a gradient is in the slot exactly where the slot holds one"
    assert {(contents, place) for _, contents, place in TRANSITIONS} == states, "no row that nothing leads to"


@pytest.mark.parametrize("way", list(walks()), ids=lambda way: "-".join(way) or "start")
def test_every_event_in_every_state(way: tuple[ParamEvent, ...]) -> None:
    for event, method in METHODS.items():
        record = reached(*way)
        before = snapshot(record)
        if event in legal_events(record.contents, record.gradient):
            method(record)
            assert (record.contents, record.gradient) == TRANSITIONS[event, before[0], before[1]]
            assert (record.own_gradient is not None) == (record.gradient is OWN)
            continue
        with pytest.raises(IllegalTransition) as caught:
            method(record)
        assert snapshot(record) == before
        assert caught.value.subject == "block.weight"
        assert caught.value.state == f"({before[0].name}, {before[1].name})"
        assert caught.value.event == event
        assert set(caught.value.expected) == set(legal_events(record.contents, record.gradient))


def slot(tier: int) -> Slot:
    return Slot(tier, -1, 8, torch.zeros(8, dtype=torch.uint8))


class Machine(RuleBasedStateMachine):
    """A 16-bit weight on three tiers, with bytes of its own for each slot: what is current must be what was written."""

    @initialize()
    def begin(self) -> None:
        self.record, home = parameter(), slot(2)
        self.chunk = Chunk(Extent(Kind.P16, 0), 8, home, planned=True)
        self.held: dict[int, Slot] = {id(home): home}
        """Every slot that ever had a copy, registered or not."""
        self.bytes: dict[int, tuple[str, int]] = {}
        """What is in each slot: a kind of contents and the number of the write."""
        self.chunk.mark_written(home)
        self.steps = 0
        self.bytes[id(home)] = self.truth = ("weight", 0)

    # The chunk.

    @property
    def registered(self) -> list[Slot]:
        return [self.chunk.home, *self.chunk.copies.values()]

    def current(self, among: list[Slot]) -> bool:
        return any(self.bytes.get(id(each)) == self.truth for each in among)

    def attempt(self, change: Callable[[], object], *, legal: bool) -> None:
        chunk = self.chunk
        before = (chunk.home, dict(chunk.copies), chunk.version, [each.version for each in self.held.values()])
        if legal:
            change()
            return
        with pytest.raises(IllegalTransition, match=r"^p16 of group 0: .* in state \(the only current copy is on tier"):
            change()
        after = (chunk.home, dict(chunk.copies), chunk.version, [each.version for each in self.held.values()])
        assert after == before

    @rule(tier=st.integers(0, 2), register=st.booleans())
    def copy(self, tier: int, register: bool) -> None:
        target = slot(tier)
        self.held[id(target)] = target
        self.bytes[id(target)] = self.bytes[id(self.chunk.source())]
        if register:
            self.chunk.fill_copy(target)
            assert self.chunk.newest(tier) is not None
        else:
            self.chunk.fill(target)

    @rule(data=st.data())
    def add_copy(self, data: st.DataObject) -> None:
        added = data.draw(st.sampled_from(list(self.held.values())))
        if added is not self.chunk.home:
            after = [self.chunk.home, *({**self.chunk.copies, added.tier: added}).values()]
            self.attempt(lambda: self.chunk.add_copy(added), legal=self.current(after))

    @rule(tier=st.integers(0, 2))
    def drop_copy(self, tier: int) -> None:
        after = [each for each in self.registered if each is not self.chunk.copies.get(tier)]
        self.attempt(lambda: self.chunk.drop_copy(tier), legal=self.current(after))

    @rule(data=st.data())
    def rehome(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(list(self.held.values())))
        after = [target, *self.chunk.copies.values()]
        self.attempt(lambda: self.chunk.rehome(target), legal=self.current(after))

    @rule(data=st.data())
    def invalidate(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.registered))
        legal = self.current([each for each in self.registered if each is not chosen])
        legal = legal or self.bytes.get(id(chosen)) != self.truth
        self.attempt(lambda: self.chunk.invalidate(chosen), legal=legal)
        if legal:
            self.bytes[id(chosen)] = ("unusable", 0)

    # The parameter. Legality is told by what is where, not by the table.

    def write(self, what: str, tier: int) -> None:
        target = self.chunk.newest(tier) or self.chunk.source()
        self.chunk.mark_written(target)
        self.bytes[id(target)] = self.truth = (what, self.truth[1] + 1)

    def happen(self, event: ParamEvent, *, legal: bool) -> bool:
        before = snapshot(self.record)
        if legal:
            METHODS[event](self.record)
        else:
            with pytest.raises(IllegalTransition):
                METHODS[event](self.record)
            assert snapshot(self.record) == before
        return legal

    @property
    def in_slot(self) -> bool:
        return self.truth[0] == "gradient"

    @rule()
    def keep(self) -> None:
        legal = self.record.gradient not in (IN_SUM, ON_ITS_WAY)
        was_in_slot = self.in_slot
        if self.happen(ParamEvent.KEPT, legal=legal) and was_in_slot:
            self.write("anything", 0)

    @rule()
    def expect_sum(self) -> None:
        self.happen(ParamEvent.SUM_EXPECTED, legal=self.record.gradient is NONE)

    @rule(tier=st.integers(0, 2))
    def overwrite(self, tier: int) -> None:
        legal = self.record.gradient in (NONE, OWN, ON_ITS_WAY)
        if self.happen(ParamEvent.OVERWRITTEN, legal=legal):
            self.write("gradient", tier)

    @rule()
    def sum_up(self) -> None:
        was_in_slot = self.in_slot
        if self.happen(ParamEvent.SUMMED, legal=True) and was_in_slot:
            self.write("anything", 0)

    @rule(tier=st.integers(0, 2))
    def take_slot(self, tier: int) -> None:
        if self.happen(ParamEvent.SLOT_TAKEN, legal=not self.in_slot):
            self.write("anything", tier)

    @rule(tier=st.integers(0, 2))
    def rebuild(self, tier: int) -> None:
        if self.happen(ParamEvent.REBUILT, legal=not self.in_slot):
            self.write("weight", tier)

    @rule()
    def discard(self) -> None:
        was_in_slot = self.in_slot
        if self.happen(ParamEvent.DISCARDED, legal=True) and was_in_slot:
            self.write("anything", 0)

    @rule(tier=st.integers(0, 2))
    def step(self, tier: int) -> None:
        if self.happen(ParamEvent.STEPPED, legal=self.record.gradient in (OWN, IN_SLOT, IN_SUM)):
            self.steps += 1
            self.write("weight", tier)

    @invariant()
    def what_is_current_is_what_was_written(self) -> None:
        current = [each for each in self.registered if each.version == self.chunk.version]
        assert current, "at least one slot has the current version"
        assert all(self.bytes[id(each)] == self.truth for each in current)
        assert self.chunk.source().tier == min(each.tier for each in current)
        assert self.chunk.home_is_stale == (self.chunk.home not in current)
        for tier in range(3):
            newest = self.chunk.newest(tier)
            assert newest in current if newest is not None else all(each.tier != tier for each in current)

    @invariant()
    def the_state_says_what_the_slot_holds(self) -> None:
        record, what = self.record, self.truth[0]
        assert what == {WEIGHT: "weight", GRADIENT: "gradient", UNDEFINED: "anything"}[record.contents]
        assert (record.own_gradient is not None) == (record.gradient is OWN)
        assert record.steps == self.steps


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_last_current_copy_stays() -> None:
    home, copy = slot(1), slot(0)
    chunk = Chunk(Extent(Kind.M, 3), 8, home)
    chunk.mark_written(home)
    chunk.fill_copy(copy)
    chunk.mark_written(copy)
    with pytest.raises(IllegalTransition) as caught:
        chunk.drop_copy(0)
    assert caught.value.subject == "m of group 3"
    assert caught.value.event == "drop_copy"
    assert caught.value.state == "(the only current copy is on tier 0)"
    assert chunk.drop_copy(0, needed=False) is copy, "sums that nobody reads any more"
    assert not chunk.has_current_copy


def test_copies_of_a_gathered_chunk_may_all_go() -> None:
    chunk = Chunk(Extent(Kind.FULL, 0), 8, slot(-1), gathered=True)
    copy = slot(0)
    chunk.add_copy(copy)
    chunk.fill(copy)
    assert chunk.newest(0) is copy
    chunk.invalidate_gathered()
    assert chunk.newest(0) is None
    chunk.fill(copy)
    chunk.invalidate(copy)
    assert chunk.drop_copy(0) is copy
    assert not chunk.copies


# The pure states (`ps_core._states`) say when operators use a tensor; these, what is where. Both walk one iteration.

USES = [
    Uses(forward=1, payload_reads=1, gradients=1),
    Uses(forward=2, payload_reads=1, gradients=2),
    Uses(forward=2, payload_reads=2, gradients=2),
    Uses(forward=1, payload_reads=1, gradients=0),
]


def follow(record: ParamState, book: StateBook, event: Event) -> None:
    """What the engine does about an event that the pure states allowed."""
    if book.gradient_complete(0) and record.gradient is NONE and event is Event.POST_BACKWARD:
        record.keep_gradient(TENSOR, overwrite_pending=True)  # autograd gives the sum of all contributions at once
    if event is Event.POST_BACKWARD and record.gradient is OWN:
        if book.may_overwrite(0):
            record.mark_overwritten()
        elif not book._records[0].overwrites:
            record.mark_summed()
    if event is Event.POST_STEP:
        record.mark_stepped()
    if event in (Event.REBUILD, Event.PASS_DONE):
        record.mark_discarded()
        record.mark_rebuilt()


class BothTables(RuleBasedStateMachine):
    """Random iterations: each state allows a step, a discard and a read of the weight where the other does."""

    @initialize(uses=st.sampled_from(USES), overwrites=st.booleans())
    def begin(self, uses: Uses, overwrites: bool) -> None:
        self.uses, self.overwrites = uses, overwrites
        self.book = StateBook(["w"], [uses], overwrites=overwrites)
        self.book.apply(0, Event.ALLOCATE)
        self.record = parameter("w")

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        legal = [event for event in self.book.legal(0) if event not in (Event.ALLOCATE, Event.RELEASE)]
        event = data.draw(st.sampled_from(legal))
        flags = [(True, True), (True, False), (False, True)] if "BACKWARD" in event.name else [(True, False)]
        for reads, gradient in data.draw(st.permutations(flags)):
            try:
                self.book.apply(0, event, reads=reads, gradient=gradient)
            except IllegalTransition:
                continue
            follow(self.record, self.book, event)
            return

    @invariant()
    def they_agree(self) -> None:
        record, book = self.record, self.book
        legal = book.legal(0)
        in_step = Event.POST_STEP in legal
        may_step = ParamEvent.STEPPED in legal_events(record.contents, record.gradient)
        assert may_step == book.gradient_complete(0)
        if Event.PRE_STEP in legal or in_step:
            assert may_step
        reads_left = book._records[0].reads_left
        if reads_left and book._records[0].forward_done:
            assert record.contents is WEIGHT, "an operator still wants the weight"
        if Event.PRE_FORWARD in legal or Event.PASS_DONE in legal:
            assert record.contents is WEIGHT
        assert (record.contents is GRADIENT) == (self.overwrites and book.gradient_complete(0) and not reads_left)


TestBothTables = BothTables.TestCase
TestBothTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
