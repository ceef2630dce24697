"""Training over a disk tier: the same bits as with everything resident, within budgets, and what a failing disk leaves.

On the stand-in that checks order and delays reads and writes, and on the threads that really make them.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import _models as models
from _cases import case, finish, next_token, other_shape, tokens
from _reference import GROUP_BYTES, SEED, Settings
from _runs import check_same, kept_by, let_go, managed, tightest
from checked_device.device import CheckedDevice
from ps_core import AdamW, Budget, DoesNotFit, InvalidInput, Options, TierFailure
from ps_core.engine import chunked, materialized, release, statistics
from ps_core.engine._devices import select
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._devices.disk.file import BLOCK_BYTES
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._execution.plan_scheduler import PlanScheduler
from test_matrix import ADAMW, SGD_, loop

DISK = "64MiB"
SPEC = AdamW(lr=1e-2, weight_decay=0.1)
LANGUAGE = case("language", models.Language, inputs=tokens, loss=next_token)


def below(host: int, directory: Path | str, device: int | None = None) -> Budget:
    return Budget(device=device, host=host, disk=DISK, disk_dir=str(directory))


def made(device: int | None, **checks: Any) -> Callable[[], CpuDevice]:
    name, kind = "cpu" if device is None else "emulated", CheckedDevice if checks else CpuDevice
    return lambda: kind(name=name, **checks)


def assert_within(found: Any) -> None:
    """Every tier's budget was kept, and the disk was used both ways."""
    for name, tier in found.tiers.items():
        assert tier.peak_bytes <= tier.budget_bytes, name
    assert found.moved_bytes["host->disk"] > 0 < found.moved_bytes["disk->host"]


ROWS = [
    *((precision, micro, "tied") for precision in ("fp32", "bf16", "fp16") for micro in (1, 3)),
    ("bf16", 1, "frozen"),
    ("fp32", 3, "frozen"),
    ("bf16", 3, "two_groups"),
]
ROOM = {"cpu": (None, {"fp32": 200_000, "bf16": 100_000, "fp16": 100_000})}
ROOM["emulated"] = (130_000, {"fp32": 60_000, "bf16": 40_000, "fp16": 40_000})


