"""Ranks that train on CUDA devices which the CPU plays, against the same ranks on the emulated accelerator."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ps_dist
from _checked_cuda import CheckedCuda
from _expert_cases import Experts, one_step
from _fake_cuda import FakeRuntime
from _one_process import check_homes
from _transport_cases import given_up
from _zero_cases import Way, batches, passes, states
from ps_core import SGD, Budget, Options, RanksDiverged
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._sharding import collective_streams as beside
from ps_core.engine._sharding.collective_streams import CollectiveWaits
from ps_dist._nccl import NcclMessages

STEPS = 2


class Reached:
    """A mark of a stream that has come to it, or never will."""

    def __init__(self, reached: bool) -> None:
        self._reached = reached

    def query(self) -> bool:
        return self._reached


@contextmanager
def from_card_to_card(each: ps_dist.TorchCollectives, wanted: bool = True) -> Iterator[None]:
    """As with NCCL, whose messages gloo carries here: between devices that the CPU plays it can."""
    if wanted:
        each.use_nccl(each.nccl_messages(each._groups.host, torch.device("cpu")))
        assert each.statistics().transport == "nccl"
    try:
        with mock.patch.object(NcclMessages, "mark", return_value=Reached(reached=True)):
            yield
    finally:
        each._session.nccl = None


@dataclass
class Found:
    """What a training came to."""

    losses: list[float]
    norms: list[float | None]
    states: dict[str, Tensor]
    wire_bytes: dict[str, int]


def trained(each: ps_dist.TorchCollectives, way: Way) -> Found:
    """Some steps on this rank's parts of their batches, with an evaluation between."""
    before = each.statistics().wire_bytes
    model, optimizer = way.chunked(each, 1)
    losses, norms = [], list[float | None]()
    for step in range(STEPS):
        parts = list(batches(step, each.mesh.size * way.accumulate))
        losses += passes(model, optimizer, parts[each.mesh.rank :: each.mesh.size], len(parts))
        if step:
            with torch.no_grad():  # while gradients lie over the weights
                losses.append(float(model(parts[0][0]).float().sum()))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_norm)
    check_memory(model, each, accumulates=way.accumulate > 1)
    rows = states(optimizer) | {name: value.clone() for name, value in model.state_dict().items()}
    release(model)
    after = each.statistics().wire_bytes
    return Found(losses, norms, rows, {name: after[name] - before.get(name, 0) for name in after})


def check_memory(model: Any, each: ps_dist.TorchCollectives, *, accumulates: bool) -> None:
    """Within the budget; between steps there are shards, and memory for what is on its way."""
    found, engine = statistics(model), hooks_of(model).engine
    for name, tier in found.tiers.items():
        assert tier.peak_bytes <= tier.budget_bytes, name
    check_homes(model, each.ranks, accumulates=accumulates)
    order = engine.residency.ordering
    staging = order.staging.bytes if isinstance(order, beside.StreamCollectives) and order.staging is not None else 0
    homes = sum(chunk.home.bytes for group in engine.groups for chunk in group.chunks.values())
    assert sum(tier.current_bytes for tier in found.tiers.values()) == homes + staging


def on(way: Way, device: CudaDevice) -> Way:
    somewhere: Any = device
    return replace(way, device=somewhere)


def as_emulated(
    each: ps_dist.TorchCollectives, way: Way, seed: int, most_staging: int | None = None, *, direct: bool = False
) -> None:
    """The same losses, norms, parameters, states, and bytes on the wire."""
    wanted = trained(each, replace(way, device="emulated"))
    runtime = FakeRuntime(seed)
    limit: AbstractContextManager[Any] = nullcontext()
    if most_staging is not None:
        limit = mock.patch.object(beside, "MOST_STAGING_BYTES", most_staging)
    with runtime, limit, from_card_to_card(each, direct):
        got = trained(each, on(way, CudaDevice(runtime)))
    assert (got.losses, got.norms) == (wanted.losses, wanted.norms)
    assert got.states.keys() == wanted.states.keys()
    for name, value in wanted.states.items():
        assert torch.equal(got.states[name], value), name
    sums = {"reduce_scatter", "replicate"}  # how often a group is gathered is a matter of room
    assert {name: got.wire_bytes.get(name) for name in sums} == {name: wanted.wire_bytes.get(name) for name in sums}


def directly(each: ps_dist.TorchCollectives, way: Way, seed: int) -> None:
    """The same from card to card."""
    as_emulated(each, way, seed, direct=True)


def other_experts(each: ps_dist.TorchCollectives, direct: bool) -> None:
    """A group that some ranks gather, and others only have a part of; gradients that only some have."""
    found = []
    for seed in (None, 5):
        runtime = FakeRuntime(seed)
        device: Any = "emulated" if seed is None else CudaDevice(runtime)
        torch.manual_seed(0)
        with nullcontext() if seed is None else runtime, from_card_to_card(each, direct and seed is not None):
            model, optimizer = chunked(
                Experts(), SGD(lr=0.01), precision="fp32", collectives=each, device=device,
                budget=Budget(device="64KiB", host="16MiB"), options=Options(group_bytes=256, poison=True),
            )  # fmt: skip
            assert optimizer is not None
            losses = []
            for step in range(5):
                losses.append(one_step(model, step, each.mesh.rank))
                optimizer.step()
                optimizer.zero_grad()
            found.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
            release(model)
    (wanted, weights), (losses, others) = found
    assert losses == wanted
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def left_out(fault: str) -> ExitStack:
    """An ordering bug, for as long as the block."""
    stack, kind = ExitStack(), beside.StreamCollectives
    if fault == "the stream does not wait":
        stack.enter_context(mock.patch.object(kind, "ready", return_value=()))
        stack.enter_context(mock.patch.object(CollectiveWaits, "before_next"))
    if fault == "nobody waits for the stream":
        stack.enter_context(mock.patch.object(kind, "after"))
    return stack


