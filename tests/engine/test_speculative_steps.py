"""Groups stepped while backward goes on, and undone where gradients are clipped: the same bits as without."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import _models as models
from _cases import next_token, rows, tokens
from _fake_cuda import FakeRuntime
from _runs import HOST, let_go
from checked_device.device import CheckedDevice
from ps_core import AdamW, Budget, InvalidInput, Options, TorchOptimizer
from ps_core.engine import chunked, load_checkpoint, release, save_checkpoint, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from test_host_worker import late_device
from test_late_parameters import Net, X, add_layer
from test_virtual_clock import NEAR, check_profile, train

DEVICES: dict[str, Callable[[FakeRuntime], Any]] = {
    "emulated": lambda runtime: "emulated",
    "checked": lambda runtime: CheckedDevice(check=True, seed=3),
    "late": lambda runtime: late_device(runtime, 2),
}
SIZES = {"bf16": ("80KiB", "110KiB"), "fp16": ("80KiB", "130KiB"), "fp32": ("144KiB", "200KiB")}


def managed(device: Any, precision: str, size: str | None, step: str, host: Any = HOST, **told: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    told.setdefault("max_grad_norm", 1.0)
    budget = told.pop("budget", Budget(host=HOST) if size is None else Budget(device=size, host=host))
    return chunked(
        models.Language(tied=True, checkpointing=True),
        told.pop("optimizer", AdamW(lr=0.01)),
        device=device,
        precision=precision,
        budget=budget,
        options=Options(group_bytes=4096, step=step),
        **told,
    )


def values(model: Any, optimizer: Any) -> list[Tensor]:
    found = [value.clone() for value in model.state_dict().values()]
    states = optimizer.state_dict(masters=True)["state"].values()
    return found + [value for entry in states for value in entry.values() if isinstance(value, Tensor)]


STEPS, SPOILT = 12, 7
"""Number of steps, and the number of the one with a gradient that is not finite."""
LIMITS = (1e8, 1e-3, 1e9)


def trained(device: Any, precision: str, size: str | None, step: str, host: Any = HOST, **told: Any) -> Any:
    """Train with limits below and above the norm; return all bits, the statistics, and of each step how many groups
    began early and whether it was clipped or skipped.
    """
    model, optimizer = managed(device, precision, size, step, host, **told)
    logs, early, clipped, bad = [], [], [], list[float]()
    model.blocks[1].narrow.weight.register_hook(lambda grad: grad * bad[0] if bad else grad)
    choice = torch.Generator().manual_seed(5)
    for index in range(STEPS):
        optimizer.max_grad_norm = LIMITS[int(torch.randint(3, (1,), generator=choice))]
        bad[:] = [(float("nan"), float("inf"))[len(precision) % 2]] if index == SPOILT else []
        loss = next_token(model, *tokens(index))
        optimizer.scale(loss).backward()
        logs.append(loss.detach())
        early.append(undecided(model))
        optimizer.step()
        clipped.append(optimizer.last_skipped or optimizer.max_grad_norm == min(LIMITS))
        logs.append(torch.tensor([optimizer.last_norm, optimizer.last_skipped, optimizer.loss_scale]))
        optimizer.zero_grad()
        if index == 3:
            optimizer.param_groups[0]["lr"] = 0.005
    logs += values(model, optimizer)
    found = statistics(model)
    let_go(model)
    return logs, found, list(zip(early, clipped, strict=True))


def undecided(model: Any) -> int:
    """The number of groups that were stepped without a decision."""
    speculation = hooks_of(model).engine.speculation
    return 0 if speculation is None else len(speculation._early)


def same(right: list[Tensor], got: list[Tensor]) -> bool:
    """True if all are equal, not-a-number included."""
    return len(right) == len(got) and all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(right, got, strict=True)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("precision", "size"), [(p, size) for p, sizes in SIZES.items() for size in sizes])
def test_the_same_bits(precision: str, size: str, device: str) -> None:
    """The norm is above the limit in some steps and below it in others, and once it is not finite."""
    right, _, _ = trained("cpu", precision, None, "after_backward")
    runtime = FakeRuntime(1)
    with runtime:
        got, found, early = trained(DEVICES[device](runtime), precision, size, "speculative")
    assert same(right, got)
    assert (found.divergences, found.planned_passes) == (0, STEPS - 1)
    assert found.skipped_steps == (3 if precision == "fp16" else 1), "with two overflows"
    check_early(early, found)


def check_early(early: list[tuple[int, bool]], found: Any) -> None:
    """Groups are stepped early unless the step before was clipped; what is clipped is undone."""
    for (_, clipped_before), (count, _) in pairwise(early):
        assert count == 0 if clipped_before else count > 0
    undone = sum(count for count, clipped in early if clipped)
    assert 0 < undone < sum(count for count, _ in early)
    assert found.undone_group_steps == undone
    assert found.group_steps_in_backward == sum(count for count, _ in early)


def nag(**told: Any) -> Any:
    return TorchOptimizer(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, **told)


@pytest.mark.parametrize("optimizer", [nag, lambda: TorchOptimizer(torch.optim.NAdam, lr=0.01)], ids=["SGD", "NAdam"])
def test_steps_by_torch_are_undone_with_the_values_that_they_count(optimizer: Callable[[], Any]) -> None:
    right, _, _ = trained("cpu", "bf16", None, "after_backward", optimizer=optimizer())
    runtime = FakeRuntime(1)
    with runtime:
        got, found, early = trained(late_device(runtime, 2), "bf16", "110KiB", "speculative", optimizer=optimizer())
    assert same(right, got)
    check_early(early, found)


@pytest.mark.parametrize("device", ["emulated", "late"])
def test_host_memory_decides_how_many_groups_are_stepped_early(device: str) -> None:
    """At 110 KiB about 147 KiB lie in host memory anyway."""
    right, _, _ = trained("cpu", "bf16", None, "after_backward")
    counts = []
    for host_kib in (180, 228, 260, 308):
        runtime = FakeRuntime(1)
        with runtime:
            got, found, early = trained(DEVICES[device](runtime), "bf16", "110KiB", "speculative", f"{host_kib}KiB")
        assert same(right, got)
        host = found.tiers["host"]
        assert host.peak_bytes <= host.budget_bytes
        assert found.divergences == 0
        check_early(early, found)
        (count,) = {count for count, _ in early} - {0}
        counts.append(count)
    assert 0 < counts[0] < counts[1] < counts[2] < counts[3]


def test_what_needs_host_memory_gets_that_of_old_values() -> None:
    """A batch larger than the plan's is served on demand, and its plan has other places."""
    found, runtime = [], FakeRuntime(1)
    with runtime:
        for step in ("after_backward", "speculative"):
            model, optimizer = begun(step, late_device(runtime, 2), host="340KiB", max_grad_norm=1e9)
            early = undecided(model)
            for index in range(4):
                optimizer.step()
                optimizer.zero_grad()
                larger = [torch.cat([each, each]) for each in tokens(index)]
                next_token(model, *larger).backward()
                next_token(model, *tokens(index)).backward()
            found.append(values(model, optimizer))
            host = statistics(model).tiers["host"]
            assert host.peak_bytes <= host.budget_bytes
            let_go(model)
    assert same(*found)
    assert early > 4