@pytest.mark.parametrize("aliases", [1, 3])
def test_a_step_while_a_weight_is_aliased_in_memory(aliases: int, tmp_path: Path) -> None:
    """Weights and states lie on the disk, so a step needs slots beside the copies that something holds on to."""

    def run(*, hold: bool) -> tuple[list[Tensor], list[Tensor], list[int]]:
        torch.manual_seed(0)
        options = Options(group_bytes=2048, poison=True)
        model, optimizer = chunked(models.stack(), SPEC, budget=below(2**16, tmp_path), options=options)
        engine, losses, held = hooks_of(model).engine, [], []
        for _ in range(4):
            held = [parameter.detach() for parameter in model.parameters() if parameter.dim() == 2][: aliases * hold]
            loss = model(torch.ones(4, 32)).float().square().mean()
            loss.backward()
            finish(optimizer)
            losses.append(loss.detach())
            stepped = [value for value in model.state_dict().values() if value.dim() == 2]
            assert all(map(torch.equal, held, stepped)), "aliases show what the step did, as in plain PyTorch"
        held.clear()
        engine.finish_pass()
        weights = [value.clone() for value in model.state_dict().values()]
        release(model)
        return losses, weights, engine.store.ledger.used_bytes

    losses, weights, _ = run(hold=False)
    same_losses, same_weights, left = run(hold=True)
    assert all(torch.equal(one, other) for one, other in zip(losses, same_losses, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(weights, same_weights, strict=True))
    assert left == [0, 0]


def test_a_step_without_room_steps_no_group(tmp_path: Path) -> None:
    """Aliases take the room that a plan's step would have; the group behind the others is the largest."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 128))
    options = Options(group_bytes=2200)
    model, optimizer = chunked(layers, SPEC, budget=below(66_000, tmp_path), options=options)

    def backward() -> None:
        model(torch.ones(2, 32)).float().square().mean().backward()

    def counts() -> list[float]:
        return [float(entry["step"]) for entry in optimizer.state_dict(masters=True)["state"].values()]

    for _ in range(2):
        backward()
        finish(optimizer)
    held = [parameter.detach() for parameter in model.parameters()]
    backward()
    with pytest.raises(DoesNotFit):
        optimizer.step()
    assert counts() == [2.0] * 10
    held.clear()
    optimizer.zero_grad()
    backward()
    finish(optimizer)
    assert counts() == [3.0] * 10
    release(model)


@pytest.mark.parametrize("where", ROOM)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_as_the_resident_reference(row: tuple[str, int, str], where: str, tmp_path: Path) -> None:
    precision, micro, kind = row
    device, host = ROOM[where]
    told = Settings(precision=precision, max_grad_norm=0.3, accumulation_steps=micro)
    run = loop(kind, ADAMW if kind == "tied" else SGD_, micro_batches=micro, checkpointing=kind == "two_groups")
    for checks in ({"check": True, "seed": 3}, {}):
        got = managed(run, told, made(device, **checks), below(host[precision], tmp_path, device))
        check_same(run, told, got)
        (found,) = got.statistics
        assert_within(found)
        assert found.divergences == 0
        assert found.planned_passes == found.passes - micro, "the first pass is recorded, the rest is planned"
        assert got.evictions > 0


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", ROOM)
def test_without_any_plan(
    where: str, precision: str, micro: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlanScheduler, "maybe_replan", lambda scheduler: None)
    device, host = ROOM[where]
    told = Settings(precision=precision, max_grad_norm=0.3, accumulation_steps=micro)
    run = loop("tied", ADAMW, micro_batches=micro, checkpointing=False)
    for checks in ({"check": True, "seed": 3}, {}):
        got = managed(run, told, made(device, **checks), below(host[precision], tmp_path, device))
        check_same(run, told, got)
        assert_within(got.statistics[0])
        assert got.statistics[0].planned_passes == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_under_the_tightest_budget(precision: str, tmp_path: Path) -> None:
    told = Settings(precision=precision)

    def attempt(size: int) -> Any:
        return managed(LANGUAGE.run, told, made(None, check=True, seed=3), below(size, tmp_path))

    size, got = tightest(attempt, rounds=2)
    check_same(LANGUAGE.run, told, got)
    assert size < 2**17
    assert_within(got.statistics[0])
    assert got.evictions > 0


CHOICES = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["belady", "lru", "fifo"]),
        "group_bytes": st.sampled_from([1024, 2048, 5000, None]),
        "prefetch": st.sampled_from([None, 0, 2]),
        "poison": st.booleans(),
    }
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    precision=st.sampled_from(["fp32", "bf16"]),
    device=st.sampled_from([None, 200_000]),
    part=st.floats(0.5, 1),
    choices=CHOICES,
    seed=st.one_of(st.none(), st.integers(0, 99)),
)
def test_placement_never_changes_the_result(
    tmp_path_factory: pytest.TempPathFactory,
    precision: str,
    device: int | None,
    part: float,
    choices: dict[str, Any],
    seed: int | None,
) -> None:
    told, directory = Settings(precision=precision, options=Options(**choices)), tmp_path_factory.mktemp("disk")
    checks: dict[str, Any] = {} if seed is None else {"check": True, "seed": seed}
    host = int(part * (300_000 if device is None else 150_000))
    try:
        got = managed(LANGUAGE.run, told, made(device, **checks), below(host, directory, device))
    except DoesNotFit:
        assume(False)
    check_same(LANGUAGE.run, told, got)
    assert not got.statistics[0].divergences


def test_other_batches_and_a_pass_that_leaves_its_plan(tmp_path: Path) -> None:
    row = case("shape", models.Language, inputs=other_shape, loss=next_token)
    told = Settings(precision="bf16")
    device = made(None, check=True, seed=5)
    _, got = tightest(lambda size: managed(row.run, told, device, below(size, tmp_path)), rounds=1)
    check_same(row.run, told, got)
    assert got.statistics[0].divergences > 0
    assert_within(got.statistics[0])


# A model on disk, step by step.


@contextmanager
def language(tmp_path: Path, host: int = 200_000, **told: Any) -> Iterator[tuple[Any, Any]]:
    torch.manual_seed(SEED)
    told = {"precision": "bf16", "options": Options(group_bytes=GROUP_BYTES)} | told
    model, optimizer = chunked(models.Language(), SPEC, device="cpu", budget=below(host, tmp_path), **told)
    try:
        yield model, optimizer
    finally:
        let_go(model)


def step(model: Any, optimizer: Any, index: int) -> Tensor:
    loss = next_token(model, *tokens(index))
    loss.backward()
    finish(optimizer)
    return loss.detach()


def masters(model: Any, optimizer: Any) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: value.clone() for name, value in kept_by(names, optimizer).items() if name.endswith("/master")}


def test_what_is_counted_and_given_back(tmp_path: Path) -> None:
    with language(tmp_path) as (model, optimizer):
        for index in range(3):
            step(model, optimizer, index)
        found, file = statistics(model), hooks_of(model).engine.store.file
        before = found.moved_bytes
        step(model, optimizer, 3)
        after = statistics(model).moved_bytes
        held = {name: tier.current_bytes for name, tier in found.tiers.items()}
        count = sum(parameter.numel() for parameter in model.parameters())
        assert sum(held.values()) == found.bytes_per_parameter * count >= 14 * count
        assert 0 < held["disk"] <= file.bytes <= held["disk"] + 2**20
        # What lives on the disk are states, which a step reads and writes once.
        assert after["disk->host"] - before["disk->host"] == after["host->disk"] - before["host->disk"] == held["disk"]
        flat = statistics(model).as_dict()
        assert flat["tiers.disk.budget_bytes"] == 64 * 2**20
        assert flat["moved_bytes.disk->host"] == after["disk->host"]
        descriptor = file._file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("unused", ["1", "1.bias"], ids=["a group", "a part of a group"])
@pytest.mark.parametrize("where", ROOM)
def test_weights_that_an_accumulated_step_leaves(where: str, unused: str, tmp_path: Path) -> None:
    """The plan's step writes 16-bit weights into memory that holds none: those without a gradient get there as well."""

    def run(budget: Budget | None) -> tuple[dict[str, Tensor], list[float]]:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        options = Options(group_bytes=2**13, poison=True)
        device = where if budget else "cpu"
        model, optimizer = chunked(layers, SPEC, device=device, budget=budget, accumulation_steps=2, options=options)
        losses = []
        for step in range(5):
            if step == 2:
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(not name.startswith(unused))
            for _ in range(2):
                loss = model(torch.ones(4, 64)).float().square().mean()
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if budget is not None:
            assert statistics(model).planned_passes
            assert_within(statistics(model))
        return model.state_dict(), losses

    (got, losses), (expected, theirs) = run(below(130_000, tmp_path, None if where == "cpu" else 100_000)), run(None)
    assert losses == theirs
    assert [name for name in expected if not got[name].equal(expected[name])] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_norms_read_nothing_back(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are measured as they come, however small, for what leaves for the disk is read in pieces."""
    monkeypatch.setattr(PlanScheduler, "maybe_replan", lambda scheduler: None)
    with language(tmp_path, precision=precision) as (model, optimizer):
        engine, read = hooks_of(model).engine, []
        for index in range(3):
            loss = next_token(model, *tokens(index))
            loss.backward()
            with monkeypatch.context() as patch:
                patch.setattr(engine.residency.transfers, "read", lambda slot, *_: read.append(slot))
                pending = [record for record in engine.records if engine.has_gradient(record)]
                assert len(pending) == len(list(model.parameters()))
                engine.gradients.norm_parts(pending)
            assert not read
            optimizer.step()
        assert statistics(model).planned_passes == 0


def test_states_are_read_written_and_edited_on_the_disk(tmp_path: Path) -> None:
    with language(tmp_path) as (model, optimizer):
        for index in range(2):
            step(model, optimizer, index)
        weights, state = model.state_dict(), optimizer.state_dict(masters=True)
        logs = [step(model, optimizer, index) for index in (2, 3)]
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert all(torch.equal(one, step(model, optimizer, index)) for one, index in zip(logs, (2, 3), strict=True))
        with materialized(model, names=["blocks.0.wide.weight"], write=True), torch.no_grad():
            model.blocks[0].wide.weight.fill_(0.25)
        assert bool((masters(model, optimizer)["blocks.0.wide.weight/master"] == 0.25).all())


# Refusals.


def test_model_data_beyond_the_disk(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="all tiers together needs") as caught:
        chunked(
            models.Language(layers=20),
            SPEC,
            options=Options(group_bytes=GROUP_BYTES),
            budget=Budget(host=100_000, disk=100_000, disk_dir=str(tmp_path)),
        )
    told = eval(caught.value.remedies[0].partition(": ")[0])
    assert (told.host, told.disk_dir) == (100_000, str(tmp_path))
    release(chunked(models.Language(layers=20), SPEC, options=Options(group_bytes=GROUP_BYTES), budget=told)[0])


def test_a_group_whose_step_is_beyond_the_host(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"host needs .* at 'step of "):
        chunked(models.Language(), SPEC, budget=below(4096, tmp_path), options=Options(group_bytes=GROUP_BYTES))


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"Budget\.disk_dir"):
        chunked(models.Language(), SPEC, budget=below(10**6, tmp_path / "nowhere"))


def warned(caplog: pytest.LogCaptureFixture, directory: Path | str) -> list[str]:
    """Manage two models over that directory; return the warnings of both."""
    select._warn_of_memory.cache_clear()
    caplog.clear()
    for _ in range(2):
        release(chunked(nn.Linear(4, 4), AdamW(), budget=below(10**6, directory))[0])
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_directory_in_memory_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "_file_system", lambda directory: "ext4")
    assert warned(caplog, tmp_path) == []
    for kind in ("tmpfs", "ramfs"):
        monkeypatch.setattr(select, "_file_system", lambda directory, kind=kind: kind)
        assert warned(caplog, tmp_path) == [
            f"Budget.disk_dir: {str(tmp_path)!r} is on a {kind}, which keeps files in host memory: the disk tier takes "
            "memory there, and Budget.host does not count it; choose a directory on a disk"
        ]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_the_systems_own_memory_is_known_as_such(caplog: pytest.LogCaptureFixture) -> None:
    if select._file_system("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is on a disk")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert [each.partition(", which")[0] for each in warned(caplog, folder)] == [
            f"Budget.disk_dir: {folder!r} is on a tmpfs"
        ]


def test_a_system_that_does_not_say_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> str:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    assert select._file_system("/proc") == "proc"
    assert select._file_system(str(tmp_path / "nowhere")) == ""
    monkeypatch.setattr(Path, "read_text", fails)
    assert select._file_system("/proc") == ""


# When the disk fails.


def full(after: int) -> Callable[..., int]:
    """Write so often, then no more."""
    real, left = os.pwritev, [after]

    def write(file: int, buffers: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, buffers, offset)

    return write


@pytest.mark.parametrize("host", [200_000, 100_000])
@pytest.mark.parametrize("after", [0, 1, 7, 20])
@pytest.mark.parametrize("steps", [0, 2], ids=["on demand", "planned"])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, after: int, host: int
) -> None:
    """Every parameter is as it was before the step that failed, or as it would be after it."""
    with language(tmp_path, host=host) as (model, optimizer):
        right = [masters(model, optimizer)]
        for index in range(6):
            step(model, optimizer, index)
            right.append(masters(model, optimizer))
    with language(tmp_path, host=host) as (model, optimizer):
        for index in range(steps):
            step(model, optimizer, index)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full(after))
            with pytest.raises(TierFailure) as caught:  # noqa: PT012 - whichever step it is
                for done in range(steps, 6):
                    step(model, optimizer, done)
        assert "patrickstar-" in str(caught.value)
        assert "No space left on device" in str(caught.value)
        found = masters(model, optimizer)
        for name, value in found.items():
            assert torch.equal(value, right[done][name]) or torch.equal(value, right[done + 1][name]), name
        weights = model.state_dict()
        assert all(torch.equal(value, found[f"{name}/master"].bfloat16()) for name, value in weights.items())
        with pytest.raises(TierFailure, match="No space left on device"):
            step(model, optimizer, 6)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_truncated_file_leaves_the_weights_in_memory(tmp_path: Path) -> None:
    with language(tmp_path) as (model, optimizer):
        for index in range(3):
            step(model, optimizer, index)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        file = hooks_of(model).engine.store.file
        os.truncate(f"/proc/self/fd/{file._file}", BLOCK_BYTES)
        with pytest.raises(TierFailure, match="it was truncated"):
            optimizer.state_dict(masters=True)
        with pytest.raises(TierFailure, match="it was truncated"):
            step(model, optimizer, 3)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_no_room_shows_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    model = models.Language()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TierFailure, match=r"cannot allocate .* No space left on device"):
        chunked(model, SPEC, budget=below(10**6, tmp_path))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
