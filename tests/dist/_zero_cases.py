"""Training by several processes against one process, on each rank of a crew."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ps_dist
from _one_process import adds_like, check_homes, check_weights
from _states import masters_of
from checked_device.device import CheckedDevice
from ps_core import SGD, AdamW, Budget, Group, Options, RanksDiverged, TorchOptimizer, UnsupportedParameter
from ps_core.engine import chunked, materialized, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._sharding.planned_scheduler import RanksScheduler

WIDTH, ROWS = 24, 8


class Odd(nn.Module):
    """Tied, frozen, unused and checkpointed parameters, a buffer, odd strides; sizes that no shard divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50), nn.GELU(), nn.Linear(50, WIDTH)) for _ in range(3)
        )
        self.unused = nn.Linear(5, 7)
        self.odd = nn.Parameter(torch.randn(WIDTH, 3).t())
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.never = nn.Parameter(torch.zeros(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor, *, shifts: bool = True) -> Tensor:
        x = self.frozen(self.embedding(tokens)) * self.scale
        for index, block in enumerate(self.blocks):
            x = x + (checkpoint(block, x, use_reentrant=False) if index else block(x))
        x = x + functional.linear(x, self.odd).mean(-1, keepdim=True)
        x = x + (self.shift if shifts else self.shift.detach())
        return self.head(self.norm(x))


def made(seed: int = 5) -> Odd:
    torch.manual_seed(seed)
    return Odd()


@dataclass(frozen=True)
class Way:
    """How to train."""

    device: str = "cpu"
    precision: str = "fp32"
    accumulate: int = 1
    max_norm: float | None = None
    rule: str = "adamw"
    eps: float = 1e-8
    group_bytes: int = 4000
    folder: str = ""
    """For the disk tier."""
    room: int = 0
    """Of an accelerator, so many KiB more than the least."""

    @property
    def rounds(self) -> bool:
        """Whether sums over ranks are rounded to what is computed with."""
        return self.precision != "fp32" and self.accumulate == 1

    def alone(self) -> tuple[nn.Module, Any]:
        """In one process that adds in fp32, with everything in memory."""
        return replace(self, device="cpu", accumulate=max(2, self.accumulate)).chunked(None, 1)

    def chunked(self, together: ps_dist.TorchCollectives | None, parts: int) -> tuple[nn.Module, Any]:
        """With ``together`` on this rank; else in one process, which adds up so many parts."""
        device: Any = self.device
        if self.device == "checked":
            device = CheckedDevice(name="emulated", check=True, seed=3)
        size = parts if together is None else together.mesh.size
        groups = (Group(match=lambda name, parameter: parameter.dim() < 2, weight_decay=0.0),)
        rules = {
            "adamw": AdamW(lr=1e-2, weight_decay=0.1, eps=self.eps, groups=groups),
            "sgd": SGD(lr=0.3, momentum=0.9, weight_decay=0.01, groups=groups),
            "nadam": TorchOptimizer(torch.optim.NAdam, lr=1e-2, weight_decay=0.1, groups=groups),
            "amsgrad": TorchOptimizer(torch.optim.AdamW, lr=1e-2, amsgrad=True, groups=groups),
        }
        return chunked(
            made(),
            rules[self.rule],
            device="cpu" if device == "disk" else device,
            budget=self.budget(size),
            precision=self.precision,
            accumulation_steps=self.accumulate * parts,
            max_grad_norm=self.max_norm,
            collectives=together,
            options=Options(group_bytes=self.group_bytes, poison=self.device != "cpu", keep_fp32=("norm.*",)),
        )

    def budget(self, size: int) -> Budget:
        """As small as it may be; scratch grows with the number of ranks."""
        if self.device == "cpu":
            return Budget(host="256MiB")
        small = (48 + 24 * size + self.room) * 1024
        if self.device == "disk":
            return Budget(host=(small + 32 * 1024) * size, disk="16MiB", disk_dir=self.folder)
        if self.folder:
            return Budget(device=small, host=56 * 1024 * size, disk="16MiB", disk_dir=self.folder)
        return Budget(device=small, host="256MiB")


def batches(step: int, parts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of a step's batch, of unlike lengths."""
    random = torch.Generator().manual_seed(step)
    for part in range(parts):
        shape = (ROWS, 4 + part % 3)
        yield torch.randint(0, 37, shape, generator=random), torch.randint(0, 37, shape, generator=random)


def passes(model: nn.Module, optimizer: Any, mine: list[tuple[Tensor, Tensor]], parts: int, **how: bool) -> list[float]:
    losses = []
    for tokens, targets in mine:
        loss = functional.cross_entropy(model(tokens, **how).flatten(0, 1).float(), targets.flatten()) / parts
        optimizer.scale(loss).backward()
        losses.append(float(loss.detach()))
    return losses


def states(optimizer: Any) -> dict[str, Tensor]:
    found = optimizer.state_dict(masters=True)
    rows = {}
    for index, entry in found["state"].items():
        rows |= {f"{name} {index}": value for name, value in entry.items()}
    return rows


def ulps(one: Tensor, other: Tensor, before: Tensor) -> float:
    """The largest difference in units of the last place of the tensor's largest value or change."""
    scale = torch.maximum(other.abs(), (other - before).abs()).max().clamp_min(1e-30)
    return float((one - other).abs().max() / (scale * 2.0**-23))


def trains(each: ps_dist.TorchCollectives, way: Way, steps: int, exact: bool) -> float:
    """Several processes, and one that adds up the same parts in the same order: the same bits, or so many ulps."""
    size, rank = each.mesh.size, each.mesh.rank
    model, optimizer = way.chunked(each, 1)
    single, reference = way.alone()
    worst = 0.0
    for step in range(steps):
        if not exact:  # each step by itself: what a rounding leads to later is not this step's
            reference.load_state_dict(optimizer.state_dict(masters=True))
        before = states(reference)
        parts = list(batches(step, size * way.accumulate))
        count = len(parts)
        mine = passes(model, optimizer, parts[rank::size], count)

        def alone(part: int, parts: list[tuple[Tensor, Tensor]] = parts) -> float:
            return passes(single, reference, [parts[part]], len(parts))[0]

        theirs = adds_like(each.mesh, single, reference, alone, count, rounds=way.rounds)
        assert mine == theirs[rank::size]
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
        assert math.isclose(optimizer.last_norm, reference.last_norm, rel_tol=2e-6)
        assert optimizer.loss_scale == reference.loss_scale
        found, wanted = states(optimizer), states(reference)
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(found[name], wanted[name]) or not exact, name
            worst = max(worst, ulps(found[name], wanted[name], before.get(name, torch.zeros(()))))
        for (name, one), other in zip(model.state_dict().items(), single.state_dict().values(), strict=True):
            assert torch.equal(one, other) or not exact, name
    assert optimizer.last_norm > (way.max_norm or 0), "clipping was put to the test"
    check_weights(model)
    check_budget(model, each, accumulates=way.accumulate > 1)
    release(model)
    return worst


def check_budget(model: nn.Module, each: ps_dist.TorchCollectives, *, accumulates: bool) -> None:
    found = statistics(model)
    for name, tier in found.tiers.items():
        assert tier.peak_bytes <= tier.budget_bytes, name
    check_homes(model, each.ranks, accumulates=accumulates)
    engine = hooks_of(model).engine
    used = sum(tier.current_bytes for tier in found.tiers.values())
    homes = sum(chunk.home.bytes for group in engine.groups for chunk in group.chunks.values())
    spare = engine.store.spare.bytes
    assert used == homes + spare, "between steps there are shards, and memory that groups had"
    assert not spare or len(found.tiers) == 1


def counts_bytes(each: ps_dist.TorchCollectives, precision: str, tight: bool) -> None:
    """A step's bytes: in the first nothing is gathered; then as the plan predicted; sums once.

    Where ranks map each other's weights, nothing is gathered at all.
    """
    torch.manual_seed(0)
    size = 4 if precision == "fp32" else 2
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))
    shard = (40 * 41 // (64 * each.ranks) + 1) * 64
    states = 5 * (16 if precision == "fp32" else 14) * shard
    scratch = each.scratch_bytes(shard, torch.float32 if precision == "fp32" else torch.bfloat16)
    saved = 2 * ((each.ranks - 1) * shard * size - scratch)  # two sums may be on their way
    model, optimizer = chunked(
        model,
        SGD(lr=0.1),
        precision=precision,
        budget=Budget(host=each.local_ranks * (states + (20 + 10 * size) * 2**10 - saved if tight else 2**20)),
        collectives=each,
        options=Options(group_bytes=40 * 42 * size),
    )
    groups = hooks_of(model).engine.groups
    assert len(groups) == 5
    mapped = groups[0].common is not None
    for step in range(3):
        before = each.statistics().wire_bytes
        model(torch.randn(3, 40, requires_grad=True)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = each.statistics().wire_bytes
        spent = {name: after[name] - before.get(name, 0) for name in after}
        others = (each.ranks - 1) * size
        once, twice = (others * sum(group.shard_numel for group in rows) for rows in (groups, groups[:-1]))
        assert spent["reduce_scatter"] == once
        if step:
            scheduler = hooks_of(model).engine.passes.scheduler
            assert isinstance(scheduler, RanksScheduler)
            assert scheduler.planned is not None
            gathered = spent.get("all_gather", 0)
            assert gathered + once == scheduler.planned.prediction.moved_bytes["wire"]
            assert (0 if mapped else once) <= gathered <= (0 if mapped else once + twice * tight)
        else:
            assert not spent.get("all_gather"), "weights are asked for"
        order = [name for name in each.recent() if "gradients of" in name][-5:]
        assert [name.split("gradients of ")[1] for name in order] == [f"{i}.weight)" for i in (4, 3, 2, 1, 0)]
    release(model)


def some_gradients(each: ps_dist.TorchCollectives) -> None:
    """A tensor whose gradient comes on one rank only counts as if the others had zeros; one without any is left."""
    model, optimizer = Way().chunked(each, 1)
    single, reference = Way().chunked(None, each.mesh.size)
    parts = list(batches(0, each.mesh.size))
    for index, part in enumerate(parts):
        for one, front, run in ((model, optimizer, index == each.mesh.rank), (single, reference, True)):
            if run:
                passes(one, front, [part], 1, shifts=index == 0)
    optimizer.step()
    reference.step()
    found, wanted = states(optimizer), states(reference)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    release(model)


def given_gradients(each: ps_dist.TorchCollectives) -> None:
    """What a program gives for a gradient replaces this rank's part, and is summed over ranks as any part is."""
    random = torch.Generator().manual_seed(3)
    for precision in ("fp32", "bf16"):
        (model, optimizer), (single, reference) = (
            Way(precision=precision).chunked(*to) for to in ((each, 1), (None, 2))
        )
        for step in range(2):
            for one, front in ((model, optimizer), (single, reference)):
                passes(one, front, [next(batches(step, 1))], 1)
            for name in ("never", "odd", "embedding.weight", "blocks.1.1.weight"):
                shape = single.get_parameter(name).shape
                given = [torch.randint(-8, 8, shape, generator=random).to(torch.bfloat16) for _ in range(2)]
                for one, value in ((model, given[each.mesh.rank]), (single, given[0] + given[1])):
                    one.get_parameter(name).grad = value.to(one.get_parameter(name).dtype)
            for one in (model, single):
                for name, parameter in one.named_parameters():
                    if name not in ("never", "odd", "blocks.1.1.weight"):
                        parameter.grad = None
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
        found, wanted = states(optimizer), states(reference)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        with pytest.raises(UnsupportedParameter, match=r"the gradient given to 'frozen\.weight': it was frozen"):
            model.get_parameter("frozen.weight").grad = torch.zeros(WIDTH, WIDTH)
        release(model)
        release(single)


def overflows(each: ps_dist.TorchCollectives) -> None:
    """One rank's gradient is not finite: no rank steps, and nothing is lost."""
    model, optimizer = Way(precision="fp16").chunked(each, 1)
    before, scale = states(optimizer), optimizer.loss_scale
    tokens, targets = next(batches(0, 1))
    loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
    optimizer.scale(loss * (math.inf if each.mesh.rank == each.mesh.size - 1 else 1.0)).backward()
    optimizer.step()
    assert optimizer.last_skipped
    assert optimizer.loss_scale == scale / 2
    optimizer.zero_grad()
    after = states(optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    check_weights(model)
    passes(model, optimizer, [next(batches(0, 1))], each.mesh.size)
    optimizer.step()
    assert not optimizer.last_skipped
    release(model)


def clips_like_torch(each: ps_dist.TorchCollectives) -> None:
    """torch's own clipping sees the norm over all shards, and clips for real."""
    way = Way(rule="sgd")
    model, optimizer = way.chunked(each, 1)
    other, clipping = Way(rule="sgd", max_norm=0.05).chunked(each, 1)
    for step in range(2):
        part = list(batches(step, each.mesh.size))[each.mesh.rank]
        passes(model, optimizer, [part], each.mesh.size)
        passes(other, clipping, [part], each.mesh.size)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for front in (optimizer, clipping):
            front.step()
            front.zero_grad()
        assert math.isclose(float(norm), clipping.last_norm, rel_tol=1e-5)
    found, wanted = states(optimizer), states(clipping)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=2e-6, atol=1e-9), name
    for one in (model, other):
        release(one)


def looks_outside(each: ps_dist.TorchCollectives) -> None:
    """Evaluation between steps, whole state dicts, materialized parameters, release: every rank sees the whole."""
    model, optimizer = Way(precision="bf16").chunked(each, 1)
    start = made()
    for name, value in model.state_dict().items():
        assert torch.equal(value.float(), start.state_dict()[name].to(value.dtype).float()), name
    part = next(batches(0, 1))
    passes(model, optimizer, [part], 1)
    with torch.no_grad():
        first = model(part[0])
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        assert not torch.equal(first, model(part[0]))
    saved, weights = optimizer.state_dict(masters=True), model.state_dict()
    with materialized(model, ["norm.bias"], write=True):
        model.norm.bias.data.fill_(0.25)  # type: ignore[operator, union-attr]
    assert torch.equal(model.state_dict()["norm.bias"], torch.full((WIDTH,), 0.25))
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    again = optimizer.state_dict(masters=True)
    for index, value in masters_of(saved).items():
        assert torch.equal(value, masters_of(again)[index])
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    plain = release(model)
    assert all(type(parameter) is nn.Parameter for parameter in plain.parameters())
    for name, value in plain.state_dict().items():
        assert torch.equal(value, weights[name]), name


def resumes(each: ps_dist.TorchCollectives, folder: str) -> None:
    """By torch's own functions, and by plain state dicts: every rank has the whole, and goes on to the bit."""
    way = Way(precision="bf16", rule="adamw")
    model, optimizer = way.chunked(each, 1)
    others = [way.chunked(each, 1) for _ in range(3)]
    loaded, by_hand, touched = others
    parts = [list(batches(step, each.mesh.size))[each.mesh.rank :: each.mesh.size] for step in range(3)]
    for part in parts[:2]:
        passes(model, optimizer, part, each.mesh.size)
        optimizer.step()
    before = states(optimizer)
    weights, state = get_state_dict(model, optimizer)
    after = states(optimizer)
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "reading it changed it"
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    weights, state = get_state_dict(*loaded)
    found = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(*loaded, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    by_hand[1].load_state_dict(optimizer.state_dict())
    by_hand[0].load_state_dict(model.state_dict())
    touched[0].load_state_dict(model.state_dict())
    touched[1].state = {
        other: optimizer.state[one]
        for one, other in zip(model.parameters(), touched[0].parameters(), strict=True)
        if one in optimizer.state
    }
    for group, there in zip(touched[1].param_groups, optimizer.param_groups, strict=True):
        group["lr"] = there["lr"]
    for pair in ((model, optimizer), *others):
        for entry in pair[1].state.values():
            entry["exp_avg"][:1] *= 0.5
        passes(*pair, parts[2], each.mesh.size)
        pair[1].step()
    expected = states(optimizer)
    for other, its in others:
        assert all(torch.equal(value, states(its)[name]) for name, value in expected.items())
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
        release(other)
    release(model)


def must_be_alike(each: ps_dist.TorchCollectives) -> None:
    """Another seed, model or setting on one rank is found before anything is trained."""
    odd = each.mesh.rank == each.mesh.size - 1
    with pytest.raises(RanksDiverged, match=r"the initial parameters .* must be the same on all ranks"):
        chunked(made(6 if odd else 5), SGD(lr=0.1), collectives=each)
    with pytest.raises(RanksDiverged, match="the model and its groups must be the same on all ranks"):
        chunked(nn.Linear(3, 4 if odd else 5), SGD(lr=0.1), collectives=each)
    with pytest.raises(RanksDiverged, match=r"how it is trained must be the same on all ranks.*lr=0.1.*lr=0.2"):
        chunked(made(), SGD(lr=0.2 if odd else 0.1), collectives=each)
    disk = {"disk": "1MiB", "disk_dir": tempfile.gettempdir()} if odd else {}
    budget = Budget(host="64MiB", **disk)
    with pytest.raises(RanksDiverged, match=r"how it is trained must be the same .*in host,.*in host and disk,"):
        chunked(made(), SGD(lr=0.1), budget=budget, precision="fp32", collectives=each)
    each.barrier()


def assigned_and_changed(each: ps_dist.TorchCollectives) -> None:
    """Tensors that were assigned, then clipped in place: as in one process that is given their sums."""
    for precision in ("fp32", "bf16"):
        model, optimizer = chunked(made(), SGD(lr=0.1), precision=precision, collectives=each)
        single, reference = chunked(made(), SGD(lr=0.1), precision=precision)
        for step in range(2):
            for front, times in ((model, 1), (single, each.mesh.size)):
                trained = [parameter for parameter in front.parameters() if parameter.requires_grad]
                found = [torch.full_like(parameter, times * (1.0 + step), device="cpu") for parameter in trained]
                for parameter, gradient in zip(trained, found, strict=True):
                    parameter.grad = gradient
                for gradient in found:
                    gradient.mul_(0.5)
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        found, wanted = model.state_dict(), single.state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), precision
        release(model)
        release(single)


def released_after_parting(each: ps_dist.TorchCollectives) -> None:
    """A step is refused, since one rank forgot a gradient; the model is released with the weights from before it."""
    odd = each.mesh.rank == each.mesh.size - 1
    model, optimizer = chunked(made(), SGD(lr=0.1), precision="fp32", collectives=each)
    model(torch.arange(ROWS)).sum().backward()
    if odd:
        model.norm.weight.grad = None
    with pytest.raises(RanksDiverged, match="which parameters have gradients must be the same on all ranks"):
        optimizer.step()
    release(model)
    assert all(torch.equal(value, made().state_dict()[name]) for name, value in model.state_dict().items())


def parts_ways(each: ps_dist.TorchCollectives) -> str:
    """One rank steps while the other begins another pass: both are told, and where."""
    torch.manual_seed(0)
    model, optimizer = chunked(nn.Linear(30, 30), SGD(lr=0.1), precision="fp32", collectives=each)

    def train() -> None:
        for _ in range(3):
            model(torch.randn(2, 30)).sum().backward()
            if each.mesh.rank == 0:
                optimizer.step()

    with pytest.raises(RanksDiverged) as caught:
        train()
    return str(caught.value)


CASES: dict[str, Callable[..., Any]] = {
    case.__name__: case
    for case in (
        some_gradients,
        given_gradients,
        overflows,
        clips_like_torch,
        looks_outside,
        must_be_alike,
        assigned_and_changed,
        released_after_parting,
    )
}
