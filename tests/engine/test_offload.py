"""Activations that wait in the host's memory: the same bits, fewer bytes on the accelerator, counted and in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from _cases import finish
from _fake_cuda import FakeRuntime
from _reference import Loop, Make, Settings, differences, plain
from _runs import HOST, check_same, chunked_model, managed, stand_in, tightest
from ps_core import AdamW, Budget, DoesNotFit, Options, PlanMismatch
from ps_core._extents import Kind, SegmentName
from ps_core._plan import Copy, Queue, slots_of
from ps_core._planner.search import Planned
from ps_core._verify import verify
from ps_core.engine import offloaded, statistics, trace
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._execution.plan_driver import PlanDriver

BLOCKS, WIDTH, ROWS = 6, 32, 64
KEPT_BYTES = ROWS * WIDTH * 4
"""What a block keeps for backward in fp32: its input."""
ROOMY = "4MiB"
"""All fits on the device."""
SMALL = "70KiB"
"""Activations have to leave the device, and weights too."""


class Block(nn.Module):
    breaks = False
    """True: its next backward pass breaks off."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        if self.breaks and x.requires_grad:
            x.register_hook(self._break)
        return x + torch.tanh(self.linear(self.norm(x)) + shift)

    def _break(self, gradient: Tensor) -> None:
        raise ArithmeticError("as asked")


class Net(nn.Module):
    """Blocks whose inputs are kept, here or elsewhere; what all of them get too is never moved."""

    def __init__(self, *, away: bool = True, bare: bool = False) -> None:
        """``bare``: the caller makes the loss, so that the first pass is not foreseen."""
        super().__init__()
        self.away, self.bare = away, bare
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        x, shift = self.first(rows), torch.ones(WIDTH, dtype=rows.dtype, device=rows.device)
        for block in self.blocks:
            if self.away:
                with offloaded(block, x):
                    x = checkpoint(block, x, shift, use_reentrant=False)
            else:
                x = checkpoint(block, x, shift, use_reentrant=False)
        out: Tensor = self.head(x)
        return out if self.bare else loss_of(out)


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def rows(index: int, count: int = ROWS) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(index))


def loop(make: Make, *, away: bool = True, steps: int = 4, micro_batches: int = 1, bare: bool = False) -> list[Tensor]:
    model, optimizer = make(Net(away=away, bare=bare), AdamW(lr=1e-2))
    logs = []
    for index in range(steps):
        for micro in range(micro_batches):
            x = rows(10 * index + micro)
            found = model(x.to(model.head.weight.dtype))
            loss = loss_of(found) if bare else found
            optimizer.scale(loss).backward()
            logs.append(loss.detach())
        finish(optimizer)
    return logs


@pytest.mark.parametrize(("precision", "micro_batches"), [("fp32", 2), ("bf16", 1)])
def test_the_same_bits_in_less_memory(precision: str, micro_batches: int) -> None:
    settings = Settings(
        precision=precision, accumulation_steps=micro_batches, options=Options(poison=True, group_bytes=4096)
    )

    def attempt(size: int, *, away: bool) -> Any:
        run = partial(loop, away=away, micro_batches=micro_batches)
        return managed(run, settings, stand_in, Budget(device=size, host=HOST))

    size, got = tightest(partial(attempt, away=True), rounds=1)
    check_same(partial(loop, micro_batches=micro_batches), settings, got)
    assert got.evictions > 0
    with pytest.raises(DoesNotFit):
        attempt(size, away=False)


def test_nonmodel_bytes_are_fewer_by_what_is_offloaded() -> None:
    kept, away = (trace(Net(away=away), (rows(0),)).peak_nonmodel_bytes for away in (False, True))
    assert kept - away == (BLOCKS - 1) * KEPT_BYTES


def planned(model: Any) -> Planned:
    found: Planned = hooks_of(model).engine.passes.scheduler.planned
    return found


def copies(plan: Planned, *queues: Queue) -> int:
    """How often a step copies activations."""
    instrs = [instr for name in plan.program.iteration() for instr in plan.plan.segment(name).instrs]
    moves = [instr for instr in instrs if isinstance(instr.op, Copy) and instr.op.extent.kind is Kind.ACT]
    return sum(instr.queue in queues for instr in moves)


def step(model: Any, optimizer: Any, index: int) -> None:
    model(rows(index)).backward()
    finish(optimizer)


def told(device: str, **more: Any) -> dict[str, Any]:
    return {
        "budget": Budget(device=device, host=HOST, **more),
        "precision": "fp32",
        "options": Options(group_bytes=4096),
    }


