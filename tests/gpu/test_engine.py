"""The engine on a CUDA device: bit for bit the same wherever things lie, and as a plain loop that holds everything.

With ``PS_FAKE_CUDA=1`` a device that the CPU plays stands in, which shows that these tests run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import _on_cuda as on
from _states import masters_of
from ps_core import SGD, AdamW, Budget, DeviceOutOfMemory, InvalidInput, Options, TorchOptimizer
from ps_core._plan import Queue
from ps_core.engine import chunked, materialized, profiled, release, statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(on.MISSING, reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
ADAMW = on.ADAMW
MIB = 1024**2
ROOMY = 16 * MIB


def middle(least: int) -> int:
    """Room for more than that, and not for all."""
    return max(MIB, 2 * least)


@pytest.fixture(autouse=True)
def same_bits() -> Iterator[None]:
    """Kernels that add in no fixed order would hide what these tests look for."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    if not on.FAKE:
        on.warm_up()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("precision", "checkpointing", "micro_batches"),
    [("bf16", False, 1), ("bf16", True, 3), ("fp16", True, 1), ("fp32", False, 1), ("fp32", True, 3)],
)
def test_where_things_lie_changes_no_bit(precision: str, checkpointing: bool, micro_batches: int) -> None:
    least = on.tight(precision, micro_batches, checkpointing=checkpointing)
    runs = [
        on.train(
            ADAMW, size, precision=precision, checkpointing=checkpointing, micro_batches=micro_batches,
            max_grad_norm=0.5, options=options,
        )
        for size, options in (
            (ROOMY, Options(group_bytes=32 * 1024, poison=True)),
            (middle(least), Options(group_bytes=32 * 1024, poison=True)),
            (least, Options(group_bytes=32 * 1024, poison=True)),
            (ROOMY, Options(group_bytes=100_000, prefetch=1)),
        )
    ]  # fmt: skip
    roomy, between, tight, other = runs
    for each in (between, tight, other):
        assert not roomy.differs(each)
    assert tight.statistics.evictions > roomy.statistics.evictions
    assert roomy.on_device >= between.on_device >= tight.on_device
    assert roomy.on_device > tight.on_device, "with room the states are on the device, and it steps them"
    assert roomy.losses[-1] < roomy.losses[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "ASGD", "Rprop"])
def test_optimizers_of_pytorch_on_either_tier(name: str, precision: str) -> None:
    """A card may round their operations otherwise than the CPU does."""
    spec = TorchOptimizer(getattr(torch.optim, name), lr=1e-3)
    sizes = (ROOMY, on.tight(precision))
    roomy, tight = (on.train(spec, size, precision=precision, max_grad_norm=0.5) for size in sizes)
    assert roomy.on_device > tight.on_device
    assert tight.losses == pytest.approx(roomy.losses, rel=1e-5 if precision == "fp32" else 1e-2)
    assert not (on.FAKE and roomy.differs(tight))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_steps_within_backward(precision: str, on_device: bool) -> None:
    expected = on.train(ADAMW, ROOMY, precision=precision)
    run = on.train_early("in_backward", on.tight(precision), on_device=on_device, precision=precision)
    run.norms = expected.norms  # it keeps no gradient to measure them
    assert not expected.differs(run)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_steps_within_backward_are_undone(precision: str) -> None:
    how: dict[str, Any] = {"precision": precision, "steps": len(on.LIMITS), "max_grad_norm": on.LIMITS}
    run = on.train_early("speculative", on.tight(precision), on.LIMITS.index(on.STRICT), **how)
    assert not on.train(ADAMW, ROOMY, **how).differs(run)
    on.check_undone(run)


@pytest.mark.parametrize("roomy", [True, False])
@pytest.mark.parametrize(("precision", "micro_batches"), [("bf16", 1), ("bf16", 3), ("fp16", 1), ("fp32", 3)])
def test_as_a_plain_loop(precision: str, micro_batches: int, roomy: bool) -> None:
    size = ROOMY if roomy else on.tight(precision, micro_batches)
    plain = on.train_plain(ADAMW, precision, max_grad_norm=0.5, micro_batches=micro_batches)
    got = on.train(ADAMW, size, precision=precision, max_grad_norm=0.5, micro_batches=micro_batches)
    got.values = {name: got.values[name] for name in plain.values}
    assert not plain.differs(got)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    torch.manual_seed(1)
    with on.managed(on.Model(), SGD(lr=0.1), on.tight("fp16"), precision="fp16") as (model, optimizer, _):
        on.train_step(model, optimizer, 0)
        before = masters_of(optimizer.state_dict(masters=True))
        (optimizer.scale(model(on.batch(1))) * float("inf")).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = masters_of(optimizer.state_dict(masters=True))
        assert optimizer.last_skipped
        assert all(torch.equal(before[index], after[index]) for index in before)
        on.train_step(model, optimizer, 2)
        assert not optimizer.last_skipped


