"""A fake pass runs the model's code in this process; nothing of that is left, and nothing real changes."""

from __future__ import annotations

import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from _models import WIDTH, stack
from _runs import HOST, chunked_model
from ps_core import Budget, Trace
from ps_core.engine._tracing import fake_leftovers, fake_trace
from ps_core.engine._tracing.fake_leftovers import remove_leftovers
from ps_core.engine._tracing.fake_trace import CannotTrace, trace

X = torch.ones(2, 4)


def every_fake() -> list[FakeTensor]:
    return [each for each in gc.get_objects() if issubclass(type(each), FakeTensor)]


OTHERS: list[FakeTensor] = []


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Fake tensors that other tests left are not counted; `gc.freeze` may have hidden them."""
    gc.unfreeze()
    OTHERS.extend(every_fake())
    yield
    OTHERS.clear()


def fakes() -> list[FakeTensor]:
    known = set(map(id, OTHERS))
    return [each for each in every_fake() if id(each) not in known]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is gone by the end was not waiting for it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Runs(nn.Module):
    """Two layers, and something done between them with the module and what is computed."""

    def __init__(self, what: Callable[[Any, Tensor], Tensor | None], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=dtype), nn.Linear(8, 4, dtype=dtype)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        found = self.what(self, y)
        y = self.down(y if found is None else found)
        return y.sum()


def uses(traced: Trace) -> list[tuple[list[str], list[str]]]:
    names = [tensor.name for tensor in traced.tensors]
    return [([names[i] for i in moment.reads], [names[i] for i in moment.grads]) for moment in traced.moments]


PLAIN = [
    (["up.weight", "up.bias"], []),
    (["down.weight", "down.bias"], []),
    (["down.weight"], ["down.bias", "down.weight"]),
    ([], ["up.bias", "up.weight"]),
]


# ---- the copy is gone


def nothing(module: Any, y: Tensor) -> None:
    pass


def looks(module: Any, y: Tensor) -> None:
    float(y.sum())


def recomputes(module: Any, y: Tensor) -> Tensor:
    found: Tensor = checkpoint(torch.tanh, y, use_reentrant=False)
    return found


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("what", [nothing, looks, recomputes])
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "with hooks of its own"])
def test_no_fake_tensor_outlives_the_pass(what: Any, hooked: bool) -> None:
    model = Runs(what)
    if hooked:

        def note(module: Any, args: Any, out: Tensor) -> None:
            vars(module).setdefault("seen", []).append(out)

        model.register_forward_hook(note)
        model.up.register_forward_hook(functools.partial(note))
        model.whole = [model]  # refers to itself
        object.__setattr__(model.up, "parent", model)
    for _ in range(2):
        try:
            trace(model, X)
        except CannotTrace:
            assert what is looks
        assert not fakes()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("failing", [False, True])
def test_nor_where_the_engine_makes_it(failing: bool) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stack(2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.blocks(x).float().square().mean()
            return y * (1.0 if not failing or float(y) > 0 else 2.0)

    with chunked_model(Blocks(), budget=Budget(device="1MiB", host=HOST)) as (model, _):
        loss = model(torch.ones(2, WIDTH))
        assert not fakes()
        assert type(loss) is Tensor
        loss.backward()


# ---- what the model holds


def test_buffers_and_other_tensors_are_copied_without_memory() -> None:
    def look(module: Any, y: Tensor) -> None:
        found = (module.norm.running_mean, module.table, module.last, *module.parts, *module.named.values(), module.odd)
        assert [type(each) for each in found] == [FakeTensor] * 6  # else it cannot be traced
        module.norm(y)
        module.table += 1
        module.named["a"] = y
        module.calls += 1

    model: Any = Runs(look)
    model.norm = nn.BatchNorm1d(8)
    model.register_buffer("table", torch.zeros(3))
    model.last = model.up(X)  # of a graph, which `deepcopy` refuses otherwise
    model.parts, model.named, model.calls = [torch.zeros(2)], {"a": torch.zeros(1)}, 0
    model.odd = torch.zeros(4)[1:3]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = (model.last, model.parts[0], model.named["a"])
    trace(model, X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.last, model.parts[0], model.named["a"]) == held
    assert model.calls == 0


def test_ties_stay_tied_and_hooks_are_copied() -> None:
    class Counts:
        calls = 0

        def hook(self, *_: Any) -> None:
            self.calls += 1

    counts = Counts()
    model: Any = Runs(lambda module, y: nn.functional.linear(y, module.again[0].t().t()) @ module.other.weight.t())
    model.other = nn.Linear(4, 8, bias=False)
    model.other.weight = model.up.weight
    model.again = [model.down.weight]
    model.up.register_forward_hook(counts.hook)
    found = uses(trace(model, X))
    assert counts.calls == 0, "the copy's hooks have an object of their own"
    assert found[0] == (["up.weight", "up.bias"], [])
    assert sorted({name for _, names in found for name in names}) == [
        "down.bias",
        "down.weight",
        "up.bias",
        "up.weight",
    ]


def test_a_closure_that_holds_the_model_itself() -> None:
    """The functions it calls get the copy's parameters, and the model keeps its own gradients."""
    model: Any = Runs(nothing)
    function = nn.functional.linear
    model.what = lambda _, y: function(function(y, model.down.weight), model.up.weight, model.up.bias)
    assert uses(trace(model, X)) == [
        (["up.weight", "up.bias"], []),
        (["down.weight"], []),
        (["up.weight", "up.bias"], []),
        (["down.weight", "down.bias"], []),
        (["down.weight"], ["down.bias"]),
        (["up.weight"], []),
        (["down.weight"], ["down.weight"]),
        ([], ["up.bias", "up.weight"]),
    ]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_parameter_of_nobody_gets_no_fake_gradient() -> None:
    scale = nn.Parameter(torch.ones(8))
    assert uses(trace(Runs(lambda _, y: y * scale), X)) == PLAIN
    assert scale.grad is None