def test_what_moves_is_what_was_planned() -> None:
    with chunked_model(Net(), **told(SMALL)) as (model, optimizer):
        step(model, optimizer, 0)
        first = statistics(model)
        for index in range(1, 5):
            step(model, optimizer, index)
        last, plan = statistics(model), planned(model)
        assert last.planned_passes == last.passes == 5
        assert last.divergences == last.replans == 0, "non-model bytes were as foreseen"
        assert last.tiers["host"].current_bytes == first.tiers["host"].current_bytes
        for link, count in plan.prediction.moved_bytes.items():
            if link != "wire":
                assert last.moved_bytes[link] - first.moved_bytes[link] == 4 * count
        assert copies(plan, Queue.D2H) == copies(plan, Queue.H2D) == 5
        assert len(plan.program.trace.activations) == BLOCKS
        assert hooks_of(model).engine.activations.bytes == 0


def test_the_checker_refuses_a_plan_with_a_wait_less() -> None:
    """Of every instruction that touches an activation's slot: it is not used again while its bytes are wanted."""
    with chunked_model(Net(), **told(SMALL)) as (model, optimizer):
        step(model, optimizer, 0)
        plan = planned(model)
    segment = plan.plan.segment(SegmentName.MICRO_LAST)
    moves = [each.op for each in segment.instrs if isinstance(each.op, Copy) and each.op.extent.kind is Kind.ACT]
    slots = {slot for move in moves for slot in slots_of(move)}
    touching = [each for each in segment.instrs if each.after and slots.intersection(slots_of(each.op))]
    assert len(touching) > 20
    for one in touching:
        broken = replace(
            segment, instrs=tuple(replace(each, after=()) if each is one else each for each in segment.instrs)
        )
        others = tuple(broken if each is segment else each for each in plan.plan.segments)
        with pytest.raises(PlanMismatch, match=f"instruction {one.id} "):
            verify(plan.program, replace(plan.plan, segments=others))


def test_where_all_fits_nothing_moves() -> None:
    with chunked_model(Net(), **told(ROOMY)) as (model, optimizer):
        step(model, optimizer, 0)
        before = statistics(model).moved_bytes
        for index in range(1, 3):
            step(model, optimizer, index)
        assert statistics(model).moved_bytes == before