def test_torchs_own_clipping() -> None:
    torch.manual_seed(1)
    with on.managed(on.Model(), SGD(lr=0.1), on.tight(), precision="bf16") as (model, optimizer, _):
        model(on.batch(0)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert norm.device == on.WHERE
        optimizer.step()
        assert norm.item() == pytest.approx(optimizer.last_norm / 0.01 * norm.item(), rel=1e-3)
        optimizer.zero_grad()


# Memory.


def test_the_budget_is_kept_by_the_allocators_own_figures() -> None:
    """Once what the model takes is known; everything that PyTorch has allocated counts, but what was there before."""
    size = MIB if on.FAKE else max(2 * MIB, 2 * on.tight(checkpointing=True))
    torch.manual_seed(1)
    runtime, model = on.new_runtime(), on.Model(checkpointing=True)
    before = runtime.allocated().now
    with on.managed(model, ADAMW, size, runtime=runtime, precision="bf16") as (made, optimizer, _):
        for index in range(6):
            if index == 3:
                runtime.reset_peak()
            on.train_step(made, optimizer, index)
        peak = runtime.allocated().peak - before
        assert peak <= size
        assert statistics(made).tiers["device"].peak_bytes <= size


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_loses_one_step_and_nothing_else(where: str) -> None:
    size = MIB if on.FAKE else middle(on.tight())
    expected = on.train(ADAMW, size, precision="bf16")
    torch.manual_seed(3)
    runtime = on.new_runtime()
    losses = []
    with on.managed(on.Model(), ADAMW, size, runtime=runtime, precision="bf16") as (model, optimizer, _):
        for index in range(on.STEPS):
            if index == 3:
                replans = statistics(model).replans
                kind = DeviceOutOfMemory if where == "forward" else torch.OutOfMemoryError
                with too_much(runtime, model, where), pytest.raises(kind, match="CUDA out of memory"):
                    on.train_step(model, optimizer, index)
                optimizer.zero_grad()
            losses.append(on.train_step(model, optimizer, index))
        assert statistics(model).replans > replans, "the next plan leaves more room"
        # On a card the first pass may take more than was foreseen on the CPU's operators.
        assert statistics(model).planned_passes >= (3 if on.FAKE else 1)
    assert losses == expected.losses


@contextlib.contextmanager
def too_much(runtime: Any, model: Any, where: str) -> Iterator[None]:
    """Ask for more memory than there is."""
    if on.FAKE:
        runtime.allocator.limit_bytes = 1 << 28
    model.appetite[where] = 2 * runtime.free_bytes()[1]
    yield
    model.appetite.clear()


def test_host_memory_is_pinned() -> None:
    with on.managed(on.Model(), ADAMW, on.tight(), precision="bf16") as (model, _, _):
        engine: Any = model.table.weight._owner
        homes = [chunk.home.memory for group in engine.groups for chunk in group.chunks.values() if chunk.home.tier]
        assert homes
        assert on.FAKE or all(memory.is_pinned() for memory in homes)


# Order.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.skipif(on.FAKE, reason="the played device is late by itself")
def test_however_late_copies_and_kernels_are(seed: int) -> None:
    arguments: dict[str, Any] = {"precision": "bf16", "micro_batches": 1 + seed % 2, "checkpointing": seed > 1}
    expected = on.train(ADAMW, ROOMY, **arguments)
    runtime = on.Slow(seed)
    for between in (runtime.dawdle, lambda: None):
        size = on.tight("bf16", 1 + seed % 2, checkpointing=seed > 1)
        assert not expected.differs(on.train(ADAMW, size, runtime=runtime, between=between, **arguments))


@pytest.mark.skipif(on.FAKE, reason="there is one stream")
def test_on_streams_of_the_users_own() -> None:
    expected = on.train(ADAMW, ROOMY, precision="bf16")
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()]  # type: ignore[no-untyped-call]
    on.warm_up(*streams)
    torch.manual_seed(3)  # behind the models that warmed up
    losses = []
    with on.managed(on.Model(), ADAMW, on.tight(), precision="bf16") as (model, optimizer, _):
        for index in range(on.STEPS):
            stream = streams[index % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
                losses.append(on.train_step(model, optimizer, index))
    assert losses == expected.losses


# What users see.


def test_from_meta_alone() -> None:
    """Buffers too, and what stays in single precision."""
    torch.manual_seed(1)
    with torch.device("meta"):
        model = on.Model()
    options = Options(group_bytes=32 * 1024, keep_fp32=("*norm*",))
    with on.managed(model, ADAMW, ROOMY, precision="bf16", options=options) as (made, optimizer, _):
        assert all(bool((buffer == 1).all()) and buffer.device == on.WHERE for buffer in made.buffers())
        losses = [on.train_step(made, optimizer, index) for index in range(4)]
        assert {name for name, p in made.named_parameters() if p.dtype == torch.float32} == {
            name for name, _ in made.named_parameters() if "norm" in name
        }
    assert losses[-1] < losses[0]


@pytest.mark.skipif(on.FAKE, reason="it has no name")
def test_by_name_from_meta_and_from_the_device() -> None:
    for build_on, name in (("meta", "cuda"), ("cuda", "cuda:0")):
        torch.manual_seed(1)
        with torch.device("meta" if build_on == "meta" else "cpu"):
            model: Any = on.Model()
        model, optimizer = chunked(
            model.cuda() if build_on == "cuda" else model, ADAMW, device=name,
            budget=Budget(device=None if build_on == "meta" else "64MiB", host=on.HOST), precision="bf16",
            options=Options(keep_fp32=("*norm*",)),
        )  # fmt: skip
        assert {each.device for each in (*model.parameters(), *model.buffers())} == {on.WHERE}
        losses = [on.train_step(model, optimizer, index) for index in range(4)]
        assert losses[-1] < losses[0]
        state = model.state_dict()
        with materialized(model, names=["blocks.0.wide.weight"]):
            assert torch.equal(model.blocks[0].wide.weight.cpu(), state["blocks.0.wide.weight"].cpu())
        release(model)
        assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"cpu"}
        assert torch.isfinite(model.cuda().to(torch.bfloat16)(on.batch(0)))
    with pytest.raises(InvalidInput, match="this computer has"):
        chunked(on.Model(), None, device=f"cuda:{torch.cuda.device_count()}")


