"""Failures while a step that can be undone is made or undone leave the values before the step, or those after it."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import _models as models
from _cases import next_token, tokens
from _fake_cuda import FakeRuntime
from _runs import HOST, let_go
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.host_worker import HostWorker
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._optim import speculative_steps
from ps_core.engine._optim.speculative_steps import _EarlyStep
from test_host_worker import Gate, nothing
from test_speculative_steps import DEVICES, same, undecided, values

CLIPPED, UNCLIPPED = 1e-3, 1e9
WARM_UP = 3
"""Steps before the one in which something fails: the second one has a plan already."""


class Failure:
    """Raises once, at the chosen call, when some of that call's work is done."""

    def __init__(self, error: BaseException, within: str = "") -> None:
        self.error, self.within = error, within
        self.left: int | None = None
        self.happened = 0

    def due(self) -> bool:
        """Return True at the call that is to fail."""
        if self.left is None:
            return False
        self.left -= 1
        if self.left >= 0:
            return False
        self.left = None
        self.happened += 1
        return True


def repeat_step(model: Any, optimizer: Any, after: list[Tensor]) -> None:
    """Make the step again that broke off; the values are those after it."""
    optimizer.zero_grad()
    next_token(model, *tokens(9)).backward()
    optimizer.step()
    assert same(after, values(model, optimizer))
    optimizer.zero_grad()