def test_above_a_disk(tmp_path: Path) -> None:
    """Groups whose states lie on the disk are not stepped early."""
    right, _, _ = trained("cpu", "bf16", None, "after_backward")
    for host in ("120KiB", "190KiB"):
        budget = Budget(device="110KiB", host=host, disk="8MiB", disk_dir=str(tmp_path))
        got, found, _ = trained("emulated", "bf16", "110KiB", "speculative", budget=budget)
        assert same(right, got)
        assert found.tiers["host"].peak_bytes <= found.tiers["host"].budget_bytes


def test_parameters_that_are_unfrozen_or_added_between_backward_and_the_step() -> None:
    found, runtime = [], FakeRuntime(1)
    with runtime:
        for step in ("after_backward", "speculative"):
            torch.manual_seed(0)
            net = Net()
            next(net.parameters()).requires_grad_(False)
            model, optimizer = chunked(
                net,
                AdamW(lr=0.01),
                device=late_device(runtime, 2),
                precision="bf16",
                budget=Budget(device="120KiB", host=HOST),
                max_grad_norm=1e9,
                options=Options(group_bytes=2**14, step=step),
            )
            early = []
            for index in range(7):
                if index == 3:
                    next(net.parameters()).requires_grad_(True)
                if index == 5:
                    add_layer(model, 1)
                model(X.bfloat16()).backward()
                early.append(undecided(model))
                if index == 4:
                    add_layer(model, 2)
                optimizer.step()
                optimizer.zero_grad()
            found.append(values(model, optimizer))
            let_go(model)
    assert same(*found)
    assert all(early[index] > 3 for index in (2, 3, 4, 5))