def test_the_tutorials_model() -> None:
    """In as little as it takes: 1 MiB on the played device."""

    losses, seen = tutorial(MIB if on.FAKE else on.least(lambda size: tutorial(size, 3)), 12)
    assert seen.planned_passes >= 10
    assert seen.moved_bytes["host->device"] > 0
    assert losses[-1] < 2.0 < losses[0]


def tutorial(size: int, steps: int) -> tuple[list[float], Any]:
    """Losses, and what the engine counted."""
    from ps_models import build

    torch.manual_seed(0)
    shape = {"layers": 8, "hidden": 64, "heads": 4, "vocabulary": 32, "positions": 32}
    model = build("gpt2", "meta", checkpoint_blocks=True, **shape)
    generator, losses = torch.Generator().manual_seed(1), []
    made = on.managed(model, AdamW(lr=3e-3), size, precision="bf16", options=Options())
    with made as (model, optimizer, _):
        for _ in range(steps):
            start = torch.randint(26, (4, 1), generator=generator)
            tokens = ((start + torch.arange(32)) % 26).to(on.WHERE)
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, statistics(model)


def test_evaluation_and_generation_between_steps() -> None:
    expected = on.train(ADAMW, on.tight(), precision="bf16")
    torch.manual_seed(3)
    losses = []
    with on.managed(on.Model(), ADAMW, on.tight(), precision="bf16") as (model, optimizer, _):
        for index in range(on.STEPS):
            losses.append(on.train_step(model, optimizer, index))
            with torch.no_grad():
                assert torch.isfinite(model(on.batch(100 + index, rows=2)))
    assert losses == expected.losses


def test_times_of_a_profile_are_within_its_block() -> None:
    """Times of streams, by events, and of the worker's thread are of one clock."""
    with on.managed(on.Model(), ADAMW, on.tight(), precision="bf16") as (model, optimizer, _):
        for index in range(2):
            on.train_step(model, optimizer, index)
        before, began = statistics(model).moved_bytes["host->device"], time.perf_counter()
        with profiled(model) as profile:
            for index in range(2):
                on.train_step(model, optimizer, index)
        whole = time.perf_counter() - began
        moved = statistics(model).moved_bytes["host->device"] - before
    assert sum(piece.bytes for piece in profile.measured if piece.queue is Queue.H2D) == moved > 0
    assert min(piece.begin_s for piece in profile.measured) >= 0
    assert max(piece.end_s for piece in profile.measured) <= whole
    found = profile.summary()
    assert sum(found.idle_s.values()) == pytest.approx(found.seconds - found.busy_s)