def half_copied(failure: Failure, plain: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy; when due, only half of two tensors."""
    if sys._getframe(2).f_code.co_name != failure.within or not failure.due():
        plain(sources, targets)
        return
    for source, target in list(zip(sources, targets, strict=True))[:2]:
        target[: len(target) // 2].copy_(source[: len(source) // 2])
    raise failure.error


def half_stepped(failure: Failure, plain: Any, *args: Any) -> Any:
    """Launch a group's step; when due, only half of its calls."""

    def launch(what: str, reads: Any, writes: Any, work: Any) -> None:
        fails = failure.due()

        def carry_out() -> None:
            (calls,) = work.args
            work.func(calls[: -(-len(calls) // 2)] if fails else calls)
            if fails:
                raise failure.error

        args[-1](what, reads, writes, carry_out)

    return plain(*args[:-1], launch)


def no_memory(failure: Failure, plain: Any, store: TierStore, size: int) -> Any:
    """Reserve memory, which when due the system does not have."""
    if failure.due():
        raise failure.error
    return plain(store, size)


@contextlib.contextmanager
def failing(failure: Failure) -> Iterator[None]:
    """Fail in one kind of work."""
    found: tuple[Any, str, Any] = {
        "save": (speculative_steps, "_copy_all", half_copied),
        "restore": (speculative_steps, "_copy_all", half_copied),
        "step": (speculative_steps, "launch_step", half_stepped),
        "memory": (TierStore, "reserve_optional", no_memory),
    }[failure.within]
    place, name, beside = found
    with pytest.MonkeyPatch.context() as patch:
        plain = getattr(place, name)
        patch.setattr(place, name, lambda *args: beside(failure, plain, *args))
        yield


def begun(step: str, device: Any, precision: str = "bf16", warm_up: int = WARM_UP) -> tuple[Any, Any]:
    """A model with a plan, after a few steps."""
    torch.manual_seed(0)
    size = {"bf16": "110KiB", "fp32": "200KiB"}[precision]
    model, optimizer = chunked(
        models.Language(tied=True, checkpointing=True),
        AdamW(lr=0.01),
        device=device,
        precision=precision,
        budget=Budget(host=HOST) if device == "cpu" else Budget(device=size, host=HOST),
        max_grad_norm=UNCLIPPED,
        options=Options(group_bytes=4096, step=step),
    )
    for index in range(warm_up):
        next_token(model, *tokens(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def engine_of(model: Any) -> Any:
    return hooks_of(model).engine


def right(precision: str, limit: float) -> list[list[Tensor]]:
    """Values before the step, after it, and after the next two."""
    model, optimizer = begun("after_backward", "cpu", precision)
    found = [values(model, optimizer)]
    optimizer.max_grad_norm = limit
    for index in range(3):
        next_token(model, *tokens(9 + index)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(values(model, optimizer))
    release(model)
    return found


def attempt(work: Callable[[], object], error: BaseException) -> bool:
    """Do it; return False if that error came, or one caused by it."""
    try:
        work()
    except BaseException as found:
        while found is not error and found.__cause__ is not None:
            found = found.__cause__
        if found is not error:
            raise
        error.with_traceback(None)  # whose frames hold memory of the pass
        return False
    return True


@pytest.mark.parametrize("limit", [UNCLIPPED, CLIPPED], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("within", ["save", "step", "memory"])
def test_a_group_whose_early_step_fails_is_stepped_behind_backward(within: str, device: str, limit: float) -> None:
    """No error is raised: by all records nothing was done yet."""
    expected, runtime = right("bf16", limit), FakeRuntime(1)
    happened = 0
    with runtime:
        for left in (0, 1, 4):
            model, optimizer = begun("speculative", DEVICES[device](runtime))
            failure = Failure((torch.OutOfMemoryError if within == "memory" else MemoryError)("no more"), within)
            if within == "memory":
                engine_of(model).speculation.free()  # else the memory is there already
            optimizer.max_grad_norm = limit
            with failing(failure):
                failure.left = left
                next_token(model, *tokens(9)).backward()
                engine_of(model).store.device.synchronize()  # the work is done before the decision
                early, left, failure.left = undecided(model), failure.left, None
            optimizer.step()
            undone = statistics(model).undone_group_steps
            assert undone == (early if limit == CLIPPED else 0 if within == "memory" else failure.happened)
            optimizer.zero_grad()
            got = [values(model, optimizer)]
            for index in (10, 11):
                next_token(model, *tokens(index)).backward()
                optimizer.step()
                optimizer.zero_grad()
                got.append(values(model, optimizer))
            happened += failure.happened
            assert all(map(same, expected[1:], got))
            let_go(model)
    assert happened == 3


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("within", ["save", "step", "memory"])
def test_an_interrupt_there_breaks_the_pass_off_and_loses_nothing(within: str, precision: str) -> None:
    before, after, _, last = right(precision, UNCLIPPED)
    for left in (0, 1, 4):
        model, optimizer = begun("speculative", "emulated", precision)
        failure = Failure(KeyboardInterrupt(), within)
        if within == "memory":
            engine_of(model).speculation.free()
        with failing(failure):
            failure.left = left
            assert not attempt(lambda model=model: next_token(model, *tokens(9)).backward(), failure.error)
        assert same(before, values(model, optimizer))
        repeat_step(model, optimizer, after)
        for index in (10, 11):
            next_token(model, *tokens(index)).backward()
            early = undecided(model)
            optimizer.step()
            optimizer.zero_grad()
        assert early > 4
        assert same(last, values(model, optimizer))
        let_go(model)


def test_what_is_undone_refers_to_no_memory() -> None:
    model, optimizer = begun("speculative", "emulated")
    optimizer.max_grad_norm = CLIPPED
    next_token(model, *tokens(9)).backward()
    early = next(iter(engine_of(model).speculation._early.values()))
    kept = [weakref.ref(tensor) for tensor in (*early.old, *early.current)]
    del early
    optimizer.step()
    optimizer.zero_grad()
    assert kept
    assert all(tensor() is None for tensor in kept[: len(kept) // 2]), "views of old bytes"
    let_go(model)


USES: dict[str, Callable[[Any, Any], object]] = {
    "a clipped step": lambda _, optimizer: optimizer.step(),
    "a state dict": lambda model, _: model.state_dict(),
    "a gradient": lambda model, _: model.blocks[0].narrow.weight.grad.clone(),
    "another pass": lambda model, _: next_token(model, *tokens(20)),
}


@pytest.mark.parametrize("error", [MemoryError("no more"), KeyboardInterrupt()], ids=["memory", "interrupt"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_undoing_that_fails_is_done_again_by_the_next_use(precision: str, use: str, error: BaseException) -> None:
    """All groups have the values before the step then, also those behind the one that failed."""
    before, after, *_ = right(precision, CLIPPED)
    for left in (0, 1, 4):
        model, optimizer = begun("speculative", "emulated", precision)
        optimizer.max_grad_norm = CLIPPED
        next_token(model, *tokens(9)).backward()
        assert undecided(model) > 4
        failure = Failure(error, "restore")
        with failing(failure):
            failure.left = left
            assert not attempt(lambda model=model, optimizer=optimizer: USES[use](model, optimizer), error)
        assert failure.happened == 1
        if use == "a clipped step" and left == 1:  # the same step, asked for again
            optimizer.step()
            assert same(after, values(model, optimizer))
        else:
            assert same(before, values(model, optimizer))
            optimizer.zero_grad()
            assert same(before, values(model, optimizer))
            next_token(model, *tokens(9)).backward()
            optimizer.step()
            assert same(after, values(model, optimizer))
        let_go(model)


@pytest.mark.parametrize("where", ["undoing", "other work"])
def test_a_worker_that_fails_before_the_decision_leaves_the_values_before_the_step(where: str) -> None:
    """The model is used no more; what `release` leaves is not a mixture."""
    runtime = FakeRuntime(1)
    for left in (0, 1, 4):
        with runtime:
            model, _ = begun("speculative", DEVICES["late"](runtime))
            before = {name: value.clone() for name, value in model.state_dict().items()}
            next_token(model, *tokens(9)).backward()
            assert undecided(model) > 4
            failure = Failure(MemoryError("no more"), "restore")
            with failing(failure):
                if where == "undoing":
                    failure.left = left
                else:
                    failure.happened = 1
                    worker: Any = engine_of(model).store.device.worker
                    worker.launch("fails", (), (), partial(int, "x"))
                for _ in range(2):
                    with pytest.raises(RuntimeError, match="failed on its thread"):
                        model.state_dict()
            assert failure.happened == 1
            with pytest.warns(UserWarning, match="after work of the processor failed"):
                release(model)
            found = model.state_dict()
            assert all(torch.equal(found[name], value) for name, value in before.items())


@pytest.mark.parametrize("decided", [False, True])
def test_a_step_that_fails_is_a_failure_of_the_worker_once_it_is_decided(decided: bool) -> None:
    worker, gate, memory = HostWorker(nothing), Gate(), [torch.zeros(4)]
    worker.wait(gate)
    launch: Any = worker.launch
    early = _EarlyStep({}, launch, 1.0, [], memory, [torch.ones(4)])
    launch("saves", memory, early.old, early.save)
    early.launch_step("steps", memory, memory, partial(int, "x"))
    if decided:
        assert early.decide()
    gate.opened.set()
    if decided:
        with pytest.raises(RuntimeError, match=r"mixture of old and new.*ValueError"):
            worker.synchronize()
    else:
        worker.synchronize()
        assert not early.decide()
    worker.close()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_pass_breaks_off_and_undoing_fails(precision: str) -> None:
    def fail(_: Tensor) -> None:
        failure.left = 1
        raise ValueError("mine")

    before, after, *_ = right(precision, CLIPPED)
    model, optimizer = begun("speculative", "emulated", precision)
    optimizer.max_grad_norm = CLIPPED
    failure = Failure(MemoryError("no more"), "restore")
    handle = model.table.weight.register_hook(fail)
    with failing(failure):
        with pytest.raises((ValueError, MemoryError)):
            next_token(model, *tokens(9)).backward()
        with contextlib.suppress(MemoryError):
            model.state_dict()
    handle.remove()
    assert failure.happened == 1
    assert same(before, values(model, optimizer))
    repeat_step(model, optimizer, after)
    for index in range(2):
        next_token(model, *tokens(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert statistics(model).planned_passes >= WARM_UP + 1, "plans are followed as before"
    let_go(model)
