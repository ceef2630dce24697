"""The tide counts exactly the bytes that live, under whatever the user does with torch's modes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ps_core.engine._tide import Tide

FP32 = 4
INT64 = 8


@contextmanager
def rising(tide: Tide) -> Iterator[Tide]:
    tide.start()
    try:
        yield tide
    finally:
        tide.stop()


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


# ---- what is counted


def test_a_storage_counts_once_however_many_tensors_view_it() -> None:
    with rising(Tide()) as tide:
        base = torch.empty(1000)
        views = [base[10:], base.view(10, 100).t(), base.detach(), base.expand(7, 1000), base.unbind()[3]]
        assert tide.current_bytes == 1000 * FP32
        del base
        assert tide.current_bytes == 1000 * FP32
        views.clear()
        assert tide.current_bytes == 0
    assert tide.take_peak() == 1000 * FP32


def test_a_storage_made_before_or_while_paused_never_counts_nor_do_its_views() -> None:
    before = torch.ones(100)
    with rising(Tide()) as tide:
        with tide.paused(), tide.paused():
            within = torch.ones(100)
        kept = [before.view(10, 10), within.t(), before.add_(1), within.chunk(2), within.mul_(before)]
        assert (tide.current_bytes, tide.take_peak()) == (0, 0)
        sums = before + within
        assert tide.current_bytes == 100 * FP32
    del kept, sums


def test_the_death_of_the_storage_counts_not_that_of_a_python_object() -> None:
    weight = torch.ones(100, requires_grad=True)
    with rising(Tide()) as tide:
        result = weight.exp()  # autograd saves it
        total = result.sum()
        wrapper = result.untyped_storage()
        del result, wrapper
        assert tide.current_bytes == 100 * FP32 + FP32  # only the graph holds it
        total.backward()
        weight.grad = None
        assert tide.current_bytes == FP32
    del total
    assert tide.current_bytes == 0


def test_deaths_after_stop_are_noticed() -> None:
    with rising(Tide()) as tide:
        kept = torch.ones(100)
    assert tide.current_bytes == 100 * FP32
    later = torch.ones(100)
    assert tide.current_bytes == 100 * FP32
    del kept, later
    assert tide.current_bytes == 0


def test_in_place_out_and_resized() -> None:
    with rising(Tide()) as tide:
        a = torch.ones(100)
        a.add_(1).relu_()
        torch.add(a, a, out=a)
        assert tide.take_peak() == 100 * FP32
        target = torch.empty(0)
        torch.add(a, a, out=target)
        assert tide.current_bytes == 200 * FP32
        target.resize_(300)
        assert tide.current_bytes == 400 * FP32
        a.set_(target)
        assert tide.current_bytes == 300 * FP32
        del a, target
    assert tide.current_bytes == 0


def test_several_outputs_lists_and_constants() -> None:
    with rising(Tide()) as tide:
        values, indices = torch.arange(10.0).sort()
        parts = torch._foreach_add([values, values], 1.0)
        constant = torch.tensor([1.0, 2.0, 3.0])
        assert tide.current_bytes == 10 * FP32 + 10 * INT64 + 2 * 10 * FP32 + 3 * FP32
    del values, indices, parts, constant


def test_peak_since_the_last_call() -> None:
    with rising(Tide()) as tide:
        kept = torch.ones(10)
        torch.ones(1000)
        assert tide.take_peak() == 1010 * FP32
        assert tide.take_peak() == 10 * FP32
        torch.ones(5)
        assert tide.take_peak() == 15 * FP32
    del kept


def test_ignore_and_ranges_and_count() -> None:
    arena = torch.zeros(4096, dtype=torch.uint8)
    outside = torch.ones(50)
    tide = Tide()
    tide.ignore_range(arena.data_ptr(), 4096)
    with rising(tide):
        slot = torch.from_dlpack(arena[1024:2048])  # a StorageImpl of its own over the arena's memory
        assert slot.untyped_storage()._cdata != arena.untyped_storage()._cdata
        tide.count(slot)
        assert tide.current_bytes == 0
        mine = torch.ones(25)
        tide.ignore(mine.view(5, 5))
        tide.ignore(mine)
        again = mine.add_(1)
        assert tide.current_bytes == 0
        tide.count(outside)
        tide.count(outside.view(5, 10))
        assert tide.current_bytes == 50 * FP32
        tide.ignore(outside)
        assert tide.current_bytes == 0
    del again


def test_another_device_type_is_not_counted() -> None:
    with rising(Tide("meta")) as tide:
        real = torch.ones(100)
        meta = torch.ones(100, device="meta")
        assert tide.current_bytes == 100 * FP32
    del real, meta


def test_sparse_gradients_count_their_parts() -> None:
    table = nn.Embedding(10, 5, sparse=True)
    with rising(Tide()) as tide:
        table(torch.tensor([1, 2])).sum().backward()
        assert tide.current_bytes == 2 * INT64 + 2 * 5 * FP32
    table.weight.grad = None
    assert tide.current_bytes == 0


# ---- peaks by formula


def test_a_chain_of_saved_results() -> None:
    steps, numel = 5, 1000
    x = torch.zeros(numel, requires_grad=True)
    with rising(Tide()) as tide:
        y = x
        for _ in range(steps):
            y = y.exp()
        total = y.sum()
        del y
        assert tide.current_bytes == tide.take_peak() == steps * numel * FP32 + FP32
        total.backward()
        # the loss, its gradient (expanded, not copied), the saved results, one gradient
        assert tide.take_peak() == 2 * FP32 + (steps + 1) * numel * FP32
        x.grad = None
        assert tide.current_bytes == FP32
    del total


def test_checkpointing_keeps_inputs_and_recomputes_one_segment() -> None:
    segments, steps, numel = 4, 3, 1000

    def segment(y: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            y = y.exp()
        return y

    x = torch.zeros(numel, requires_grad=True)
    with rising(Tide()) as tide:
        y = x
        for _ in range(segments):
            y = checkpoint(segment, y, use_reentrant=False, preserve_rng_state=False)
        total = y.sum()
        del y
        # `exp` saves its result, which is no input of the segment: the last result is held by nobody, while each
        # segment's input is held by the recomputation to come
        assert tide.current_bytes == (segments - 1) * numel * FP32 + FP32
        tide.take_peak()
        total.backward()
        assert tide.take_peak() == 2 * FP32 + ((segments - 1) + steps + 1) * numel * FP32
        x.grad = None
        assert tide.current_bytes == FP32
    del total


def test_selective_checkpointing() -> None:
    rows, width = 20, 30
    weight = torch.randn(width, width, requires_grad=True)
    x = torch.randn(rows, width)

    def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = func is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def run() -> torch.Tensor:
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        out: torch.Tensor = checkpoint(lambda: (x @ weight).exp().exp(), use_reentrant=False, context_fn=contexts)
        return out.sum()

    with rising(Tide()) as tide:
        total = run()
        assert tide.current_bytes == rows * width * FP32 + FP32  # the product is kept, both exponentials are not
        total.backward()
        assert weight.grad is not None
        weight.grad = None
        del total
        gc.collect()
        assert tide.current_bytes == 0


def test_linear() -> None:
    rows, inputs, outputs = 50, 100, 200
    layer, x = nn.Linear(inputs, outputs), torch.randn(rows, inputs)
    with rising(Tide()) as tide:
        y = layer(x)
        assert tide.take_peak() == rows * outputs * FP32
        y.backward(torch.ones(rows, outputs))
        # result, given gradient, gradients of weight and bias
        assert tide.take_peak() == (2 * rows * outputs + inputs * outputs + outputs) * FP32
        layer.zero_grad()
        assert tide.current_bytes == rows * outputs * FP32
    del y


def test_embedding() -> None:
    vocabulary, width, tokens = 300, 16, 40
    table, ids = nn.Embedding(vocabulary, width), torch.arange(tokens)
    with rising(Tide()) as tide:
        out = table(ids)
        assert tide.take_peak() == tokens * width * FP32
        out.backward(torch.ones(tokens, width))
        assert tide.take_peak() == (2 * tokens * width + vocabulary * width) * FP32
        table.weight.grad = None
    del out


def test_attention() -> None:
    batch, heads, length, width = 2, 3, 64, 16
    part = batch * heads * length * width * FP32
    leaves = [torch.randn(batch, length, heads, width, requires_grad=True) for _ in range(3)]
    with rising(Tide()) as tide:
        out = nn.functional.scaled_dot_product_attention(*(leaf.transpose(1, 2) for leaf in leaves), is_causal=True)
        assert tide.take_peak() == part + batch * heads * length * FP32  # the result and its rows' log-sums
        given = torch.ones_like(out)
        out.backward(given)
        assert tide.take_peak() == 5 * part + batch * heads * length * FP32  # its gradient and those of q, k, v
        for leaf in leaves:
            leaf.grad = None
        assert tide.current_bytes == 2 * part
    del out, given


class Block(nn.Module):
    """One transformer block as GPT has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return added


