"""Shards on each rank of a crew: what lies over them between backward and step, where they live, what they send."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ps_dist
from _one_process import added, adds_like, check_homes, check_weights, give, gradients
from _zero_cases import Way, batches, passes, states
from ps_core import SGD, Budget, Options, RanksDiverged, UnsupportedParameter
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._parameters.state_transitions import GradientPlace
from ps_core.engine._sharding.planned_scheduler import RanksScheduler


class Both:
    """A shared model, and one process that does the same."""

    def __init__(self, each: ps_dist.TorchCollectives, way: Way) -> None:
        self.each, self.way = each, way
        self.model, self.optimizer = way.chunked(each, 1)
        self.single, self.reference = way.alone()

    def backward(self, step: int) -> None:
        """A pass of each, on the same parts."""
        parts = list(batches(step, self.each.mesh.size))
        count = len(parts)

        def alone(part: int) -> Any:
            return passes(self.single, self.reference, [parts[part]], count)

        passes(self.model, self.optimizer, [parts[self.each.mesh.rank]], count)
        adds_like(self.each.mesh, self.single, self.reference, alone, count, rounds=self.way.rounds)

    def step(self) -> None:
        """A step of each."""
        for one in (self.optimizer, self.reference):
            one.step()
            one.zero_grad()
        self.check()

    def check(self) -> None:
        found, wanted = states(self.optimizer), states(self.reference)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
        check_weights(self.model)

    def over(self) -> int:
        """How many gradients lie over their parameters."""
        return sum(record.gradient is GradientPlace.IN_WEIGHT_SLOT for record in hooks_of(self.model).engine.records)

    def seen(self) -> Tensor:
        """What an evaluation gives."""
        with torch.no_grad():
            return self.model(next(batches(0, 1))[0])


def looks_between(both: Both) -> None:
    """Evaluation and state dicts between backward and step, and gradients thrown away: the weights are there."""
    weights, seen = both.model.state_dict(), both.seen()
    both.backward(1)
    assert both.over() > 10
    for _ in range(2):
        assert torch.equal(both.seen(), seen)
        for name, value in both.model.state_dict().items():
            assert torch.equal(value, weights[name]), name
        both.optimizer.zero_grad()
        assert not both.over()
    both.reference.zero_grad()
    both.backward(2)
    both.seen()
    both.step()


def goes_back_twice(both: Both) -> None:
    """Two backward passes before the step, with torch's clipping and an evaluation in between: fp32 sums."""
    both.backward(1)
    first = gradients(both.single)
    factors = {record: record.factor for record in first}
    nn.utils.clip_grad_norm_(both.model.parameters(), 0.05)
    for record in hooks_of(both.model).engine.records:
        factors |= {each: record.factor for each in first if each.index == record.index}
    assert max(factors.values()) < 1
    seen = both.seen()
    both.backward(2)
    assert not both.over(), "there is more than 16 bits hold"
    give(added([{record: value * factors[record] for record, value in first.items()}, gradients(both.single)]))
    assert torch.equal(both.seen(), seen)
    both.step()
    check_homes(both.model, both.each.ranks, accumulates=False)


def keeps_the_graph(both: Both) -> None:
    """The same graph backward twice: the second time its parameters are gathered from the masters."""
    parts = list(batches(3, both.each.mesh.size))
    for model, mine in ((both.model, [parts[both.each.mesh.rank]]), (both.single, [])):
        for tokens, targets in mine:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()) / len(parts)
            both.optimizer.scale(loss).backward(retain_graph=True)
            assert both.over() > 10
            both.optimizer.scale(loss).backward()

    def alone(part: int) -> Any:
        return passes(both.single, both.reference, [parts[part]], len(parts))

    adds_like(both.each.mesh, both.single, both.reference, alone, len(parts), rounds=both.way.rounds)
    once = gradients(both.single)
    give(added([once, once]))
    both.step()


def fails_amid(both: Both) -> None:
    """A backward pass that breaks off on every rank: nothing is lost, and training goes on."""
    weights = both.model.state_dict()

    def fails(gradient: Tensor) -> None:
        raise ArithmeticError("amid backward")

    def marked(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fails)

    handle = both.model.blocks[0].register_forward_hook(marked)  # type: ignore[index, union-attr]
    with pytest.raises(ArithmeticError, match="amid backward"):
        both.backward(1)
    handle.remove()
    both.optimizer.zero_grad()
    assert not both.over()
    for name, value in both.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    both.backward(2)
    both.step()


def loads_amid(both: Both) -> None:
    """Parameters are replaced between backward and step: the gradients stay, and step what was loaded."""
    weights = {name: value * 0.5 for name, value in both.model.state_dict().items()}
    both.backward(1)
    for model in (both.model, both.single):
        model.load_state_dict(weights)
    both.step()


def leaves_some_out(both: Both) -> None:
    """Tensors without a gradient beside others with one: what lay over them is gone, and comes back."""
    parts = list(batches(4, both.each.mesh.size))
    for shifts in (False, True, False):

        def alone(part: int, shifts: bool = shifts) -> Any:
            return passes(both.single, both.reference, [parts[part]], len(parts), shifts=shifts)

        passes(both.model, both.optimizer, [parts[both.each.mesh.rank]], len(parts), shifts=shifts)
        adds_like(both.each.mesh, both.single, both.reference, alone, len(parts), rounds=both.way.rounds)
        both.step()


LIVES: dict[str, Callable[[Both], None]] = {
    each.__name__: each
    for each in (looks_between, goes_back_twice, keeps_the_graph, fails_amid, loads_amid, leaves_some_out)
}