def odd(make: Make) -> list[Tensor]:
    """Passes that a plan does not know, between those that it does."""
    model, optimizer = make(Net(), AdamW(lr=1e-2))
    logs = []

    def forward(index: int, count: int = ROWS) -> Tensor:
        loss: Tensor = model(rows(index, count))
        logs.append(loss.detach())
        return loss

    def ordinary(index: int) -> None:
        forward(index).backward()
        finish(optimizer)

    for index in range(3):
        ordinary(index)
    forward(3)  # no backward pass: what is away is forgotten with its graph
    ordinary(4)
    loss = forward(5)
    loss.backward(retain_graph=True)
    loss.backward()
    finish(optimizer)
    ordinary(6)
    (forward(7) + forward(8)).backward()
    finish(optimizer)
    ordinary(9)
    early = forward(10)
    ordinary(11)
    del early
    forward(12, ROWS // 2).backward()
    finish(optimizer)
    model.blocks[2].breaks = True
    with pytest.raises(ArithmeticError):
        forward(13).backward()
    model.blocks[2].breaks = False
    optimizer.zero_grad()
    for index in range(14, 17):
        ordinary(index)
    return logs


@pytest.mark.parametrize("host", [HOST, None])
def test_passes_that_leave_the_plan(host: str | None, tmp_path: Any) -> None:
    """With a disk the host is full, and what leaves its plan waits there."""
    settings = Settings(precision="fp32", options=Options(poison=True, group_bytes=4096))
    small = Budget(device="120KiB", host="96KiB", disk="4MiB", disk_dir=str(tmp_path))
    got = managed(odd, settings, stand_in, small if host is None else Budget(device="120KiB", host=host))
    assert not differences(plain(odd, settings), got)
    (counted,) = got.statistics
    assert counted.planned_passes >= 8
    assert counted.divergences >= 4
    if host is None:
        assert counted.moved_bytes["host->disk"] > 0


def test_only_what_backward_wants_goes() -> None:
    with chunked_model(Net(), **told(SMALL)) as (model, optimizer):
        step(model, optimizer, 0)
        before = statistics(model).moved_bytes["device->host"]
        with torch.no_grad():
            model(rows(1))
        assert statistics(model).moved_bytes["device->host"] == before
        room = hooks_of(model).engine.activations
        losses = [model(rows(index)) for index in range(3)]  # and no backward pass: each leaves its plan
        assert room.bytes > BLOCKS * KEPT_BYTES
        losses.clear()
        step(model, optimizer, 3)
        step(model, optimizer, 4)
        assert room.bytes == 0


def test_a_larger_batch_is_planned_anew() -> None:
    def run(make: Make) -> list[Tensor]:
        model, optimizer = make(Net(), AdamW(lr=1e-2))
        logs = []
        for count in (8, ROWS, 8, 2 * ROWS, 8):
            logs.append(model(rows(count, count)))
            logs[-1].backward()
            finish(optimizer)
        return [each.detach() for each in logs]

    settings = Settings(precision="fp32", options=Options(group_bytes=4096))
    got = managed(run, settings, stand_in, Budget(device="128KiB", host=HOST))
    assert not differences(plain(run, settings), got)
    (counted,) = got.statistics
    assert (counted.replans, counted.planned_passes) == (2, 5), "each larger batch is traced first"


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("host", ["125KiB", "133KiB"])
def test_a_larger_batch_where_the_host_has_no_room_for_all_activations(host: str, bare: bool) -> None:
    """Some stay on the device, with a plan for that batch and on demand."""

    def run(make: Make) -> list[Tensor]:
        model, optimizer = make(Net(bare=bare), AdamW(lr=1e-2))
        logs = []
        for count in (32, 64, 32, 64):
            found = model(rows(count, count).bfloat16())
            logs.append(loss_of(found) if bare else found)
            logs[-1].backward()
            finish(optimizer)
        return [each.detach() for each in logs]

    settings = Settings(precision="bf16")
    got = managed(run, settings, "emulated", Budget(device="36KiB", host=host))
    assert not differences(plain(run, settings), got)
    (counted,) = got.statistics
    assert (counted.replans, counted.planned_passes) == ((1, 2) if bare else (1, 4))
    assert counted.tiers["device"].peak_bytes <= 36 * 1024


def test_a_plan_without_room_for_what_stays_is_left() -> None:
    """An activation that is offloaded only now and then is in no plan; where the host is full it stays, counted."""

    def run(make: Make) -> list[Tensor]:
        net = Net(away=False)
        model, optimizer = make(net, AdamW(lr=1e-2))
        logs = []
        for away in (False, True, False, True):
            net.away = away
            logs.append(model(rows(0)))
            logs[-1].backward()
            finish(optimizer)
        return [each.detach() for each in logs]

    settings = Settings(precision="fp32", options=Options(group_bytes=4096))
    got = managed(run, settings, stand_in, Budget(device="150KiB", host="80KiB"))
    assert not differences(plain(run, settings), got)
    (counted,) = got.statistics
    assert (counted.planned_passes, counted.divergences) == (2, 2)
    assert counted.tiers["device"].peak_bytes <= 150 * 1024


@pytest.mark.parametrize("before", [16, ROWS])
def test_a_larger_batch_on_demand_may_use_memory_of_the_plan(before: int) -> None:
    """A batch that trains by itself also trains after a smaller one: the smaller one's plan lends its memory."""
    with chunked_model(Net(), **told("90KiB") | {"budget": Budget(device="90KiB", host="175KiB")}) as (
        model,
        optimizer,
    ):
        for count in (before, 96, 96):
            model(rows(0, count)).backward()
            finish(optimizer)
        assert statistics(model).planned_passes == 2


def test_on_a_played_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a wait that is left out shows."""
    settings, run = Settings(precision="fp32", options=Options(group_bytes=4096)), partial(loop, steps=3)

    def on_cuda(seed: int, run: Loop = run, size: str = SMALL) -> Any:
        runtime = FakeRuntime(seed, device_thread=seed != 2)
        with runtime:
            return managed(run, settings, partial(CudaDevice, runtime), Budget(device=size, host=HOST))

    got = on_cuda(3, odd, "144KiB")
    assert not differences(plain(odd, settings), got)
    assert got.statistics[0].divergences >= 4
    expected = plain(run, settings)
    for seed in (1, 2):
        got = on_cuda(seed)
        assert not differences(expected, got)
        assert got.statistics[0].moved_bytes["host->device"] >= 3 * 5 * KEPT_BYTES
    monkeypatch.setattr(PlanDriver, "_wait_for_others", lambda self, instr: None)
    assert any(differences(expected, on_cuda(seed)) for seed in (1, 2))


def test_a_host_that_is_too_small_is_refused_by_name() -> None:
    """As with anything else of a plan: the tightest host that is named is enough, and less is not."""

    def run(host: int | str) -> Any:
        settings = Settings(precision="fp32", options=Options(group_bytes=4096))
        return managed(partial(loop, steps=2), settings, "emulated", Budget(device=SMALL, host=host))

    host = run(HOST).statistics[0].tiers["host"].peak_bytes
    assert run(host).statistics[0].tiers["host"].peak_bytes <= host
    with pytest.raises(DoesNotFit) as refused:
        run(host // 2)
    assert (refused.value.available_bytes, refused.value.tier) == (host // 2, "host")


def test_a_refused_larger_batch_leaves_no_larger_slots() -> None:
    """A smaller activation in a larger slot would take host memory that the next blocks need."""
    budget = Budget(device="70KiB", host="160KiB")
    with chunked_model(Net(bare=True), device="emulated", budget=budget, precision="fp32") as (model, optimizer):
        with pytest.raises(DoesNotFit, match="moving activations there', more than the 163,840 bytes"):
            loss_of(model(torch.randn(ROWS + 8, WIDTH))).backward()
        optimizer.zero_grad()
        for _ in range(3):
            loss_of(model(torch.randn(ROWS, WIDTH))).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_slots_kept_for_reuse_are_released_when_the_host_is_short() -> None:
    with chunked_model(Net(), **told(SMALL)) as (model, optimizer):
        step(model, optimizer, 0)
        engine = hooks_of(model).engine
        losses = [model(rows(index)) for index in range(2)]
        losses.clear()
        kept, store, undone = engine.activations.bytes, engine.store, []
        assert kept > 0
        store.free_optional_by(lambda: undone.append("early steps"))
        slot = store.reserve(1, store.free_bytes(1) + kept)
        assert engine.activations.bytes == 0
        with pytest.raises(DoesNotFit):
            store.reserve(1, store.free_bytes(1) + 128)
        assert not undone, "nothing optional is given up where that makes no room"
        store.release(slot, Queue.COMPUTE)


@pytest.mark.parametrize("bare", [False, True])
def test_onto_a_disk(bare: bool, tmp_path: Any) -> None:
    """By the plan, and in a first pass on demand, which finds the host full."""
    settings = Settings(precision="fp32", options=Options(poison=True, group_bytes=4096))
    budget = Budget(device="96KiB", host="48KiB", disk="4MiB", disk_dir=str(tmp_path))
    run = partial(loop, steps=3, bare=bare)
    got = managed(run, settings, stand_in, budget)
    check_same(run, settings, got)
    assert got.statistics[0].planned_passes == 3 - bare
    with chunked_model(Net(), device="emulated", budget=budget, precision="fp32", options=settings.options) as (
        model,
        optimizer,
    ):
        step(model, optimizer, 0)
        assert copies(planned(model), Queue.DISK_W, Queue.DISK_R) > 0


class Mirrored(nn.Module):
    """Blocks whose inputs are conjugate views, or inputs of which autograd saves one."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)) for _ in "12")

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x / 2)
        for index, (real, imaginary) in enumerate(zip(self.real, self.imaginary, strict=True)):
            block = partial(self._block, real, imaginary)
            with offloaded(real, z):
                z = checkpoint(block, z.conj(), use_reentrant=False)
            z = z.conj() if index % 2 else z
        return z.abs()

    @staticmethod
    def _block(real: nn.Module, imaginary: nn.Module, z: Tensor) -> Tensor:
        return torch.complex(real(z.real.contiguous()), imaginary(z.imag.contiguous())).tanh()