def test_a_block_keeps_what_the_textbook_says() -> None:
    batch, length, width, heads = 2, 32, 64, 4
    block, x = Block(width, heads), torch.randn(batch, length, width)
    tokens = batch * length
    with rising(Tide()) as tide:
        y = block(x)
        # per token: 2 norms' results, q k v, attention's result, the two sums and their last addend's place
        saved = tokens * (2 * width + 3 * width + width + 2 * width + 2 * 4 * width)
        statistics = tokens * 2 * 2 + batch * heads * length  # mean and deviation of each norm; attention's log-sums
        assert tide.current_bytes == (saved + statistics) * FP32
    del y


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "block": lambda: (Block(64, 4), torch.randn(2, 32, 64)),
    "lstm": lambda: (nn.LSTM(16, 32, 2, batch_first=True), torch.randn(4, 10, 16)),
    "conv": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True)), torch.randn(2, 3, 16, 16)),
    "embedding": lambda: (nn.Embedding(100, 16), torch.randint(0, 100, (4, 7))),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(2, 5, 32)),
    "bfloat16 block": lambda: (Block(64, 4).bfloat16(), torch.randn(2, 32, 64).bfloat16()),
}


def iterate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)  # dropout
    out = model(x)
    loss: torch.Tensor = (out[0] if isinstance(out, tuple) else out).float().square().sum()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("case", CASES)
