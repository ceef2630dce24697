"""Memory that groups had is kept for the next pass where there is room for everything, and given back where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from _threads import Together, run
from ps_core import SGD, Budget, DoesNotFit, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of

LAYERS, WIDTH = 3, 32


def made(each: Together) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)  # the ranks are threads, and would share the usual one
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH)
    rule: Any = SGD(lr=1e-3)
    return chunked(
        model,
        rule,
        device="cpu",
        precision="fp32",
        budget=Budget(host="4MiB"),
        collectives=each,
        options=Options(group_bytes=1),
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
