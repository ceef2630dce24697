"""Ranks that compute from each other's fp32 weights where these are: what no rank may see, and none may change."""

from __future__ import annotations

import gc
import os
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

import _memory_cases as cases
from _crew import Crew
from _threads import Together, going_by, run
from ps_core import SGD, Budget, Options, RanksDiverged, UnsupportedParameter
from ps_core._extents import Kind
from ps_core.engine import WeightAverage, chunked, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._memory.common_memory import CommonMemory, CommonWeights

WIDTH, LAYERS, PAGE = 40, 3, os.sysconf("SC_PAGE_SIZE")


def made(each: Together, *, common: bool = True, frozen: int = 0, layers: int = LAYERS) -> tuple[Any, Any]:
    """Make the same model on all ranks; its last ``frozen`` layers are not trained."""
    if not common:
        each.common_file = None
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    model[layers - frozen :].requires_grad_(False)
    seeded = torch.Generator().manual_seed(0)  # ranks are threads, which share PyTorch's own generator
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5, generator=seeded)
    return chunked(
        model,
        SGD(lr=0.1),
        precision="fp32",
        budget=Budget(host="4MiB"),
        collectives=each,
        options=Options(group_bytes=4 * WIDTH * (WIDTH + 2)),
    )


def passed(model: Any, each: Together, step: int) -> None:
    inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + each.rank))
    model(inputs).square().mean().backward()


def stepped(model: Any, optimizer: Any, each: Together, step: int) -> None:
    passed(model, each, step)
    optimizer.step()
    optimizer.zero_grad()


def test_a_private_mapping_shows_what_ranks_write_and_keeps_what_it_is_written() -> None:
    file = os.memfd_create("test")
    one, other = (
        CommonWeights(CommonMemory(each, 2 * PAGE), PAGE, PAGE, slice(0, PAGE)) for each in (os.dup(file), file)
    )
    private = one.map_whole()
    other.shard[0] = 7
    assert private[0] == 7
    private[1] = 9
    assert other.shard[1] == one.shard[1] == 0
    assert one.map_whole()[1] == 0


def test_weights_take_no_memory_twice() -> None:
    def trains(each: Together, *, common: bool) -> tuple[int, list[torch.Tensor]]:
        model, optimizer = made(each, common=common)
        for step in range(4):
            stepped(model, optimizer, each, step)
        assert statistics(model).divergences == 0
        peak = statistics(model).tiers["host"].peak_bytes
        release(model)
        return peak, [parameter.detach().clone() for parameter in model.parameters()]

    (mapped, values), _ = run(2, lambda each: trains(each, common=True))[0]
    (copied, others), _ = run(2, lambda each: trains(each, common=False))[0]
    assert all(map(torch.equal, values, others))
    whole = 4 * sum(value.numel() for value in values)
    assert copied - mapped > 0.9 * whole


def test_gradients_leave_their_memory_once_they_are_summed() -> None:
    """With any number of layers, gradients of a few are there at a time, however large the budget is."""

    def transient(each: Together, layers: int) -> float:
        model, optimizer = made(each, layers=layers)
        for step in range(4):
            stepped(model, optimizer, each, step)
        found = statistics(model)
        assert found.divergences == 0
        kept = found.bytes_per_parameter * sum(parameter.numel() for parameter in model.parameters())
        release(model)
        return found.tiers["host"].peak_bytes - kept

    less, more = (run(2, lambda each, layers=layers: transient(each, layers))[0][0] for layers in (LAYERS, 3 * LAYERS))
    gradient = 4 * WIDTH * (WIDTH + 1)
    assert more - less < gradient


@pytest.mark.parametrize("counted", [True, False])
def test_what_a_program_writes_within_a_pass_changes_no_weight(counted: bool) -> None:
    def writes(each: Together) -> None:
        model, optimizer = made(each)
        for step in range(2):
            stepped(model, optimizer, each, step)
        wanted, ones = model.state_dict(), torch.ones(2, WIDTH)
        with torch.no_grad():
            expected = model(ones).clone()

        def write(*_: Any) -> None:
            memory = model[2].weight.detach()
            memory.zero_() if counted else memory.untyped_storage().fill_(0)

        def goes_on() -> None:
            with torch.no_grad():
                model(ones)
            model.state_dict()

        handle = model[0].register_forward_hook(write)
        with pytest.raises(UnsupportedParameter, match=r"'2\.weight' was changed in place"):
            goes_on()
        handle.remove()
        for name, value in model.state_dict().items():
            assert torch.equal(value, wanted[name]), name
        with torch.no_grad():
            assert torch.equal(model(ones), expected)

    run(2, writes)


def test_an_alias_that_outlives_its_pass_changes_nothing() -> None:
    def trains(each: Together, *, keeps: bool) -> list[torch.Tensor]:
        model, optimizer = made(each)
        kept: list[torch.Tensor] = []
        for step in range(5):
            passed(model, each, step)
            if keeps and step == 2:
                kept.append(model[1].weight.detach())
            optimizer.step()
            optimizer.zero_grad()
            if kept and step == 3 and each.rank:
                kept[0].untyped_storage().fill_(0)
        del kept
        release(model)
        return [parameter.detach().clone() for parameter in model.parameters()]

    found, _ = run(2, lambda each: trains(each, keeps=True))
    wanted, _ = run(2, lambda each: trains(each, keeps=False))
    for row in found:
        assert all(map(torch.equal, row, wanted[0]))


