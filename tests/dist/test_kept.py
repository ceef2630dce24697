"""Memory that groups had is kept for the next pass where there is room for everything, and given back where not."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from _threads import Together, run
from ps_core import SGD, Budget, DoesNotFit, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution.hooks import hooks_of

pytestmark = pytest.mark.usefixtures("unplanned")

LAYERS, WIDTH = 3, 32


def made(
    each: Together, layers: int = LAYERS, *, device: Any = "cpu", room: str | None = None, prefetch: int | None = None
) -> tuple[Any, Any]:
    each.common_memory = None  # groups are copied into slots, of which this file is
    generator = torch.Generator().manual_seed(0)  # the ranks are threads, and would share the usual one
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH)
    rule: Any = SGD(lr=1e-3)
    return chunked(
        model,
        rule,
        device=device,
        precision="fp32",
        budget=Budget(host="4MiB") if room is None else Budget(device=room, host="4MiB"),
        collectives=each,
        options=Options(prefetch=prefetch, group_bytes=1),
    )


def step(model: Any, optimizer: Any, each: Together) -> None:
    model(torch.ones(2, WIDTH) + each.rank).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def counts_memory(each: Together) -> tuple[int, int, int]:
    model, optimizer = made(each)
    for _ in range(2):
        step(model, optimizer, each)
    engine = hooks_of(model).engine
    asked: list[int] = []
    given = engine.store.device.host
    engine.store.device.host = lambda size: asked.append(size) or given(size)  # type: ignore[method-assign]
    out = model(torch.ones(2, WIDTH))
    forward = len(asked)
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    spare, sizes = engine.store.spare.bytes, [group.weight_chunk.bytes for group in engine.groups]
    assert spare >= sum(sizes)
    assert statistics(model).tiers["host"].current_bytes <= statistics(model).tiers["host"].peak_bytes
    release(model)
    return forward, engine.store.spare.bytes, engine.store.ledger.used_bytes[0]


def test_a_forward_pass_takes_no_memory_for_groups_once_there_is_some_kept() -> None:
    found, _ = run(2, counts_memory)
    assert found == [(0, 0, 0)] * 2, "and a released model keeps none"


def binds_again(each: Together) -> None:
    model, optimizer = made(each)
    step(model, optimizer, each)
    step(model, optimizer, each)
    engine = hooks_of(model).engine
    passes = []
    for _ in range(2):
        out = model(torch.ones(2, WIDTH))
        passes.append([record.bound and record.bound.view for record in engine.records])
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(passes[0]) == LAYERS
    assert all(one is not None and one is other for one, other in zip(*passes, strict=True))
    views = [weakref.ref(view) for view in passes[0] if view is not None]
    passes.clear()
    assert all(view() is not None for view in views)
    engine.store.free_spare()
    assert all(view() is None for view in views), "or the memory would stay"
    step(model, optimizer, each)
    release(model)


def test_parameters_are_bound_again_to_what_they_were() -> None:
    run(2, binds_again)


def wants_room(each: Together) -> None:
    model, optimizer = made(each)
    for _ in range(2):
        step(model, optimizer, each)
    store = hooks_of(model).engine.store
    kept, free = store.spare.bytes, store.free_bytes(0)
    with pytest.raises(DoesNotFit):
        store.reserve(0, free + kept + 128)
    assert store.spare.bytes == 0
    step(model, optimizer, each)
    kept, free = store.spare.bytes, store.free_bytes(0)
    assert kept
    slot = store.reserve(0, free + kept)
    assert (store.spare.bytes, store.free_bytes(0)) == (0, 0)
    store.release(slot, store.queues[0])
    step(model, optimizer, each)
    release(model)


def test_what_is_kept_gives_way() -> None:
    run(2, wants_room)


def looks(each: Together) -> list[Any]:
    model, optimizer = made(each)
    step(model, optimizer, each)
    hooks_of(model).engine.store.free_spare()
    with torch.inference_mode():
        model(torch.ones(2, WIDTH))
    kept = hooks_of(model).engine.store.spare.pop_all()
    assert kept
    for slot in kept:
        assert not slot.memory.is_inference()
        hooks_of(model).engine.store.spare.put(slot)
    step(model, optimizer, each)
    state = [value.clone() for value in model.state_dict().values()]
    release(model)
    return state


def trains(each: Together) -> list[Any]:
    model, optimizer = made(each)
    for _ in range(2):
        step(model, optimizer, each)
    state = [value.clone() for value in model.state_dict().values()]
    release(model)
    return state


def test_what_an_evaluation_left_is_trained_with() -> None:
    """Memory that was taken in inference mode could not be written to outside of it."""
    (found, _), _ = run(2, looks)
    (wanted, _), _ = run(2, trains)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def grows(each: Together, prefetch: int | None, training: bool) -> tuple[list[Any], int]:
    """Batches that grow where groups are gathered ahead of need."""
    model, optimizer = made(each, layers=6, device="emulated", room="40KiB" if training else "24KiB", prefetch=prefetch)
    more = 24 if training else 48
    for rows in (4, 4, more, more):
        with torch.set_grad_enabled(training):
            found = model(torch.ones(rows, WIDTH) + each.rank).square().sum()
        if training:
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
    hits, state = statistics(model).prefetch_hits, [value.clone() for value in model.state_dict().values()]
    release(model)
    return [found.detach(), *state], hits


@pytest.mark.parametrize("training", [False, True])
def test_what_was_gathered_ahead_gives_way_to_a_larger_batch(training: bool) -> None:
    """It fits, as it does with nothing gathered ahead, and gives the same bits."""
    wanted, _ = run(2, grows, 0, training)
    found, _ = run(2, grows, None, training)
    for (one, hits), (other, none) in zip(found, wanted, strict=True):
        assert hits > none == 0
        for value, same in zip(one, other, strict=True):
            assert torch.equal(value, same)
