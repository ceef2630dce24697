"""The tensor state machine: its table, its counts, and random event orders against an independent model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_core._errors import IllegalTransition, InvalidInput
from ps_core._states import (
    TRANSITIONS,
    ChunkState,
    Event,
    StateBook,
    TensorState,
    Uses,
    chunk_state,
    count_uses,
)
from ps_core._trace import Activation, Moment, Phase, Tensor, Trace

E, S = Event, TensorState


def book(*uses: Uses, overwrites: bool = True) -> StateBook:
    made = StateBook([f"t{index}" for index in range(len(uses))], uses, overwrites=overwrites)
    for index in range(len(uses)):
        made.apply(index, E.ALLOCATE)
    return made


def forward(made: StateBook, tensor: int = 0) -> None:
    made.apply(tensor, E.PRE_FORWARD)
    made.apply(tensor, E.POST_FORWARD)


def backward(made: StateBook, tensor: int = 0, *, reads: bool = True, gradient: bool = True) -> None:
    made.apply(tensor, E.PRE_BACKWARD, reads=reads, gradient=gradient)
    made.apply(tensor, E.POST_BACKWARD, reads=reads, gradient=gradient)


ONCE = Uses(forward=1, payload_reads=1, gradients=1)
TIED = Uses(forward=2, payload_reads=1, gradients=2)


def test_an_iteration_goes_through_the_states_in_order():
    made = StateBook(["w"], [ONCE], overwrites=True)
    seen = [made.state(0)]
    for event in (E.ALLOCATE, E.PRE_FORWARD, E.POST_FORWARD, E.FORWARD_DONE):
        seen.append(made.apply(0, event))
    for event in (E.PRE_BACKWARD, E.POST_BACKWARD):
        seen.append(made.apply(0, event, gradient=True))
    for event in (E.PRE_STEP, E.POST_STEP, E.RELEASE):
        seen.append(made.apply(0, event))
    assert [state.value for state in seen] == (
        ["free", "hold", "compute", "hold_after_fwd", "hold", "compute", "hold_after_bwd", "compute", "hold", "free"]
    )


def test_the_table_is_closed_and_cannot_be_changed():
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert {state for state, _ in TRANSITIONS} == set(TensorState)
    assert {to for (_, event), to in TRANSITIONS.items() if event is E.RELEASE} == {S.FREE}
    with pytest.raises(TypeError):
        TRANSITIONS[S.FREE, E.PRE_STEP] = S.HOLD  # type: ignore[index]


def test_an_illegal_event_says_what_would_be_legal_and_changes_nothing():
    made = book(ONCE)
    with pytest.raises(IllegalTransition) as caught:
        made.apply(0, E.PRE_STEP)
    assert caught.value.subject == "t0"
    assert (caught.value.state, caught.value.event) == ("HOLD", "pre_step")
    assert caught.value.expected == ("pre_forward", "pass_done", "rebuild", "release")
    assert made.state(0) is S.HOLD


def test_a_tied_embedding_is_overwritten_after_its_last_payload_read_only():
    made = book(TIED)
    forward(made)
    forward(made)
    with pytest.raises(IllegalTransition):
        made.apply(0, E.PRE_FORWARD)
    made.apply(0, E.FORWARD_DONE)
    assert not made.may_overwrite(0)
    made.apply(0, E.PRE_BACKWARD, gradient=True)
    assert not made.may_overwrite(0)
    made.apply(0, E.POST_BACKWARD, gradient=True)
    assert made.may_overwrite(0)
    assert not made.gradient_complete(0)
    for event in (E.RELEASE, E.PRE_STEP, E.REBUILD, E.PASS_DONE, E.PRE_FORWARD):
        with pytest.raises(IllegalTransition):
            made.apply(0, event)
    backward(made, reads=False)
    assert made.gradient_complete(0)
    assert made.apply(0, E.RELEASE) is S.FREE


def test_a_contribution_before_the_last_payload_read_does_not_overwrite():
    made = book(Uses(forward=2, payload_reads=2, gradients=2))
    forward(made)
    forward(made)
    made.apply(0, E.FORWARD_DONE)
    backward(made)
    assert not made.may_overwrite(0)
    made.apply(0, E.RELEASE)  # nothing is lost: the contribution was kept aside
    made.apply(0, E.ALLOCATE)
    backward(made)
    assert made.may_overwrite(0)


def test_recomputation_nests_in_backward_and_uses_are_counted():
    made = book(ONCE)
    forward(made)
    made.apply(0, E.FORWARD_DONE)
    forward(made)
    assert made.state(0) is S.HOLD_AFTER_FWD
    made.apply(0, E.PRE_BACKWARD, gradient=True)
    made.apply(0, E.PRE_FORWARD)
    with pytest.raises(IllegalTransition):
        made.apply(0, E.POST_BACKWARD, gradient=True)
    assert made.apply(0, E.POST_FORWARD) is S.COMPUTE
    with pytest.raises(IllegalTransition):
        made.apply(0, E.POST_BACKWARD, gradient=False)
    assert made.apply(0, E.POST_BACKWARD, gradient=True) is S.HOLD_AFTER_BWD
    with pytest.raises(IllegalTransition):
        made.apply(0, E.PRE_FORWARD)


def test_rebuild_after_a_skipped_step_and_at_the_start():
    made = book(ONCE)
    assert made.apply(0, E.REBUILD) is S.HOLD
    forward(made)
    with pytest.raises(IllegalTransition):
        made.apply(0, E.REBUILD)
    made.apply(0, E.FORWARD_DONE)
    backward(made)
    with pytest.raises(IllegalTransition):
        made.apply(0, E.PASS_DONE)
    assert made.apply(0, E.REBUILD) is S.HOLD
    forward(made)


def test_micro_batches_end_with_the_parameter_in_place():
    made = book(ONCE, overwrites=False)
    for _ in range(3):
        forward(made)
        made.apply(0, E.FORWARD_DONE)
        with pytest.raises(IllegalTransition):
            made.apply(0, E.PASS_DONE)
        backward(made)
        assert not made.may_overwrite(0)
        assert made.apply(0, E.PASS_DONE) is S.HOLD


def test_evaluation_and_free_tensors():
    made = StateBook(["a", "b"], [ONCE, Uses()], overwrites=True)
    made.apply(0, E.ALLOCATE)
    forward(made)
    assert made.apply(0, E.PASS_DONE) is S.HOLD
    assert made.apply(1, E.FORWARD_DONE) is S.FREE
    with pytest.raises(IllegalTransition):
        made.apply(1, E.FORWARD_DONE)
    assert made.apply(1, E.PASS_DONE) is S.FREE
    with pytest.raises(IllegalTransition):
        made.apply(0, E.PRE_BACKWARD, reads=True)  # forward has not been declared over
    assert len(made) == 2


def test_names_must_match_uses():
    with pytest.raises(InvalidInput, match="1 names"):
        StateBook(["w"], [], overwrites=True)


@pytest.mark.parametrize(
    ("states", "remote", "expected", "evictable"),
    [
        ([], False, ChunkState.FREE, False),
        ([S.FREE, S.FREE], False, ChunkState.FREE, False),
        ([S.FREE, S.FREE], True, ChunkState.RELEASED, False),
        ([S.FREE, S.HOLD], False, ChunkState.HOLD, True),
        ([S.HOLD_AFTER_FWD, S.COMPUTE, S.FREE], True, ChunkState.COMPUTE, False),
        ([S.HOLD_AFTER_BWD, S.HOLD_AFTER_FWD], True, ChunkState.HOLD, True),
    ],
)
def test_chunk_state_follows_from_its_tensors(states, remote, expected, evictable):
    assert chunk_state(states, remote=remote) is expected
    assert expected.evictable is evictable


def test_a_book_derives_uses_and_chunks_from_a_trace():
    f, b = Phase.FORWARD, Phase.BACKWARD
    trace = Trace(
        model="tied",
        tensors=(Tensor(name="emb", numel=8), Tensor(name="w", numel=4), Tensor(name="cold", numel=2)),
        activations=(Activation(name="x", bytes=16),),
        moments=(
            Moment(name="emb", phase=f, reads=(0,), makes=(0,)),
            Moment(name="w", phase=f, reads=(1,)),
            Moment(name="head", phase=f, reads=(0,)),
            Moment(name="head.b", phase=b, reads=(0,), grads=(0,)),
            Moment(name="w.b", phase=b, reads=(1,), grads=(1,), takes=(0,)),
            Moment(name="emb.b", phase=b, grads=(0,)),
        ),
    )
    assert count_uses(trace) == (TIED, ONCE, Uses())
    made = StateBook.of_trace(trace, overwrites=True)
    assert made.chunk((0, 1)) is ChunkState.FREE
    assert made.chunk((0, 1), remote=True) is ChunkState.RELEASED
    made.apply(0, E.ALLOCATE)
    made.apply(0, E.PRE_FORWARD)
    assert made.chunk((0, 1)) is ChunkState.COMPUTE
    assert made.chunk((1, 2)) is ChunkState.FREE


class Model:
    """The rules again, told from the list of what has happened since the iteration began."""

    def __init__(self, uses: Uses, overwrites: bool) -> None:
        self.uses, self.overwrites = uses, overwrites
        self.allocated, self.after = False, S.HOLD
        self.running: list[tuple] = []
        self.past: list[tuple] = []

    def happened(self, what: str) -> int:
        return sum(1 for use in self.past if what in use)

    @property
    def state(self) -> TensorState:
        if not self.allocated:
            return S.FREE
        return S.COMPUTE if self.running else self.after

    def legal(self, event: Event, reads: bool, gradient: bool) -> bool:
        idle = self.allocated and not self.running
        turned = "turn" in [use[0] for use in self.past]
        read, brought = self.happened("reads"), self.happened("brings")
        begun = [*self.past, *self.running]
        gone = self.overwrites and turned and brought > 0 and read == self.uses.payload_reads
        whole = brought == self.uses.gradients
        kinds = [use[0] for use in self.running]
        match event:
            case E.ALLOCATE:
                return not self.allocated
            case E.RELEASE:
                return idle and not (gone and not whole)
            case E.PRE_FORWARD if turned:
                return self.allocated and read < self.uses.payload_reads
            case E.PRE_FORWARD:
                return self.allocated and sum("fwd" in use for use in begun) < self.uses.forward
            case E.POST_FORWARD:
                return "fwd" in kinds
            case E.FORWARD_DONE:
                return not self.running and not turned and self.happened("fwd") == self.uses.forward
            case E.PRE_BACKWARD:
                spare_reads = self.uses.payload_reads - sum("reads" in use for use in begun)
                spare_brings = self.uses.gradients - sum("brings" in use for use in begun)
                wanted = (reads or gradient) and (not reads or spare_reads > 0) and (not gradient or spare_brings > 0)
                return self.allocated and turned and wanted
            case E.POST_BACKWARD:
                return self.backward(reads, gradient) in self.running and "fwd" not in kinds
            case E.PASS_DONE:
                done = whole and read == self.uses.payload_reads and not (gone and self.allocated)
                return not self.running and (not turned or done)
            case E.PRE_STEP:
                whole = whole and self.uses.gradients > 0 and read == self.uses.payload_reads
                return idle and self.after is S.HOLD_AFTER_BWD and whole
            case E.POST_STEP:
                return "step" in kinds
        fresh = not turned and not self.happened("fwd")
        return idle and self.after in (S.HOLD, S.HOLD_AFTER_BWD) and (fresh or (gone and whole))

    @staticmethod
    def backward(reads: bool, gradient: bool) -> tuple:
        return ("bwd", *["reads"] * reads, *["brings"] * gradient)

    def apply(self, event: Event, reads: bool, gradient: bool) -> None:
        match event:
            case E.ALLOCATE:
                self.allocated, self.after = True, S.HOLD
            case E.RELEASE:
                self.allocated = False
            case E.PRE_FORWARD:
                self.running.append(("fwd",))
            case E.PRE_BACKWARD:
                self.running.append(self.backward(reads, gradient))
            case E.PRE_STEP:
                self.running.append(("step",))
            case E.POST_FORWARD:
                self.close(("fwd",), S.HOLD_AFTER_FWD)
            case E.POST_BACKWARD:
                self.close(self.backward(reads, gradient), S.HOLD_AFTER_BWD)
            case E.FORWARD_DONE:
                self.past.append(("turn",))
                self.after = S.HOLD
            case E.PASS_DONE | E.POST_STEP | E.REBUILD:
                self.running, self.past, self.after = [], [], S.HOLD

    def close(self, use: tuple, after: TensorState) -> None:
        self.running.remove(use)
        self.past.append(use)
        self.after = after


FLAGS = st.sampled_from([(True, True), (True, False), (False, True), (False, False)])


class EventOrders(RuleBasedStateMachine):
    """Random legal and illegal events on a few tensors, tied and recomputed ones among them."""

    @initialize(
        uses=st.lists(
            st.builds(
                Uses,
                forward=st.integers(0, 3),
                payload_reads=st.integers(0, 3),
                gradients=st.integers(0, 3),
            ),
            min_size=1,
            max_size=3,
        ),
        overwrites=st.booleans(),
    )
    def start(self, uses, overwrites):
        self.models = [Model(use, overwrites) for use in uses]
        self.book = StateBook([str(index) for index in range(len(uses))], uses, overwrites=overwrites)

    @rule(data=st.data(), event=st.sampled_from(Event), flags=FLAGS)
    def anything(self, data, event, flags):
        tensor = data.draw(st.integers(0, len(self.models) - 1))
        self.do(tensor, event, *flags)

    @precondition(lambda self: hasattr(self, "models"))
    @rule(data=st.data())
    def something_legal(self, data):
        tensor = data.draw(st.integers(0, len(self.models) - 1))
        choices = [
            (event, flags)
            for event in Event
            for flags in ((True, True), (True, False), (False, True))
            if self.models[tensor].legal(event, *flags)
        ]
        event, flags = data.draw(st.sampled_from(choices))
        self.do(tensor, event, *flags)

    def do(self, tensor, event, reads, gradient):
        model = self.models[tensor]
        before = self.book.state(tensor)
        if model.legal(event, reads, gradient):
            model.apply(event, reads, gradient)
            assert self.book.apply(tensor, event, reads=reads, gradient=gradient) is model.state
        else:
            with pytest.raises(IllegalTransition):
                self.book.apply(tensor, event, reads=reads, gradient=gradient)
            assert self.book.state(tensor) is before

    @invariant()
    def the_book_agrees(self):
        for tensor, model in enumerate(getattr(self, "models", ())):
            assert self.book.state(tensor) is model.state
            turned = ("turn",) in model.past
            free_to_go = model.overwrites and turned and model.happened("reads") == model.uses.payload_reads
            assert self.book.may_overwrite(tensor) == free_to_go
            pinned = self.book.chunk([tensor]) is ChunkState.COMPUTE
            assert pinned == bool(model.running)


TestEventOrders = EventOrders.TestCase
TestEventOrders.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
