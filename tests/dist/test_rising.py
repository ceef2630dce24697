"""Shards that come up to an accelerator while it has room, and go back: bytes over the link, bits, budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from _threads import Together, run
from ps_core import AdamW, Budget, Options
from ps_core._plan import Tier
from ps_core._program import Kind
from ps_core.engine import chunked, materialized, release, statistics
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._execution.hooks import hooks_of
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._parameters.param_state import ParamGroup
from ps_core.engine._tracing.batch_shape import LargestBatch, batch_of

pytestmark = pytest.mark.usefixtures("unplanned")

LAYERS, WIDTH = 6, 64
SHARD_NUMEL = WIDTH * WIDTH // 2
SIZE = {"bf16": 2, "fp32": 4}


class Chain(nn.Sequential):
    """Layers, some of which a pass may leave out."""

    def forward(self, x: Tensor, leaves_out: tuple[int, ...] = ()) -> Tensor:
        for index, layer in enumerate(self):
            x = x if index in leaves_out else layer(x)
        return x


@dataclass
class Front:
    """One rank's model under management."""

    model: Any
    optimizer: Any
    each: Together

    @property
    def groups(self) -> list[ParamGroup]:
        return hooks_of(self.model).engine.groups

    def up(self) -> dict[str, set[Kind]]:
        """Which kinds of a group are on the accelerator."""
        return {
            group.name: {kind for kind, chunk in group.chunks.items() if kind is not Kind.FULL and not chunk.home.tier}
            for group in self.groups
        }

    def step(self, rows: int, passes: int = 1, leaves_out: tuple[int, ...] = ()) -> list[float]:
        """The losses."""
        losses = []
        for place in range(passes):
            generator = torch.Generator().manual_seed(100 * rows + 10 * place + self.each.rank)
            loss = self.model(torch.randn(rows, WIDTH, generator=generator), leaves_out).float().square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def settle(self, rows: int = 4, passes: int = 1) -> None:
        """Until nothing rises any more."""
        for _ in range(6):
            self.step(rows, passes)

    def states(self) -> dict[str, Tensor]:
        found = self.optimizer.state_dict(masters=True)
        return {f"{name} {index}": value for index, row in found["state"].items() for name, value in row.items()}

    def held(self) -> tuple[int, int]:
        """The most of the accelerator, and what there is."""
        tier = statistics(self.model).tiers["device"]
        return tier.peak_bytes, tier.budget_bytes


def front(
    each: Together,
    precision: str,
    room: float,
    *,
    device: Any = "emulated",
    accumulate: int = 1,
    trains: bool = True,
    budget: Budget | None = None,
) -> Front:
    """With an accelerator of so many times the weights, or where that is 0 without one."""
    generator = torch.Generator().manual_seed(0)  # the ranks are threads, and would share the usual one
    model = Chain(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    size = int(room * LAYERS * WIDTH * WIDTH * SIZE[precision])
    budget = budget or (Budget(device=size, host="8MiB") if room else Budget(host="64MiB"))
    made = chunked(
        model, AdamW(lr=1e-2) if trains else None, device=device if room else "cpu", precision=precision,
        budget=budget, collectives=each, accumulation_steps=accumulate,
        options=Options(group_bytes=1, poison=bool(room)),
    )  # fmt: skip
    return Front(*made, each)


def crossing(one: Front, precision: str, up: dict[str, set[Kind]], gathers: Iterable[str], passes: int) -> Counter[str]:
    """What should go over the link in a step, from where homes are."""
    bytes_by_link: Counter[str] = Counter()
    fp32, summed = precision == "fp32", passes > 1
    for group in one.groups:
        high, numel = up[group.name], SHARD_NUMEL
        weight, states = group.weight in high, Kind.P32 in high
        sums = passes * (Kind.ACC not in high) + (Kind.ACC in high and not states) if summed or fp32 else not states
        bytes_by_link["device->host"] += sums * numel * (4 if summed or fp32 else 2)
        bytes_by_link["host->device"] += (weight and not states) * numel * 2
        gathered = sum(name == f"gather {group.name}" for name in gathers)
        bytes_by_link["host->device"] += (not weight) * gathered * numel * SIZE[precision]
    return +bytes_by_link


def watched(each: Together, precision: str, room: float, passes: int) -> list[int]:
    """How many groups' weights, and how many groups' states, are up in the end; every step crosses what it should."""
    one = front(each, precision, room, accumulate=passes)
    plain = front(each, precision, 0, accumulate=passes)
    calm = 0
    for rows in (4, 4, 4, 4, 4, 4, 32, 4, 4, 4, 4):
        up, before, began = one.up(), Counter(statistics(one.model).moved_bytes), len(each.began)
        losses, gathers = one.step(rows, passes), each.began[began:]
        assert losses == plain.step(rows, passes)
        peak, most = one.held()
        assert peak <= most, rows
        if one.up() == up:
            calm += 1
            moved = Counter(statistics(one.model).moved_bytes) - before
            assert moved == crossing(one, precision, up, gathers, passes)
    assert calm > 5
    assert all(torch.equal(value, plain.states()[name]) for name, value in one.states().items())
    found = one.up()
    release(one.model)
    release(plain.model)
    return [sum(kind in high for high in found.values()) for kind in (Kind.P16, Kind.P32)]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("precision", "room", "weights", "states"),
    [
        ("bf16", 2.2, range(1, LAYERS + 1), range(LAYERS)),
        ("bf16", 5, (LAYERS,), range(1, LAYERS)),
        ("bf16", 12, (LAYERS,), (LAYERS,)),
        ("fp32", 3, (0,), range(1, LAYERS)),
        ("fp32", 8, (0,), (LAYERS,)),
    ],
)
def test_what_is_up_crosses_no_link(
    precision: str, room: float, weights: Iterable[int], states: Iterable[int], passes: int
) -> None:
    """Weights rise first, in fp32 everything of a group at once; a larger batch has its room, and no bit changes."""
    found, _ = run(2, watched, precision, room, passes)
    for up in found:
        assert up[0] in weights
        assert up[1] in states