def test_peak_equals_torchs_own_tracker(case: str) -> None:
    """That one also counts parameters, buffers and inputs, and costs far more; take those away and the two agree."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model, x = CASES[case]()
    iterate(model, x)
    model.zero_grad()
    with rising(Tide()) as tide:
        iterate(model, x)
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert tide.current_bytes == gradients
    model.zero_grad()
    assert tide.current_bytes == 0

    theirs = MemTracker()
    theirs.track_external(model, x)
    with theirs:
        iterate(model, x)
    model.zero_grad()
    known = [*model.parameters(), *model.buffers(), x]
    total = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert tide.take_peak() == total - sum(tensor.numel() * tensor.element_size() for tensor in known)


@pytest.mark.parametrize("case", CASES)
def test_results_are_bitwise_those_without_it(case: str) -> None:
    model, x = CASES[case]()
    iterate(model, x)  # warm-up
    outcomes = []
    for on in (False, True):
        model.zero_grad()
        with ExitStack() as scope:
            if on:
                scope.enter_context(rising(Tide()))
            loss = iterate(model, x)
        outcomes.append(
            [loss, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]
        )
    assert len(outcomes[0]) > 1
    assert all(torch.equal(plain, counted) for plain, counted in zip(*outcomes, strict=True))


# ---- the stack of modes


def test_a_users_mode_left_between_forward_and_backward_pops_itself() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    tide, watch = Tide(), Watch()
    with watch:
        tide.start()
        assert stack() == [tide, watch]
        total = layer(x).sum()
    assert stack() == [tide]
    seen = len(watch.seen)
    assert seen
    before = tide.current_bytes
    total.backward()
    assert len(watch.seen) == seen
    assert tide.current_bytes == before + (4 * 4 + 4) * FP32
    tide.stop()


def test_a_users_mode_entered_between_start_and_stop_stays() -> None:
    tide, outer, inner = Tide(), Watch(), Watch()
    with outer:
        tide.start()
        with inner:
            tide.stop()
            tide.stop()
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
    tide, other = Tide(), Tide()
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
                getattr(tide, action)()
                (on.add if action == "start" else on.discard)("tide")
            elif action.startswith("other"):
                getattr(other, action.split()[1])()
                (on.add if action == "other start" else on.discard)("other")
            assert [mode for mode in stack() if isinstance(mode, Watch)] == entered
            assert {"tide": tide in stack(), "other": other in stack()} == {
                name: name in on for name in ("tide", "other")
            }
            assert stack()[len(on) :] == entered
            assert len(stack()) == len(on) + len(entered)
            counts = [counter.current_bytes for counter in (tide, other)]
            seen = [len(watch.seen) for watch in entered]
            made = torch.ones(10)
            assert [counter.current_bytes for counter in (tide, other)] == [
                counts[0] + 40 * ("tide" in on),
                counts[1] + 40 * ("other" in on),
            ]
            assert all(len(watch.seen) > was for watch, was in zip(entered, seen, strict=True))
            del made
    finally:
        while entered:
            entered.pop().__exit__(None, None, None)
        tide.stop()
        other.stop()


def test_stopping_within_backward_counts_no_more_and_the_next_entry_takes_it_off() -> None:
    tide = Tide()
    x = torch.zeros(10, requires_grad=True)
    counts: list[int] = []

    def stop(gradient: torch.Tensor) -> None:
        tide.stop()
        counts.append(tide.current_bytes)

    tide.start()
    y = x.exp()
    y.register_hook(stop)
    (y * 1).sum().backward()
    # Backward ends by restoring the stack of its beginning: that is torch's way, and why `stop` is called again.
    assert stack() == [tide]
    made = torch.ones(1000)
    assert tide.current_bytes <= counts[0]
    tide.stop()
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

    tide = Tide()
    x = torch.zeros(10, requires_grad=True)
    tide.start()
    with pytest.raises(RuntimeError, match="mine"):
        Fails.apply(x.exp()).sum().backward()
    gc.collect()
    assert tide.current_bytes == 0
    tide.start()  # the next iteration's
    assert stack() == [tide]
    y = x.exp()
    assert tide.current_bytes == 10 * FP32
    tide.stop()
    del y


def test_under_a_fake_tensor_mode_it_does_nothing() -> None:
    tide = Tide()
    with FakeTensorMode():
        tide.start()
        assert tide not in stack()
        torch.ones(10)
    assert tide.take_peak() == 0
    with rising(tide), FakeTensorMode() as mode:
        fake = torch.ones(10) + mode.from_tensor(torch.ones(10))
        assert tide.take_peak() == 0
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
    tide, watch = Tide(), Watch()
    with rising(tide), ExitStack() as scope:
        if above:
            scope.enter_context(watch)
        result = wrapped + wrapped
        assert tide.current_bytes == 100 * FP32
        assert tide.take_peak() == 200 * FP32  # the sum, and the sum times one
        assert watch.seen == (["aten::add"] if above else [])
    del result
    assert tide.current_bytes == 0


def test_a_compiled_submodule_stays_compiled() -> None:
    from torch._dynamo.utils import counters

    layer = torch.compile(nn.Sequential(nn.Linear(100, 200), nn.GELU()), backend="aot_eager")
    x = torch.ones(50, 100)
    counters.clear()
    with rising(Tide()) as tide:
        out = layer(x)
        assert counters["frames"]["ok"] == counters["frames"]["total"] == 1
        assert tide.current_bytes == 2 * 50 * 200 * FP32  # what GELU was given and what it made
    del out
    torch._dynamo.reset()


def test_higher_order_operators_pass() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 128, 16)
    plain = flex_attention_without_warning(flex_attention, q)
    with rising(Tide()) as tide:
        counted = flex_attention_without_warning(flex_attention, q)
        assert tide.current_bytes >= q.numel() * FP32
    assert torch.equal(plain, counted)


def flex_attention_without_warning(attention: Any, q: torch.Tensor) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow when not compiled
        result: torch.Tensor = attention(q, q, q)
    return result


def test_two_threads_have_a_stack_each() -> None:
    tide = Tide()
    errors: list[BaseException] = []

    def other() -> None:
        try:
            assert stack() == []
            tide.start()
            assert stack() == [tide]
            torch.ones(10)
            tide.stop()
            assert stack() == []
        except BaseException as error:
            errors.append(error)

    tide.start()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert not errors
    assert tide.take_peak() == 10 * FP32
    made = torch.ones(1000)
    assert tide.current_bytes == 0  # stopped there; here it lies idle until the next call
    tide.start()
    assert stack() == [tide]
    tide.stop()
    del made
