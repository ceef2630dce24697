"""The tracker stays where it belongs, whatever the user does with torch's modes, and leaves when it should."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from _counting import counting
from ps_core.engine._devices.hide_from_modes import modes_off
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker

FP32 = 4


class Watch(TorchDispatchMode):
    """A user's mode: it writes down what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name if hasattr(func, "_schema") else str(func))
        return func(*args, **(kwargs or {}))


def stack() -> list[TorchDispatchMode]:
    return _get_current_dispatch_mode_stack()


@pytest.fixture(autouse=True)
def _stack_is_left_empty() -> Iterator[None]:
    assert stack() == []
    yield
    left = stack()
    while stack():
        torch._C._pop_torch_dispatch_stack(None)
    assert left == []


def test_a_users_mode_left_between_forward_and_backward_pops_itself() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    tracker, watch = TensorBytesTracker(), Watch()
    with watch:
        tracker.start()
        assert stack() == [tracker, watch]
        total = layer(x).sum()
    assert stack() == [tracker]
    seen = len(watch.seen)
    assert seen
    before = tracker.current_bytes
    total.backward()
    assert len(watch.seen) == seen
    assert tracker.current_bytes == before + (4 * 4 + 4) * FP32
    tracker.stop()


def test_a_users_mode_entered_between_start_and_stop_stays() -> None:
    tracker, outer, inner = TensorBytesTracker(), Watch(), Watch()
    with outer:
        tracker.start()
        with inner:
            tracker.stop()
            tracker.stop()
            assert stack() == [outer, inner]
            torch.ones(3)
            assert inner.seen == outer.seen
            assert inner.seen
        assert stack() == [outer]


ACTIONS = st.lists(
    st.sampled_from(["enter", "leave", "start", "stop", "other start", "other stop", "fail"]), max_size=25
)


@given(ACTIONS)
@settings(max_examples=200, deadline=None)
def test_users_modes_stay_in_their_order_whatever_happens(actions: list[str]) -> None:
    tracker, other = TensorBytesTracker(), TensorBytesTracker()
    on: set[str] = set()
    entered: list[Watch] = []
    try:
        for action in actions:
            if action == "enter":
                entered.append(Watch())
                entered[-1].__enter__()
            elif action == "leave" and entered:
                entered.pop().__exit__(None, None, None)
            elif action == "fail":
                with pytest.raises(RuntimeError, match="shape"):
                    torch.ones(3).view(2, 2)
            elif action in {"start", "stop"}:
                getattr(tracker, action)()
                (on.add if action == "start" else on.discard)("tracker")
            elif action.startswith("other"):
                getattr(other, action.split()[1])()
                (on.add if action == "other start" else on.discard)("other")
            assert [mode for mode in stack() if isinstance(mode, Watch)] == entered
            assert {"tracker": tracker in stack(), "other": other in stack()} == {
                name: name in on for name in ("tracker", "other")
            }
            assert stack()[len(on) :] == entered
            assert len(stack()) == len(on) + len(entered)
            counts = [counter.current_bytes for counter in (tracker, other)]
            seen = [len(watch.seen) for watch in entered]
            made = torch.ones(10)
            assert [counter.current_bytes for counter in (tracker, other)] == [
                counts[0] + 40 * ("tracker" in on),
                counts[1] + 40 * ("other" in on),
            ]
            assert all(len(watch.seen) > was for watch, was in zip(entered, seen, strict=True))
            del made
    finally:
        while entered:
            entered.pop().__exit__(None, None, None)
        tracker.stop()
        other.stop()


def test_stopping_within_backward_counts_no_more_and_the_next_entry_takes_it_off() -> None:
    tracker = TensorBytesTracker()
    x = torch.zeros(10, requires_grad=True)
    counts: list[int] = []

    def stop(gradient: torch.Tensor) -> None:
        tracker.stop()
        counts.append(tracker.current_bytes)

    tracker.start()
    y = x.exp()
    y.register_hook(stop)
    (y * 1).sum().backward()
    # Backward ends by restoring the stack of its beginning: that is torch's way, and why `stop` is called again.
    assert stack() == [tracker]
    made = torch.ones(1000)
    assert tracker.current_bytes <= counts[0]
    tracker.stop()
    assert stack() == []
    del made, y


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_behind(where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                raise RuntimeError("mine")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("mine")

    tracker = TensorBytesTracker()
    x = torch.zeros(10, requires_grad=True)
    tracker.start()
    with pytest.raises(RuntimeError, match="mine"):
        Fails.apply(x.exp()).sum().backward()
    gc.collect()
    assert tracker.current_bytes == 0
    tracker.start()  # the next iteration's
    assert stack() == [tracker]
    y = x.exp()
    assert tracker.current_bytes == 10 * FP32
    tracker.stop()
    del y


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False])
def test_an_inference_mode_that_is_left_later_finds_what_it_found_before(outer: bool | None, inner: bool) -> None:
    tracker = TensorBytesTracker()
    with ExitStack() as around:
        if outer is not None:
            around.enter_context(torch.inference_mode(outer))
        tracker.start()
        with torch.inference_mode(inner):
            tracker.stop()
            tracker.start()
            made = torch.ones(10)
            assert tracker.current_bytes == 10 * FP32
            tracker.stop()
            torch.ones(3)
        torch.ones(3)  # PyTorch looks for the mode that was on when the inner one was entered
        assert tracker.current_bytes == 10 * FP32
        tracker.stop()
        assert stack() == []
        torch.ones(3)
    torch.ones(3)
    del made


