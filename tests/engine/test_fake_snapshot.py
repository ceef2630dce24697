"""A pass on fake tensors leaves everything as it was that the model's code reaches outside of the model."""

from __future__ import annotations

import itertools
import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from types import CellType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _runs import HOST, chunked_model
from ps_core import AdamW, Budget
from ps_core.engine import chunked, release
from ps_core.engine._tracing.fake_trace import CannotTrace, trace

X = torch.ones(2, 4)
TIMES: dict[str, Any] = {"count": 0, "mean": torch.zeros(())}
HISTORY: deque[Any] = deque(["mine"], maxlen=9)
DICE = random.Random(5)
TICKS = itertools.count(3)
LINES = (line for line in "abc")
BATCHES = itertools.chain([1, 2], [3])
PAIRS = zip("abc", [1, 2, 3], strict=True)


class Makes(OrderedDict[str, Any]):
    """Shows other values than it holds."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


MAKES = Makes(one=int)


class Slots:
    __slots__ = ("__own", "last", "unset")

    def set_own(self, value: Any) -> None:
        self.__own = value


SLOTS = Slots()
SLOTS.last = "mine"


class Calls(nn.Module):
    """A layer, and something that its code does besides."""

    mean: Any = "mine"
    table = torch.zeros(2)

    def __init__(self, what: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.linear, self.what, self.calls = nn.Linear(4, 4), what, 0
        self.own = weakref.ref(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.what(self, y)
        return y.sum()


def counts_in_a_dictionary(module: Any, y: Tensor) -> None:
    TIMES["count"] += 1
    TIMES["mean"] = 0.9 * TIMES["mean"] + y.mean()
    TIMES["new"] = y


def adds_to_a_dictionary_of_its_own(module: Any, y: Tensor) -> None:
    MAKES["two"] = str


def appends_to_a_deque(module: Any, y: Tensor) -> None:
    HISTORY.append(y)


def sets_a_slot(module: Any, y: Tensor) -> None:
    SLOTS.last = y


def sets_slots_that_were_not_set(module: Any, y: Tensor) -> None:
    SLOTS.unset = y
    SLOTS.set_own(y)


def sets_a_class_attribute(module: Any, y: Tensor) -> None:
    Calls.mean = y.mean()
    if not hasattr(Calls, "cache"):
        Calls.cache = y  # type: ignore[attr-defined]


def makes_a_global(module: Any, y: Tensor) -> None:
    global MADE  # noqa: PLW0603 - as a user's code may
    try:
        MADE  # noqa: B018
    except NameError:
        MADE = y


def draws(module: Any, y: Tensor) -> None:
    DICE.random()
    next(TICKS)
    draws_further()


def draws_further() -> None:
    next(TICKS)
    next(BATCHES)
    next(PAIRS)


def counts_by_a_weak_reference(module: Any, y: Tensor) -> None:
    module.own().calls += 1


def seen() -> Any:
    state = (dict(TIMES), list(HISTORY), SLOTS.last, Calls.mean, hasattr(Calls, "cache"), "MADE" in globals())
    state = (*state, list(dict.items(MAKES)), [name for name in ("unset", "_Slots__own") if hasattr(SLOTS, name)])
    return (*state, DICE.getstate(), repr(TICKS))


@pytest.mark.parametrize(
    "what",
    [
        *(
            counts_in_a_dictionary,
            adds_to_a_dictionary_of_its_own,
            appends_to_a_deque,
            sets_a_slot,
            sets_slots_that_were_not_set,
            sets_a_class_attribute,
            makes_a_global,
            draws,
        ),
        counts_by_a_weak_reference,
    ],
)
def test_what_code_reaches_is_restored(what: Callable[[Any, Tensor], object]) -> None:
    model = Calls(what)
    before, iterators = seen(), (TICKS, BATCHES, PAIRS)
    trace(model, X)
    assert seen() == before
    assert all(now is then for now, then in zip((TICKS, BATCHES, PAIRS), iterators, strict=True))
    assert model.calls == 0
    assert type(model(X)) is Tensor


def test_a_closure_over_the_model_is_restored() -> None:
    model: Any = Calls(lambda *_: None)
    model.register_buffer("mean_seen", torch.zeros(()))
    before = model.mean_seen

    def hook(module: nn.Module, args: Any) -> None:
        model.calls += 1
        model.mean_seen = 0.9 * model.mean_seen + args[0].mean()

    model.linear.register_forward_pre_hook(hook)
    trace(model, X)
    assert (model.calls, model.mean_seen is before) == (0, True)
    model(X)
    assert (model.calls, float(model.mean_seen)) == (1, 1.0)


def test_iterators_go_on_where_they_were() -> None:
    """Also those that read other iterators, which a shallow copy shares."""
    cells = itertools.cycle("xyz"), enumerate("xyz"), iter(["x", "y"]), itertools.islice("xyz", 1, None)
    first, second, third, fourth = cells
    model = Calls(lambda module, y: (next(first), next(second), next(third), next(fourth)))
    trace(model, X)
    assert [next(each) for each in cells] == ["x", (0, "x"), "x", "y"]


def _is_set(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def test_a_variable_of_a_closure_that_was_not_set_is_unset_again() -> None:
    def sets_it(module: Any, y: Tensor) -> None:
        nonlocal last
        last = y

    trace(Calls(sets_it), X)
    assert [cell for cell in sets_it.__closure__ or () if _is_set(cell)] == []
    last = X


class Sealed(type):
    """Its classes refuse other attributes."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError(name)

    __delattr__ = None  # type: ignore[assignment]