def twice(each: Together) -> None:
    one, plain = front(each, "bf16", 12), front(each, "bf16", 0)
    for passes in (1, 1, 1, 1, 1, 2, 1, 2, 2):
        assert one.step(4, passes) == plain.step(4, passes)
    assert all(torch.equal(value, plain.states()[name]) for name, value in one.states().items())
    assert any(Kind.P32 in high for high in one.up().values())
    release(one.model)
    release(plain.model)


def test_a_second_backward_pass_sums_below() -> None:
    """Sums that nobody foresaw lie where states came from; the step finds them."""
    run(2, twice)


def alike(each: Together) -> None:
    """Everything of one rank rises, nothing of the other; both read and write states together."""
    one, plain = front(each, "bf16", 12), front(each, "bf16", 0)
    if not each.rank:
        residency: Any = hooks_of(one.model).engine.residency
        residency.promoter.promote = lambda: None
    for leaves_out in ((), (), (), (), (2, 3), (2 + each.rank,), (), (1,)):
        assert one.step(4, 1, leaves_out) == plain.step(4, 1, leaves_out)
        values = one.model.state_dict()
        assert all(torch.equal(value, values[name]) for name, value in plain.model.state_dict().items())
    assert all(torch.equal(value, plain.states()[name]) for name, value in one.states().items())
    assert all(len(high) == 4 * each.rank for high in one.up().values())
    release(one.model)
    release(plain.model)


def test_what_is_up_is_each_processs_own_business() -> None:
    """Also where some have no gradient for a sum that is in the schedule, or none of them has."""
    run(2, alike)


def handled(each: Together, room: float) -> None:
    """Everything that reads or writes states between steps, with some of them up."""
    one, plain = front(each, "bf16", room), front(each, "bf16", 0)
    fronts = (one, plain)
    for front_ in fronts:
        front_.settle()
    risen = one.up()
    assert any(risen.values())
    rows = [front_.optimizer.state_dict(masters=True) for front_ in fronts]
    for front_ in fronts:
        with materialized(front_.model, write=True), torch.no_grad():
            for parameter in front_.model.parameters():
                parameter.mul_(0.5)
        front_.settle()
        front_.optimizer.load_state_dict(rows[0])
        front_.model.load_state_dict({name: value * 2 for name, value in front_.model.state_dict().items()})
    assert one.step(4) == plain.step(4)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(one.model.state_dict()[name], value), name
    assert all(torch.equal(value, plain.states()[name]) for name, value in one.states().items())
    for front_ in fronts:
        release(front_.model)
    for mine, other in zip(one.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("room", [2.2, 5, 12])
def test_states_are_read_and_written_wherever_they_are(room: float) -> None:
    run(2, handled, room)


def ran_out(each: Together) -> None:
    device = CpuDevice(name="emulated")
    one = front(each, "bf16", 12, device=device)
    one.settle()
    assert all(Kind.P32 in high for high in one.up().values())
    _, most = one.held()
    device.take_failed_bytes = lambda: 1  # type: ignore[method-assign]
    with torch.no_grad():
        one.model(torch.ones(4, WIDTH))
    assert not any(one.up().values()), "all of it made way"
    del device.take_failed_bytes
    one.settle()
    store = hooks_of(one.model).engine.store
    assert most - store.ledger.promoted_bytes - store.ledger.peak_besides_bytes >= most // 20, (
        "more is left free than before"
    )
    release(one.model)