def test_a_mode_begun_in_an_inference_mode_counts_again_after_it() -> None:
    tracker, watch = TensorBytesTracker(), Watch()
    with torch.inference_mode():
        tracker.start()
    tracker.start()
    made = torch.ones(10)
    assert tracker.current_bytes == 10 * FP32
    tracker.stop()
    assert stack() == []
    with watch:
        torch.ones(3)
    assert watch.seen
    del made


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 64), (16, 32, 64), (3, 5, 64), (2, 1, 3, 64)])
def test_what_is_counted_in_an_inference_mode_has_the_bits_of_what_is_not(
    shape: tuple[int, ...], autocast: bool, frozen: bool
) -> None:
    """A transposed input: PyTorch multiplies it one matrix at a time only if the weight requires no gradient."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64).requires_grad_(not frozen), torch.randn(shape).transpose(0, 1)
    tracker = TensorBytesTracker()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = layer(x)
        with counting(tracker):
            found = layer(x)
            assert tracker.current_bytes == found.nbytes
    assert torch.equal(found, expected)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.layer = nn.LSTM(64, 64), nn.GRUCell(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, _ = self.cell(x)
        return self.layer(found[0], found[1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, _ = self.attention(x, x * 2, x + 1)
        return found


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.weight.chunk(2)
        found = x.chunk(2, -1)[0] @ first.narrow(1, 0, 32) + torch.einsum("abc,cd->abd", x, self.weight)[..., :32]
        return found + torch.linalg.multi_dot((x[0], self.weight, second.t()))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [Recurrent, Attention, Pieces])
def test_composite_operators_in_an_inference_mode(kind: type[nn.Module], autocast: bool) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 8, 64)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(x)
        with counting(TensorBytesTracker()):
            found = model(x)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


def test_an_operator_that_writes_counts_one_version_in_an_inference_mode() -> None:
    out = torch.zeros(3, 3)
    with torch.inference_mode(), counting(TensorBytesTracker()):
        torch.matmul(torch.ones(3, 3), torch.ones(3, 3), out=out)
    assert out._version == 1


def test_under_a_fake_tensor_mode_it_does_nothing() -> None:
    tracker = TensorBytesTracker()
    with FakeTensorMode():
        tracker.start()
        assert tracker not in stack()
        torch.ones(10)
    assert tracker.take_peak() == 0
    with counting(tracker), FakeTensorMode() as mode:
        fake = torch.ones(10) + mode.from_tensor(torch.ones(10))
        assert tracker.take_peak() == 0
    del fake


class Wrapper(torch.Tensor):
    """A subclass with its own dispatch: one tensor wrapped."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        twice = func(*(arg.inner if isinstance(arg, Wrapper) else arg for arg in args)) * 1
        return cls(twice)


@pytest.mark.parametrize("above", [False, True])
def test_wrapper_subclasses_count_what_they_wrap(above: bool) -> None:
    wrapped = Wrapper(torch.ones(100))
    tracker, watch = TensorBytesTracker(), Watch()
    with counting(tracker), ExitStack() as scope:
        if above:
            scope.enter_context(watch)
        result = wrapped + wrapped
        assert tracker.current_bytes == 100 * FP32
        assert tracker.take_peak() == 200 * FP32  # the sum, and the sum times one
        assert watch.seen == (["aten::add"] if above else [])
    del result
    assert tracker.current_bytes == 0


def test_a_compiled_submodule_stays_compiled() -> None:
    from torch._dynamo.utils import counters

    layer = torch.compile(nn.Sequential(nn.Linear(100, 200), nn.GELU()), backend="aot_eager")
    x = torch.ones(50, 100)
    counters.clear()
    with counting(TensorBytesTracker()) as tracker:
        out = layer(x)
        assert counters["frames"]["ok"] == counters["frames"]["total"] == 1
        assert tracker.current_bytes == 2 * 50 * 200 * FP32  # what GELU was given and what it made
    del out
    torch._dynamo.reset()


def test_higher_order_operators_pass() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 128, 16)
    plain = flex_attention_without_warning(flex_attention, q)
    with counting(TensorBytesTracker()) as tracker:
        counted = flex_attention_without_warning(flex_attention, q)
        assert tracker.current_bytes >= q.numel() * FP32
    assert torch.equal(plain, counted)


def flex_attention_without_warning(attention: Any, q: torch.Tensor) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow when not compiled
        result: torch.Tensor = attention(q, q, q)
    return result


def test_two_threads_have_a_stack_each() -> None:
    tracker = TensorBytesTracker()
    errors: list[BaseException] = []

    def other() -> None:
        try:
            assert stack() == []
            tracker.start()
            assert stack() == [tracker]
            torch.ones(10)
            tracker.stop()
            assert stack() == []
        except BaseException as error:
            errors.append(error)

    tracker.start()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert not errors
    assert tracker.take_peak() == 10 * FP32
    made = torch.ones(1000)
    assert tracker.current_bytes == 0  # stopped there; here it lies idle until the next call
    tracker.start()
    assert stack() == [tracker]
    tracker.stop()
    del made


def test_garbage_that_takes_a_counter_off_is_not_collected_while_modes_change_places() -> None:
    """As a dropped model does, whose exception is a circle of references."""

    class Circle:
        def __init__(self) -> None:
            self.itself = self

    before = gc.get_threshold()
    try:
        for allocations in range(1, 120):
            tracker = TensorBytesTracker()
            tracker.start()
            gc.collect()
            circle = Circle()  # young, so that the next collection finds it
            weakref.finalize(circle, tracker.stop)
            del circle
            gc.set_threshold(allocations)
            with modes_off():
                pass
            gc.set_threshold(*before)
            gc.collect()
            assert not stack(), f"after {allocations} allocations"
    finally:
        gc.set_threshold(*before)