class Settings(metaclass=Sealed):
    rate: Any = "mine"


def test_a_class_whose_attributes_cannot_be_assigned_is_restored() -> None:
    def changes(module: Any, y: Tensor) -> None:
        type.__setattr__(Settings, "rate", y)
        type.__setattr__(Settings, "other", y)
        TIMES["count"] += 1

    before = TIMES["count"]
    trace(Calls(changes), X)
    assert (Settings.rate, hasattr(Settings, "other"), TIMES["count"]) == ("mine", False, before)


class Fleeting:
    """Cannot be put into a set once its mark, which nothing restores, has an end."""

    mark = torch.zeros(())

    def __hash__(self) -> int:
        if hasattr(self.mark, "end"):
            raise TypeError("it is gone")
        return 5


def test_one_object_that_cannot_be_restored_leaves_the_others_restored() -> None:
    a_count, members, z_count = {"it": 0}, {Fleeting()}, {"it": 0}  # a closure's variables are in this order

    def changes(module: Any, y: Tensor) -> None:
        a_count["it"] += 1
        z_count["it"] += 1
        members.clear()
        Fleeting.mark.end = True  # type: ignore[attr-defined]

    with pytest.raises(CannotTrace, match="it is gone"):
        trace(Calls(changes), X)
    assert (a_count, z_count) == ({"it": 0}, {"it": 0})


def test_modules_that_name_each_other_are_walked_once() -> None:
    one, two = ModuleType("one"), ModuleType("two")
    vars(one).update(two=two), vars(two).update(one=one, count=0)

    def counts(module: Any, y: Tensor) -> None:
        ONE.two.one.two.count += 1  # type: ignore[name-defined]  # noqa: F821

    globals()["ONE"] = one
    trace(Calls(counts), X)
    del globals()["ONE"]
    assert vars(two)["count"] == 0


def test_a_random_generator_without_a_state_is_passed_by() -> None:
    system = random.SystemRandom()
    assert trace(Calls(lambda module, y: system.random()), X).moments


class Breaks:
    """Raises where it is asked what it is, as a proxy of nothing does."""

    __class__ = property(lambda _: {}["nothing"])  # type: ignore[assignment]


@pytest.mark.parametrize("other", [lambda: (line for line in "abc"), Breaks], ids=["generator", "breaks"])
def test_iterators_are_put_back_if_saving_fails(other: Callable[[], Any]) -> None:
    ticks, z_other = itertools.count(3), other()  # a closure's variables are in the order of their names
    before = ticks
    model = Calls(lambda module, y: (next(ticks), z_other))
    with pytest.raises(CannotTrace):
        trace(model, X)
    assert ticks is before


def test_a_generator_of_numbers_is_restored_and_not_copied() -> None:
    model: Any = Calls(lambda module, y: torch.rand(3, generator=module.numbers))
    model.numbers = torch.Generator().manual_seed(7)
    before = model.numbers.get_state()
    trace(model, X)
    assert torch.equal(model.numbers.get_state(), before)


def changes_a_tensor(module: Any, y: Tensor) -> None:
    Calls.table.add_(1)


def reads_a_generator(module: Any, y: Tensor) -> None:
    next(LINES)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (changes_a_tensor, r"a tensor of shape \(2,\) outside of the model"),
        (reads_a_generator, "a generator"),
    ],
)
def test_what_cannot_be_restored_is_not_done(what: Callable[[Any, Tensor], object], why: str) -> None:
    with pytest.raises(CannotTrace, match=why):
        trace(Calls(what), X)
    assert Calls.table.tolist() == [0, 0]
    assert type(LINES).__name__ == "generator"


class Same(nn.Linear):
    """Its copy is itself."""

    def __deepcopy__(self, memo: Any) -> Same:
        return self


def test_modules_that_are_their_own_copies_survive() -> None:
    model: Any = Calls(lambda *_: None)
    model.linear = Same(4, 4)
    with pytest.raises(CannotTrace, match="the copy has the same Same"):
        trace(model, X)
    assert type(model(X)) is Tensor


@pytest.mark.parametrize("disk", [False, True])
def test_another_managed_model_is_not_run(disk: bool, tmp_path: Any) -> None:
    """As a teacher is, in distillation: the student's first pass runs on demand, and trains with the same bits."""

    def train(*, managed: bool) -> list[float]:
        torch.manual_seed(1)
        teacher, student = Calls(lambda *_: None), Calls(lambda module, y: None)
        below = Budget(host=HOST, disk="64MiB", disk_dir=str(tmp_path))
        budget, where = (below, "cpu") if disk else (Budget(device="256KiB", host=HOST), "emulated")
        if managed:
            chunked(teacher, None, device=where, budget=budget, precision="fp32")
        student.what = lambda module, y: losses.append(float(teacher(y.detach()).detach()))  # type: ignore[assignment]
        losses: list[float] = []
        if not managed:
            optimizer: Any = torch.optim.AdamW(student.parameters(), lr=1e-2, fused=True)
            for _ in range(3):
                student(X).backward()
                optimizer.step()
                optimizer.zero_grad()
            return losses
        other = Budget(device="256KiB", host=HOST)
        with chunked_model(student, spec=AdamW(lr=1e-2), precision="fp32", device="emulated", budget=other) as (_, own):
            for _ in range(3):
                student(X).backward()
                own.step()
                own.zero_grad()
        release(teacher)
        return losses

    assert train(managed=True) == train(managed=False)