@pytest.mark.parametrize("size", [SMALL, ROOMY])
def test_conjugate_views_stay(size: str) -> None:
    def mirrored(make: Make) -> list[Tensor]:
        model, optimizer = make(Mirrored(), AdamW(lr=1e-2))
        logs = []
        for index in range(3):
            logs.append(loss_of(model(rows(index, 4))))
            logs[-1].backward()
            finish(optimizer)
        return logs

    settings = Settings(precision="fp32", options=Options(poison=True, group_bytes=4096))
    check_same(mirrored, settings, managed(mirrored, settings, stand_in, Budget(device=size, host=HOST)))


@pytest.mark.parametrize("device", ["cpu", None])
def test_where_nothing_moves_nothing_changes(device: str | None) -> None:
    settings = Settings(precision="fp32")
    run: Loop = partial(loop, steps=2)
    if device is not None:
        got = managed(run, settings, device, Budget(host=HOST))
        assert not got.statistics[0].moved_bytes
        assert not differences(plain(partial(loop, away=False, steps=2), settings), got)
        return
    one, other = Net(), Net(away=False)
    other.load_state_dict(one.state_dict())
    losses: list[Callable[[], Tensor]] = [lambda: one(rows(0)), lambda: other(rows(0))]
    for make in losses:
        make().backward()
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)