def unordered(each: ps_dist.TorchCollectives, way: Way, fault: str, direct: bool = False) -> set[str]:
    """What the checker says of a training with an ordering bug: which kinds of work may meet."""
    runtime = FakeRuntime(3)
    with runtime, left_out(fault), from_card_to_card(each, direct):
        device = CheckedCuda(runtime)
        trained(each, on(way, device))
    assert "ps_dist collectives" in runtime.adopted
    return device.unordered


@dataclass
class Counted:
    """What one rank did in one step besides computing."""

    collectives: int
    """Gathers, sums and messages."""
    messages: int
    """In host memory."""
    waits: int
    """How often the thread of collectives waited for its stream."""


def counted_steps(each: ps_dist.TorchCollectives, precision: str, device: Any) -> tuple[list[Counted], Any]:
    """Train by a plan, but for the first pass; what each step took, and the weights."""
    torch.manual_seed(0)
    size = 4 if precision == "fp32" else 2
    model, optimizer = chunked(
        nn.Sequential(*(nn.Linear(40, 40) for _ in range(5))), SGD(lr=0.1), device=device, precision=precision,
        collectives=each, budget=Budget(device="48KiB", host="16MiB"),
        options=Options(group_bytes=40 * 42 * size, poison=True),
    )  # fmt: skip
    assert optimizer is not None
    control, copier, found = each._messages, beside.DeviceStaging, []
    for step in range(4):
        before = each.statistics().collectives
        with (
            mock.patch.object(control, "exchange", wraps=control.exchange) as messages,
            mock.patch.object(copier, "synchronize", autospec=True, side_effect=copier.synchronize) as waits,
        ):
            drawn = torch.Generator().manual_seed(10 * step + each.mesh.rank)
            model(torch.randn(3, 40, generator=drawn)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(Counted(each.statistics().collectives - before, messages.call_count, waits.call_count))
    told = statistics(model)
    assert told.planned_passes == 3, told.last_divergence
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    release(model)
    return found, weights


def says_nothing(each: ps_dist.TorchCollectives, precision: str) -> None:
    """From card to card by a plan: two messages a step, as over gloo, and no wait; all ordered, and the same bits."""
    _, wanted = counted_steps(each, precision, "emulated")
    runtime = FakeRuntime(7)
    with runtime, from_card_to_card(each):
        device = CheckedCuda(runtime)
        (*_, last), weights = counted_steps(each, precision, device)
    assert not device.unordered
    assert last.collectives - last.messages >= 10, "each group is gathered and summed"
    assert (last.messages, last.waits) == (2, 0)
    assert all(torch.equal(weights[name], value) for name, value in wanted.items())


def unordered_by_plan(each: ps_dist.TorchCollectives, fault: str) -> set[str]:
    """What the checker says of a plan that is carried out with an ordering bug."""
    runtime = FakeRuntime(7)
    with runtime, left_out(fault), from_card_to_card(each):
        device = CheckedCuda(runtime)
        counted_steps(each, "fp32", device)
    return device.unordered


class Quiet:
    """A copier that has no stream."""

    staging = torch.empty(0, dtype=torch.uint8)
    synchronized = 0

    def on_stream(self, what: str, reads: Any, writes: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        self.synchronized += 1


def waits_on_its_stream(each: ps_dist.TorchCollectives, fault: str) -> str:
    """Rank 0's device waits for rank 1's, which has not come to the same collective; what ends that.

    Rank 1 ``computes`` still, launches ``another`` collective, or none: it is ``late``. Or it has ``ended`` on another
    computer, whose kernel alone tells so.
    """
    if fault == "ended":
        each.serve(lambda group, steps: None)
        each._watchdog._local.close()
    aborted, is_late = Event(), each.mesh.rank == 1
    marks = deque([Reached(not (is_late and fault == "computes")), Reached(False)])

    def job(session: Any) -> None:
        what = "layer 1" if is_late and fault == "another" else "layer 0"
        session.on_device(Quiet()).all_gather(torch.zeros(4), torch.zeros(2), what)

    if is_late and fault == "ended":
        os.kill(os.getpid(), signal.SIGKILL)
    with from_card_to_card(each), ExitStack() as stack:
        stack.enter_context(mock.patch.object(each._session.nccl, "gather"))
        stack.enter_context(mock.patch.object(each._session.nccl, "mark", marks.popleft))
        each._watchdog.abort = aborted.set
        if not (is_late and fault == "late"):
            each.start(job).wait()  # it is launched, and no thread waits for its end
        if not is_late or fault == "another":
            assert aborted.wait(150), "the training thread may be waiting for the device, which this ends"
        while is_late and not given_up(each):
            time.sleep(0.05)
        with pytest.raises(RanksDiverged) as caught:
            each.barrier()
    return str(caught.value)


def does_not_synchronize(each: ps_dist.TorchCollectives) -> tuple[list[float], list[float]]:
    """The right losses, and those where the other thread does not wait for its own copies."""
    wanted = trained(each, on(Way(precision="bf16"), "emulated")).losses
    runtime = FakeRuntime(None)
    runtime._eagerness = 0.0  # nothing is done before somebody waits for it
    with runtime, mock.patch.object(beside.DeviceStaging, "synchronize"):
        return wanted, trained(each, on(Way(precision="bf16"), CudaDevice(runtime))).losses