def test_where_memory_ran_out_more_is_left_free() -> None:
    run(2, ran_out)


def above_a_disk(each: Together, folder: str) -> None:
    """Homes that come from the disk are stepped in the host's memory as long as their states are below."""
    budget = Budget(device="96KiB", host="60KiB", disk="4MiB", disk_dir=folder)
    one, plain = front(each, "bf16", 1, budget=budget), front(each, "bf16", 0)
    assert any(group.chunks[Kind.P16].home.tier == 2 for group in one.groups)
    for _ in range(8):
        assert one.step(4) == plain.step(4)
        homes = [chunk for group in one.groups for kind, chunk in group.chunks.items() if kind is not Kind.FULL]
        assert all(len(chunk.copies) == (not chunk.home.tier) for chunk in homes), "its place below, and no more"
    assert any(one.up().values())
    assert all(torch.equal(value, plain.states()[name]) for name, value in one.states().items())
    store = hooks_of(one.model).engine.store
    release(one.model)
    release(plain.model)
    assert store.ledger.used_bytes == [0, 0, 0]


def test_what_rises_from_a_disk_takes_no_memory_between(tmp_path: Path) -> None:
    run(2, above_a_disk, str(tmp_path))


def accumulates_graphs(each: Together) -> None:
    one = front(each, "bf16", 4)
    one.settle()
    assert any(one.up().values())
    losses = [one.model(torch.ones(rows, WIDTH)).float().square().mean() for rows in (4, 4)]
    assert not any(one.up().values()), "the second graph has the room that there was"
    torch.stack(losses).sum().backward()
    one.optimizer.step()
    one.optimizer.zero_grad()
    one.settle()
    with torch.no_grad():
        one.model(torch.ones(16, WIDTH))
    one.settle()
    up = one.up()
    assert any(up.values())
    with torch.no_grad():
        one.model(torch.ones(16, WIDTH))
    assert one.up() == up, "that was evaluated before"
    one.model(torch.ones(16, WIDTH)).sum().backward()
    peak, most = one.held()
    assert peak <= most
    assert one.up() != up, "and never trained with"
    release(one.model)


def test_more_graphs_and_larger_batches_find_room() -> None:
    run(2, accumulates_graphs)


def looked(each: Together) -> None:
    one = front(each, "bf16", 3, trains=False)
    with torch.no_grad():
        for _ in range(4):
            one.model(torch.ones(4, WIDTH))
        before = statistics(one.model).moved_bytes
        assert before["host->device"] > 0
        one.model(torch.ones(4, WIDTH))
    assert all(high == {Kind.P16} for high in one.up().values())
    assert statistics(one.model).moved_bytes == before
    release(one.model)


def test_a_model_that_is_only_evaluated_rises_too() -> None:
    """What is the same below and above is read where it is near."""
    run(2, looked)


def test_a_batch_is_larger_if_anything_of_it_is() -> None:
    largest = LargestBatch()

    def grows(*shapes: tuple[int, ...]) -> bool:
        return largest.grows(batch_of([torch.empty(shape, device="meta") for shape in shapes], {}))

    assert grows((4, 8))
    assert not grows((4, 8))
    assert not grows((3, 8))
    assert grows((2, 9))
    assert not grows((3, 9))
    assert grows((4, 9)), "more elements than in any, although each size was seen"
    assert grows((1, 2), (3,)), "another kind of batch"
    assert not grows((1, 2), (3,))
    assert not grows((4, 9))


def holes(taken: list[tuple[int, int]], size: int, capacity: int) -> Iterator[int]:
    """Every address where there is room, by trying."""
    for start in range(0, capacity - size + 1, 128):
        if all(start + size <= begin or begin + length <= start for begin, length in taken):
            yield start


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 4)), max_size=6), st.integers(1, 8))
def test_the_highest_hole(rows: list[tuple[int, int]], units: int) -> None:
    store = TierStore(CpuDevice(name="emulated"), (Tier("device", 16 * 128), Tier("host", 2**20)), poison=False)
    taken: list[tuple[int, int]] = []
    for place, count in rows:
        start, length = place * 128, count * 128
        if start + length <= 16 * 128 and start in holes(taken, length, 16 * 128):
            store.reserve(0, length, start)
            taken.append((start, length))
    assert store.arena.highest_free(units * 128) == max(holes(taken, units * 128, 16 * 128), default=None)