def test_weights_do_not_change_while_a_slower_rank_computes() -> None:
    """A rank is done with an evaluation, and writes its shard, while the other is in the middle of the same one."""
    writing = Event()

    def evaluates(each: Together) -> None:
        model, optimizer = made(each)
        for step in range(2):
            stepped(model, optimizer, each, step)
        ones = torch.ones(2, WIDTH)
        with torch.no_grad():
            expected = model(ones).clone()

        def wait(*_: Any) -> None:
            assert writing.wait(30)
            Event().wait(0.3)  # time in which the other rank would write

        handle = model[0].register_forward_hook(wait) if each.rank else None
        with torch.no_grad():
            assert torch.equal(model(ones), expected)
        if handle is not None:
            handle.remove()
        writing.set()
        engine = hooks_of(model).engine
        for record in engine.records:
            engine.write_state(record, Kind.P32, torch.zeros(tuple(record.shape)))
        with torch.no_grad():
            assert torch.equal(model(ones), torch.zeros(2, WIDTH))

    run(2, evaluates)


def test_ranks_copy_weights_if_one_of_them_cannot_map_them(two: Crew) -> None:
    for at_rank in range(2):
        assert two.run(cases.maps_no_weights, at_rank) == [(False, True)] * 2


def test_ranks_of_one_computer_map_each_others_weights(two: Crew) -> None:
    assert two.run(cases.maps_no_weights, 2) == [(True, True)] * 2
    first = two.run(cases.open_files)
    assert first == two.run(cases.open_files)


def test_groups_of_16_bits_are_copied() -> None:
    def of(each: Together) -> bool:
        linear = nn.Linear(8, 8)
        for parameter in linear.parameters():
            nn.init.ones_(parameter)
        model, _ = chunked(linear, SGD(lr=0.1), precision="bf16", collectives=each)
        return any(group.common is not None for group in hooks_of(model).engine.groups)

    assert run(2, of)[0] == [False, False]


@pytest.mark.parametrize("then", ["loads", "averages", "adds a layer"])
def test_one_rank_evaluates_alone_before_all_change_weights(then: str) -> None:
    """Without a plan one rank may evaluate alone; the next change of weights is of all ranks all the same."""

    def changes(each: Together) -> tuple[torch.Tensor, Any]:
        model, optimizer = made(each)
        passed(model, each, 0)
        optimizer.step()
        optimizer.zero_grad()
        ones = torch.ones(2, WIDTH)
        state = {name: value * 2 for name, value in model.state_dict().items()}
        for _ in range(2):
            if each.rank:
                with torch.no_grad():
                    model(ones)
            if then == "averages":
                average = WeightAverage(model, 0.5)
                average.update()
                with average.applied(), torch.no_grad():
                    model(ones)
            else:
                model.load_state_dict(state)
        if each.rank:
            with torch.no_grad():
                model(ones)
        if then == "adds a layer":
            added = nn.Linear(WIDTH, WIDTH)
            for parameter in added.parameters():
                nn.init.constant_(parameter, 0.5)
            model.append(added)
        with torch.no_grad():
            return model(ones).clone(), model  # another rank may still ask for its shards

    with going_by(plan=False):
        ((one, _), (other, _)), _ = run(2, changes)
    assert torch.equal(one, other)


def test_a_rank_that_freed_the_model_is_named() -> None:
    freed = Event()

    def leaves(each: Together) -> None:
        each.common_file = None
        model, _ = made(each)
        if not each.rank:
            del model
            gc.collect()
            freed.set()
            return
        assert freed.wait(30)
        with torch.no_grad(), pytest.raises(RanksDiverged, match=r"^rank 0 has freed the model, while this rank"):
            model(torch.ones(2, WIDTH))

    with going_by(plan=False):
        run(2, leaves)


def frozen_at_first(each: Together) -> tuple[Any, Any, int]:
    """Return a model of which all layers but the first are frozen, with the file of its weights."""
    found: list[int] = []
    make = each.common_file
    assert make is not None

    def remember() -> int:
        found.append(make())
        return found[0]

    each.common_file = remember
    model, optimizer = made(each, frozen=2)
    return model, optimizer, found[0]


@pytest.mark.parametrize("plan", [True, False])
def test_weights_that_are_unfrozen_leave_the_memory_that_ranks_map(plan: bool) -> None:
    """They are trained where each rank has its shard."""

    def thaws(each: Together) -> tuple[int, int]:
        model, optimizer, file = frozen_at_first(each)
        for step in range(2):
            stepped(model, optimizer, each, step)
        before = os.fstat(file).st_blocks * 512
        model.requires_grad_(True)
        stepped(model, optimizer, each, 2)
        after = os.fstat(file).st_blocks * 512
        stepped(model, optimizer, each, 3)
        release(model)
        return before, after

    group_bytes = -(-4 * WIDTH * (WIDTH + 1) // PAGE) * PAGE
    with going_by(plan=plan):
        assert run(2, thaws)[0] == [(LAYERS * group_bytes, group_bytes)] * 2


def test_an_alias_of_weights_that_are_unfrozen_keeps_them() -> None:
    def thaws(each: Together) -> int:
        model, optimizer, file = frozen_at_first(each)
        stepped(model, optimizer, each, 0)
        kept: list[torch.Tensor] = []
        if each.rank:
            handle = model[2].register_forward_hook(lambda layer, *_: kept.append(layer.weight.detach()))
        stepped(model, optimizer, each, 1)
        if each.rank:
            handle.remove()
        stepped(model, optimizer, each, 2)
        wanted = model.state_dict()["2.weight"]
        model.requires_grad_(True)
        stepped(model, optimizer, each, 3)
        assert all(torch.equal(each, wanted) for each in kept)
        return os.fstat(file).st_blocks * 512

    found, _ = run(2, thaws)
    assert found[0] == found[1] > 0
