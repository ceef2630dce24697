"""What goes on after something broke off, or came once more than planned: as if there were room for everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from _states import loss_of, masters_of, ours, stack
from ps_core import SGD, AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution import instruction_executor
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._execution.instruction_executor import InstructionExecutor
from ps_core.engine._optim import group_step
from test_does_not_fit import Words
from test_left_plans import CASES, STEPS, batch, expected, masters, passes


def trained(budget: Budget, rounds: list[int], *, poison: bool) -> list[tuple[float | None, bool]]:
    """Norms, and whether steps were skipped, of steps with so many passes each."""
    torch.manual_seed(0)
    model = Words(words=256, hidden=32, layers=1, tied=False, recomputed=False)
    options = Options(group_bytes=16384, poison=poison, keep_fp32=("norm.*", "blocks.*.0.*"))
    told: dict[str, Any] = {"device": "emulated", "precision": "fp32", "options": options}
    model, optimizer = chunked(model, AdamW(lr=1e-2), budget=budget, **told)
    seen = []
    for number, count in enumerate(rounds):
        for index in range(count):
            model(torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(10 * number + index))).backward()
        optimizer.step()
        seen.append((optimizer.last_norm, optimizer.last_skipped))
        optimizer.zero_grad()
    release(model)
    return seen


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("rounds", [[1, 2], [1, 1, 2, 2]])
def test_one_pass_more_than_planned_adds_to_the_sums_that_there_are(
    poison: bool, rounds: list[int], tmp_path: Path
) -> None:
    """The plan of the only pass begins sums; they lie on the host, and their slot there is another one each pass."""
    tight = Budget(device=479744, host=184883, disk="16MiB", disk_dir=str(tmp_path))
    assert trained(tight, rounds, poison=poison) == trained(Budget(device="32MiB", host="32MiB"), rounds, poison=False)


class Once:
    """Raises once, at the call that it is set to."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.left: int | None = None

    def __call__(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise self.error


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Once:
    """In the way of each group's step."""
    once, plain = Once(MemoryError("no more")), group_step.launch_step

    def beside(*args: Any, **named: Any) -> Any:
        once()
        return plain(*args, **named)

    monkeypatch.setattr(group_step, "launch_step", beside)
    monkeypatch.setattr(instruction_executor, "launch_step", beside)
    return once


@pytest.mark.parametrize("between", ["nothing", "an evaluation", "zero_grad"])
def test_a_step_asked_for_again_clips_by_the_norm_of_all(steps: Once, between: str) -> None:
    found = []
    for broken in (False, True):
        torch.manual_seed(0)
        model = Words(words=64, hidden=32, layers=2, tied=False, recomputed=False)
        told: dict[str, Any] = {"device": "emulated", "precision": "bf16", "max_grad_norm": 0.1}
        told |= {"budget": Budget(device="16MiB", host="16MiB"), "options": Options(group_bytes=4096)}
        model, optimizer = chunked(model, SGD(lr=0.1), **told)
        model(batch(0)).backward()
        if broken:
            steps.left = 2
            with pytest.raises(MemoryError, match="no more"):
                optimizer.step()
            if between == "an evaluation":
                with torch.no_grad():
                    model(batch(1))
        if between == "zero_grad":  # then what was stepped stays so, and a new gradient has a norm of its own
            optimizer.zero_grad()
            model(batch(2)).backward()
            own = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
            optimizer.step()
            assert optimizer.last_norm == pytest.approx(float(own), rel=1e-6)
        else:
            optimizer.step()
            found.append((optimizer.last_norm, masters(optimizer)))
        release(model)
    if found:
        (norm, values), (again, same) = found
        assert norm == again
        assert all(map(torch.equal, values, same))


@pytest.mark.parametrize("name", CASES)
def test_states_can_be_read_while_a_pass_is_open(name: str, tmp_path: Path) -> None:
    case = replace(CASES[name], host=CASES[name].host + 2**13)  # the pass leaves its plan, and goes on on demand
    losses, values = next(iter(expected(case, tmp_path)))
    model, optimizer = case.begin(tmp_path)
    loss = model(batch(0))
    assert masters_of(optimizer.state_dict(masters=True))
    loss.backward()
    for _ in range(case.passes - 1):
        model(batch(0)).backward()
    assert float(loss.detach()) == losses[0]
    optimizer.step()
    assert all(map(torch.equal, masters(optimizer), values))
    release(model)


@pytest.mark.parametrize("name", CASES)
def test_memory_that_runs_out_where_a_pass_ends_loses_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At every tenth instruction of what a plan does once backward is over."""
    once, case = Once(torch.OutOfMemoryError("told to")), CASES[name]
    plain, ending = InstructionExecutor.carry_out, []

    def beside(carrier: InstructionExecutor, instr: Any) -> None:
        if ending:
            once()
        plain(carrier, instr)

    monkeypatch.setattr(InstructionExecutor, "carry_out", beside)
    right = list(expected(case, tmp_path))
    hit = 0
    for left in range(0, 40, 10):
        model, optimizer = case.begin(tmp_path)
        engine = hooks_of(model).engine
        finish = engine.passes.finish

        def finished(finish: Any = finish, **how: Any) -> None:
            ending.append(True)
            try:
                finish(**how)
            finally:
                ending.clear()

        monkeypatch.setattr(engine.passes, "finish", finished)
        for index in range(STEPS):
            once.left = left if index == 2 else None
            try:
                losses = passes(model, case, index)
            except torch.OutOfMemoryError:
                hit += 1
                optimizer.zero_grad()
                losses = passes(model, case, index)
            once.left = None
            assert losses == right[index][0]
            optimizer.step()
            optimizer.zero_grad()
            assert all(map(torch.equal, masters(optimizer), right[index][1]))
        assert statistics(model).planned_passes
        release(model)
        assert not any(engine.store.ledger.used_bytes)
    assert hit


@pytest.mark.parametrize("forget", [False, True])
def test_gradients_outlive_sums_that_had_no_room(forget: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights wanted back while gradients lie over them: these go into sums, or stay until there is room for sums."""

    def run(*, fails: bool) -> list[torch.Tensor]:
        budget, options = Budget(device="1MiB", host="1MiB"), Options(group_bytes=128)
        model, optimizer = ours(made=stack(), budget=budget, options=options)
        engine = hooks_of(model).engine
        loss_of(model, 0).backward()
        if fails:
            with monkeypatch.context() as patch:
                full = Once(MemoryError("no room for sums"))
                full.left = 1  # those of the second group, which is one tensor
                plain = engine.store.reserve

                def reserve(*args: Any, **told: Any) -> Any:
                    full()
                    return plain(*args, **told)

                patch.setattr(engine.store, "reserve", reserve)
                with pytest.raises(MemoryError, match="no room for sums"):
                    loss_of(model, 1)
        if forget:
            optimizer.zero_grad()
        loss_of(model, 2).backward()
        optimizer.step()
        found = [parameter.detach().clone() for parameter in model.parameters()]
        release(model)
        return found

    assert all(torch.equal(*pair) for pair in zip(run(fails=True), run(fails=False), strict=True))