def test_nor_one_that_is_hidden_from_functions() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, scale: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            return gradient, gradient.sum(0)

    scale = nn.Parameter(torch.ones(8))
    with pytest.raises(CannotTrace, match=r"takes a tensor of shape \(8,\) that is not reached through the model"):
        trace(Runs(lambda _, y: Scaled.apply(y, scale)), X)
    assert scale.grad is None


# ---- what is global


CACHE: dict[Any, Any] = {}
ROWS: list[Any] = []
LAST: Any = None


@functools.lru_cache
def positions(count: int) -> Tensor:
    return torch.arange(count)


class Context:
    mask: Any = None


CONTEXT = Context()


def stores_everywhere(module: Any, y: Tensor) -> Tensor:
    global LAST  # noqa: PLW0603 - as a user's code may
    LAST = y
    Context.mask, CONTEXT.mask = y, y
    CACHE.setdefault("shift", torch.ones(8))
    CACHE["deep"] = {"er": (torch.ones(1),)}
    ROWS.append(y)
    return y + CACHE["shift"] + positions(8)


def test_the_next_pass_finds_no_fake_tensor_in_a_cache() -> None:
    ROWS.append("mine")
    CACHE["mine"] = 1
    model = Runs(stores_everywhere)
    assert uses(trace(model, X)) == PLAIN
    assert (LAST, Context.mask, CONTEXT.mask, ROWS) == (None, None, None, ["mine"])
    assert CACHE == {"mine": 1}
    assert positions.cache_info().currsize == 0
    assert not fakes()
    assert type(model(X)) is Tensor


@pytest.mark.parametrize("count", [1, 50])
def test_the_heap_is_searched_as_often_for_many_tensors_as_for_one(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search passes every object there is, so it takes long in a large program."""
    searches: list[int] = []
    search = fake_leftovers._holders

    def counted(values: list[Any]) -> Any:
        searches.append(len(values))
        return search(values)

    monkeypatch.setattr(fake_leftovers, "_holders", counted)
    mode = FakeTensorMode()
    with mode:
        stored = {"deep": [((torch.empty(index + 1),),) for index in range(count)], "flat": torch.empty(1)}
    made = [weakref.ref(each.untyped_storage()) for each in fakes()]
    assert remove_leftovers(mode, made) == []
    assert stored == {"deep": []}
    assert not fakes()
    filled = [each for each in searches if each]
    assert filled == [count + 1, 1, count, count], "tensors; the dict with one; their tuples; the tuples of these"


def test_a_pass_of_another_thread_finds_no_fake_tensor_in_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread's pass begins after the first one's fake tensors are removed."""
    positions.cache_clear()
    removing, traced = Event(), Event()

    def slowly(*args: Any) -> list[str]:
        removing.set()
        traced.wait(0.5)  # time in which the other thread would trace
        return remove_leftovers(*args)

    def looks(module: Any, y: Tensor) -> Tensor:
        assert positions.cache_info().currsize == 0
        return y + positions(8)

    def other() -> None:
        assert removing.wait(30)
        trace(Runs(looks), X)
        traced.set()

    monkeypatch.setattr(fake_trace, "remove_leftovers", slowly)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(other)
        trace(Runs(looks), X)
        second.result()
    assert not fakes()


def test_who_cannot_be_cleaned_is_named(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Any] = []

    def hides(module: Any, y: Tensor) -> None:
        kept.append(iter(((y,),) * 2))

    with caplog.at_level("INFO", "ps_core"):
        trace(Runs(hides), X)
    kept.clear()
    assert not caplog.messages or "still held by" in caplog.text
    assert not fakes()


def draws(module: Any, y: Tensor) -> None:
    random.random()
    numpy.random.rand()
    torch.manual_seed(7)
    torch.rand(2)
    torch.set_grad_enabled(True)
    warnings.warn("as loud as can be", stacklevel=1)


@pytest.mark.parametrize("ending", [nothing, looks])
def test_random_states_and_modes_are_put_back(ending: Any) -> None:
    class Watching(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    def state() -> list[Any]:
        return [random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    model = Runs(lambda module, y: (draws(module, y), ending(module, y))[1])
    before = state()
    with Watching() as mode, torch.no_grad():
        try:
            trace(model, X)
        except CannotTrace:
            assert ending is looks
        assert not torch.is_grad_enabled()
        assert mode.seen == 0
        torch.ones(1) + 1
        assert mode.seen == 2
    assert state() == before


def test_autocast_keeps_no_fake_cast() -> None:
    model = Runs(nothing)
    with torch.autocast("cpu", torch.bfloat16):
        first = model(X)
        assert uses(trace(model, X))[:2] == PLAIN[:2]
        assert not fakes()
        assert torch.equal(model(X), first)


def test_a_compiled_function_runs_as_it_is_written() -> None:
    compiled = torch.compile(torch.tanh, backend=lambda *_: pytest.fail("it was compiled"))
    assert uses(trace(Runs(lambda _, y: compiled(y)), X)) == PLAIN


def test_operators_that_refuse_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def refused(module: Any, y: Tensor) -> None:
        torch.ops.aten._scaled_mm(y, y, y, y)

    with pytest.raises(CannotTrace):
        trace(Runs(refused), X)
    assert not caplog.records