def lives(each: ps_dist.TorchCollectives, name: str, way: Way) -> None:
    """One of these, from the start to the release."""
    both = Both(each, way)
    LIVES[name](both)
    both.backward(5)
    both.step()
    release(both.model)


def sends(each: ps_dist.TorchCollectives, precision: str, roomy: bool) -> tuple[int, float, int, int]:
    """Bytes received in a step, as predicted, and the elements of all groups and of the last, with padding."""
    torch.manual_seed(0)
    size = 4 if precision == "fp32" else 2
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))
    shard = (40 * 41 // (64 * each.ranks) + 1) * 64
    scratch = each.scratch_bytes(shard, torch.float32 if precision == "fp32" else torch.bfloat16)
    saved = 2 * ((each.ranks - 1) * shard * size - scratch)  # two sums may be on their way
    room = 2**20 if roomy else 5 * (16 if precision == "fp32" else 14) * shard + (20 + 10 * size) * 2**10 - saved
    model, optimizer = chunked(
        model,
        SGD(lr=0.1),
        precision=precision,
        budget=Budget(host=each.local_ranks * room),
        collectives=each,
        options=Options(group_bytes=40 * 42 * size),
    )
    groups = hooks_of(model).engine.groups
    for _ in range(2):  # the first is planned from
        before = each.statistics().wire_bytes
        model(torch.randn(3, 40, requires_grad=True)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = each.statistics().wire_bytes
    spent = sum(after[name] - before.get(name, 0) for name in ("all_gather", "reduce_scatter"))
    numel = sum(group.numel for group in groups)
    padding = sum(group.chunk_numel - group.numel for group in groups)
    assert 0 < padding < 64 * each.ranks * len(groups)
    scheduler = hooks_of(model).engine.passes.scheduler
    assert isinstance(scheduler, RanksScheduler)
    assert scheduler.planned is not None
    predicted = scheduler.planned.prediction.moved_bytes["wire"]
    weight = 10 if precision != "fp32" else 12  # with the one state of SGD
    assert statistics(model).bytes_per_parameter == weight * (numel + padding) / (numel * each.ranks)
    release(model)
    return spent, predicted, numel + padding, groups[-1].chunk_numel


def rises(each: ps_dist.TorchCollectives, folder: str) -> list[tuple[int, int]]:
    """Train above a disk by plans, which have shards in memory while there is room for them.

    A row a step: how many home slots are in memory after it, and bytes read. Nothing of this changes a result.
    """
    fronts, found = [], []
    budgets = {"host": each.local_ranks * 140 * 2**10, "disk": "16MiB", "disk_dir": folder}
    for budget in (Budget(**budgets), Budget(host="64MiB")):  # type: ignore[arg-type]
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))
        options = Options(group_bytes=40 * 42 * 2, poison=True)
        fronts.append(chunked(model, SGD(lr=0.1), collectives=each, budget=budget, options=options))
    (model, optimizer), (other, reference) = fronts
    for step, rows in enumerate((3, 3, 3, 3, 3, 100, 100)):
        before = statistics(model).moved_bytes.get("disk->host", 0)
        inputs = torch.randn(rows, 40, generator=torch.Generator().manual_seed(10 * step + each.mesh.rank))
        for one, front in fronts:
            one(inputs).float().square().mean().backward()
            assert front is not None
            front.step()
            front.zero_grad()
        homes = [chunk for group in hooks_of(model).engine.groups for chunk in group.chunks.values() if chunk.planned]
        up = sum(chunk.home.place is None for chunk in homes)
        found.append((up, statistics(model).moved_bytes["disk->host"] - before))
    wanted = states(reference)
    assert all(torch.equal(value, wanted[name]) for name, value in states(optimizer).items())
    for one in (model, other):
        release(one)
    return found


def writes_past_the_count(each: ps_dist.TorchCollectives, precision: str, device: str) -> None:
    """What PyTorch does not count of changes to gathered copies is refused on the ranks that have those elements."""
    both = Both(each, Way(precision=precision, device=device))
    both.backward(0)
    both.step()
    weights = both.model.state_dict()
    for name in ("blocks.1.1.weight", "odd"):
        with torch.no_grad():
            both.model.get_parameter(name).detach().untyped_storage().fill_(0)
        refused = rf"'{re.escape(name)}' was changed in place"
        with pytest.raises(UnsupportedParameter, match=refused):
            both.seen()
        for other, value in both.model.state_dict().items():
            assert torch.equal(value, weights[other]), other
    both.backward(1)
    both.step()
    release(both.model)
    release(both.single)


def ties_by_memory(each: ps_dist.TorchCollectives) -> None:
    """Their elements may be on different ranks."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UnsupportedParameter, match=r"'0\.weight' and '1\.weight' share memory.* the Parameter itself"):
        chunked(model, SGD(lr=0.1), collectives=each)


def twins_in_another_order(each: ps_dist.TorchCollectives) -> None:
    """Two models of one class; the second rank trains the other one first."""

    def train(joined: ps_dist.TorchCollectives) -> None:
        pair = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            pair.append(chunked(nn.Linear(8, 8), SGD(lr=0.1), precision="fp32", collectives=joined))
        for model, optimizer in pair if joined.rank == 0 else reversed(pair):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()

    with pytest.raises(RanksDiverged, match=r"rank \d did .*\(model 2: "), ps_dist.connect(timeout_s=60) as joined:
        train(joined)