def begun(step: str, device: Any, host: str = HOST, **told: Any) -> tuple[Any, Any]:
    """A model with a plan, after a few steps and a backward pass."""
    model, optimizer = managed(device, "bf16", "110KiB", step, host, **told)
    for index in range(3):
        next_token(model, *tokens(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    next_token(model, *tokens(9)).backward()
    return model, optimizer


def evaluate(model: Any, _: Any) -> list[Tensor]:
    with torch.no_grad():
        return [next_token(model, *tokens(20))]


def train_a_part(model: Any, _: Any) -> None:
    model.blocks[2](rows(0, 4, models.WIDTH)[0].to(torch.bfloat16)).sum().backward()


def assign(model: Any, _: Any) -> None:
    weight = model.blocks[0].narrow.weight
    weight.grad = torch.ones(weight.shape, dtype=weight.dtype)


def load(model: Any, optimizer: Any) -> None:
    """Load what the model has, but for one weight."""
    kept = model.state_dict(), optimizer.state_dict(masters=True)
    kept[0]["blocks.1.narrow.weight"] += 1
    model.load_state_dict(kept[0])


def clip(model: Any, _: Any, limit: float = 1e-3) -> list[Tensor]:
    return [torch.nn.utils.clip_grad_norm_(model.parameters(), limit).clone()]


def set_rate(_: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def set_limit(_: Any, optimizer: Any) -> None:
    optimizer.max_grad_norm = 1e-3


Use = Callable[[Any, Any], Any]
USES: dict[str, Use] = {
    "a state dict": values,
    "a gradient": lambda model, _: [model.blocks[0].narrow.weight.grad.clone()],
    "an evaluation": evaluate,
    "another pass": lambda model, _: next_token(model, *tokens(10)).backward(),
    "a part is trained": train_a_part,
    "no gradients": lambda _, optimizer: optimizer.zero_grad(),
    "no gradient": lambda model, _: setattr(model.blocks[2].narrow.weight, "grad", None),
    "another gradient": assign,
    "loaded weights": load,
    "clipping": clip,
    "another rate": set_rate,
    "a limit": set_limit,
}
UNSEEN: dict[str, Use] = {
    "nothing": lambda *_: None,
    "clipping above the norm": lambda model, optimizer: clip(model, optimizer, 1e9),
    "a limit above the norm": lambda _, optimizer: setattr(optimizer, "max_grad_norm", 1e8),
}


@pytest.mark.parametrize("device", ["checked", "late"])
@pytest.mark.parametrize("name", [*USES, *UNSEEN])
def test_what_happens_between_backward_and_the_step_finds_all_as_without_the_option(name: str, device: str) -> None:
    found, runtime = [], FakeRuntime(1)
    with runtime:
        for step in ("after_backward", "speculative"):
            model, optimizer = begun(step, DEVICES[device](runtime), max_grad_norm=1e9)
            early = undecided(model)
            logs = list((USES | UNSEEN)[name](model, optimizer) or ())
            optimizer.step()
            undone = statistics(model).undone_group_steps
            optimizer.zero_grad()
            next_token(model, *tokens(11)).backward()
            found.append([*logs, *values(model, optimizer)])
            let_go(model)
    assert same(*found)
    assert early > 4
    assert undone == (early if name in USES else 0)


def test_release_and_a_checkpoint_find_all_as_without_the_option(tmp_path: Path) -> None:
    found, runtime = [], FakeRuntime(1)
    with runtime:
        for step in ("after_backward", "speculative"):
            model, optimizer = begun(step, late_device(runtime, 2), max_grad_norm=1e9)
            with pytest.raises(InvalidInput, match="wait for a step"):
                save_checkpoint(tmp_path / step, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            save_checkpoint(tmp_path / step, model, optimizer)
            next_token(model, *tokens(9)).backward()
            optimizer.zero_grad()
            load_checkpoint(tmp_path / step, model, optimizer)
            next_token(model, *tokens(10)).backward()
            release(model)
            found.append([value.detach().clone() for value in model.state_dict().values()])
    assert same(*found)


def test_a_pass_that_breaks_off_leaves_all_as_without_the_option() -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("mine")

    found, runtime = [], FakeRuntime(1)
    with runtime:
        for step in ("after_backward", "speculative"):
            model, optimizer = begun(step, late_device(runtime, 2), max_grad_norm=1e9)
            optimizer.step()
            optimizer.zero_grad()
            handle = model.table.weight.register_hook(fail)
            with pytest.raises(ValueError, match="mine"):
                next_token(model, *tokens(9)).backward()
            handle.remove()
            logs = values(model, optimizer)
            optimizer.zero_grad()
            next_token(model, *tokens(10)).backward()
            optimizer.step()
            found.append([*logs, *values(model, optimizer)])
            let_go(model)
    assert same(*found)


@pytest.mark.parametrize(("told", "words"), [({"accumulation_steps": 2}, "accumulation_steps=2")])
def test_several_passes_a_step_are_refused(told: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=rf"Options\(step='speculative'\) with {words}"):
        managed("cpu", "bf16", None, "speculative", **told)


@pytest.mark.parametrize("budget_kib", [60, 200])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_step_takes_what_was_predicted(budget_kib: int, precision: str, tmp_path: Path) -> None:
    kib = budget_kib * (2 if precision == "fp32" else 1)
    got = train(tmp_path, f"{kib}KiB", precision=precision, clip=1e6, step="speculative")
    after = train(tmp_path, f"{kib}KiB", precision=precision, clip=1e6)
    assert got.step_s == pytest.approx(got.predicted.step_time_s, rel=2 * NEAR)
    check_profile(got, 2 * NEAR)
    assert got.step_s <= after.step_s * 1.001
    if precision != "fp32":
        assert got.step_s < 0.95 * after.step_s
