"""What the engine costs and moves, beside plain PyTorch in the same run: four figures.

    python benchmarks/engine_figures.py [all-fits] [tight] [bytes] [bookkeeping]
        [--rounds 15] [--starts 3] [--precision fp32 bf16]

Contenders take turns, a training step each, in processes of their own; a ratio is taken within a round, so that what
disturbs the machine disturbs both. A process keeps the pages it was given, and with them its speed: so all are started
anew after every few rounds. Printed are medians, and the quartiles and the range of the ratios.
"""

from __future__ import annotations

import argparse
import statistics as numbers
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp32_masters import MasterAdamW
from own_process import Contender, OwnProcess
from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker
from regime import check_regime
from slow_links import SlowDevice, ThrottledLinks
from turns import ratios, spread, take_turns

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BYTES_PER_PARAMETER = {"fp32": 16, "bf16": 14}
LINK_BYTES_PER_S = 10e9
PARTS = (0.2, 0.35, 0.5, 0.65, 0.8)
HOST = "4GiB"
Step = Callable[[], None]


class Repeats(NamedTuple):
    """Numbers of rounds and of starts with which a figure is measured."""

    rounds: int = 15
    starts: int = 3
    """The number of times that the contenders' processes are started; with fewer rounds than this, once a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A GPT, and the batch it is trained on; as it stands, 50 million parameters."""

    layers: int = 8
    hidden: int = 640
    heads: int = 10
    vocabulary: int = 16384
    batch: int = 4
    length: int = 256


class Table(nn.Embedding):
    """An embedding whose rows are drawn as GPT-2's are; see `regime` for what rows from N(0, 1) would do to a head."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """Attention and two linear layers, each after a norm and beside a way around."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.before_attention, self.before_wide = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.into, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        split = self.into(self.before_attention(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.narrow(functional.gelu(self.wide(self.before_wide(x))))


class GPT(nn.Module):
    """Tokens in, the loss of predicting each from those before it out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = Table(shape.vocabulary, shape.hidden)
        self.places = Table(shape.length, shape.hidden)
        self.blocks = nn.Sequential(*[Block(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch: Tensor) -> Tensor:
        x = self.tokens(batch) + self.places.weight[: batch.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def make(shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    return GPT(shape)


def batches(shape: Shape) -> Iterator[Tensor]:
    rng = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(shape.vocabulary, (shape.batch, shape.length), generator=rng)


def training(model: nn.Module, optimizer: Any, shape: Shape, *, autocast: bool = False) -> Step:
    """A training step at each call."""
    data = batches(shape)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def check(shape: Shape, precision: str) -> None:
    """End the program with one line unless the model trains as models do."""
    model, batch = make(shape).to(DTYPES[precision]), next(batches(shape))
    check_regime(model, lambda: model(batch), shape.vocabulary)


SAME_NUMBERS = "loop with fp32 masters"
PLAIN_WAYS = {"fp32": ("plain fp32",), "bf16": ("plain pure bf16", "plain autocast bf16", SAME_NUMBERS)}
"""The plain loops to compare with; of several names that begin with "plain", the fastest counts."""


@contextmanager
def plain(shape: Shape, way: str) -> Iterator[Contender]:
    """A plain loop, by its name in `PLAIN_WAYS`."""
    autocast = "autocast" in way
    model = make(shape).to(torch.float32 if way in ("plain fp32", "plain autocast bf16") else torch.bfloat16)
    optimizer = MasterAdamW(model) if way == SAME_NUMBERS else torch.optim.AdamW(model.parameters(), fused=True)
    yield training(model, optimizer, shape, autocast=autocast), dict


@contextmanager
def under(shape: Shape, precision: str, **told: Any) -> Iterator[tuple[nn.Module, Step]]:
    """A step of the same model under management."""
    model, optimizer = chunked(make(shape), AdamW(), precision=precision, **told)
    try:
        yield model, training(model, optimizer, shape)
    finally:
        release(model)


@contextmanager
def with_room(shape: Shape, precision: str, device: str, budget: Budget) -> Iterator[Contender]:
    """The engine, telling its statistics."""
    with under(shape, precision, device=device, budget=budget) as (model, step):
        yield step, partial(statistics, model)


@contextmanager
def behind_links(shape: Shape, precision: str, size: int) -> Iterator[Contender]:
    """The engine behind slow links, telling its statistics, and each step's seconds of copies and bytes moved."""
    device, copied_s, moved_bytes = SlowDevice(ThrottledLinks(LINK_BYTES_PER_S)), list[float](), list[int]()
    with under(shape, precision, device=device, budget=Budget(device=size, host=HOST)) as (model, step):

        def counted() -> None:
            device.copied_s.clear()
            before = moved(model)
            step()
            copied_s.append(sum(device.copied_s))
            moved_bytes.append(moved(model) - before)

        yield counted, lambda: (statistics(model), copied_s, moved_bytes)


def in_processes(
    contenders: dict[str, Callable[[], OwnProcess]], repeats: Repeats, **turns: int
) -> tuple[dict[str, list[float]], list[Any]]:
    """Return each contender's seconds in each round, and what "emulated" told after each start.

    Each start is followed by as many rounds, so there may be up to ``starts`` - 1 more than asked for.
    """
    starts = min(repeats.starts, repeats.rounds)
    each = -(-repeats.rounds // starts)
    taken, told = {name: list[float]() for name in contenders}, list[Any]()
    for start_number in range(starts):
        with ExitStack() as processes:
            started = {name: processes.enter_context(start()) for name, start in contenders.items()}
            for name, seconds in take_turns(started, each, first=start_number * each, **turns).items():
                taken[name] += seconds
            told.append(started["emulated"].told())
    return taken, told


def show_speed(taken: dict[str, list[float]], shape: Shape, ours: str) -> float:
    """Print tokens a second, and the ratio to the faster plain loop; returns its median."""
    for name, seconds in taken.items():
        print(f"  {name:24} {shape.batch * shape.length / numbers.median(seconds):8.0f} tokens/s")
    best = fastest_plain(taken)
    found = ratios(taken[best], taken[ours])
    print(f"  {ours} / {best}: {spread(found)} of {len(found)} rounds")
    if SAME_NUMBERS in taken:
        print(f"  {ours} / {SAME_NUMBERS}: {spread(ratios(taken[SAME_NUMBERS], taken[ours]))}")
    return numbers.median(found)


def fastest_plain(taken: dict[str, list[float]]) -> str:
    return min((name for name in taken if name.startswith("plain")), key=lambda name: numbers.median(taken[name]))


def peak_of_activations(shape: Shape, precision: str) -> int:
    """Most bytes beside the parameters in a pass: gradients are let go as they come."""
    model, tracker = make(shape).to(DTYPES[precision]), TensorBytesTracker()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    tracker.start()
    model(next(batches(shape))).backward()
    tracker.stop()
    return tracker.take_peak()


def parameters_of(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(shape).parameters())


def moved(model: nn.Module) -> int:
    return sum(statistics(model).moved_bytes.values())


def least_moved(shape: Shape, precision: str, budget: int, peak: int, *, on_host: bool = False) -> float:
    """Bytes that must cross the link in a step, whatever the order of moves; counted at the moment of the peak.

    A gradient goes down and a new parameter comes up, unless masters and moments (12 bytes) live on the accelerator.
    Matrices, but for the table of places, are read on both sides of the peak: what of them is not there comes up twice.
    Room saves most per byte where it holds the matrices, then where it holds masters and moments in their stead; it
    holds none of those if every step is taken ``on_host``.
    """
    size = DTYPES[precision].itemsize
    with torch.device("meta"):
        matrices = {name: each.numel() for name, each in GPT(shape).named_parameters() if each.dim() > 1}
    again, room = size * (sum(matrices.values()) - matrices["places.weight"]), max(0, budget - peak)
    saved = 0.0 if on_host else 2 * size / (12 - size) * max(0, room - again)
    return max(0.0, 2 * size * parameters_of(shape) - saved) + max(0, again - room)


def all_fits(shape: Shape, precision: str, repeats: Repeats) -> dict[str, float]:
    """Room for everything: what hooks, arena and moves cost."""
    print(f"all fits, {precision}")
    check(shape, precision)
    peak, data = peak_of_activations(shape, precision), parameters_of(shape) * BYTES_PER_PARAMETER[precision]
    budgets = {"emulated": Budget(device=2 * (peak + data), host=HOST), "cpu": Budget(host=HOST)}
    contenders = {way: partial(OwnProcess, plain, shape, way) for way in PLAIN_WAYS[precision]}
    for device, budget in budgets.items():
        contenders[device] = partial(OwnProcess, with_room, shape, precision, device, budget)
    taken, told = in_processes(contenders, repeats)
    found = told[-1]
    print(f"  {found.groups} groups, {found.fetches} fetches, {found.moved_bytes}, {found.adam_backend}")
    return {
        ours: show_speed({**{way: taken[way] for way in PLAIN_WAYS[precision]}, ours: taken[ours]}, shape, ours)
        for ours in budgets
    }


def tight(shape: Shape, precision: str, repeats: Repeats) -> dict[str, float]:
    """Room for the activations and three tenths of the model data, over a slow link."""
    print(f"tight, {precision}")
    check(shape, precision)
    peak, data = peak_of_activations(shape, precision), parameters_of(shape) * BYTES_PER_PARAMETER[precision]
    size = peak + int(0.3 * data)
    contenders = {way: partial(OwnProcess, plain, shape, way) for way in PLAIN_WAYS[precision]}
    contenders["emulated"] = partial(OwnProcess, behind_links, shape, precision, size)
    taken, told = in_processes(contenders, repeats, warm_up=4)
    last = -(len(taken["emulated"]) // len(told))
    copied_s = [seconds for _, every, _ in told for seconds in every[last:]]
    found, moved_bytes = told[-1][0], [count for _, _, every in told for count in every[last:]]
    ratio, each = show_speed(taken, shape, "emulated"), numbers.mean(moved_bytes)
    computed = [all_s - copy_s for all_s, copy_s in zip(taken["emulated"], copied_s, strict=True)]
    copied_ms, found_ratios = 1000 * numbers.median(copied_s), ratios(taken[fastest_plain(taken)], computed)
    print(f"  without the link's copies ({copied_ms:.0f} ms of the computing thread): {spread(found_ratios)}")
    least, peak_bytes = least_moved(shape, precision, size, peak), found.tiers["device"].peak_bytes
    on_host = least_moved(shape, precision, size, peak, on_host=True)
    print(f"  moved {each / 1e6:.1f} MB a step, at least {least / 1e6:.1f}: {least / each:.3f}")
    print(f"  at least {on_host / 1e6:.1f} MB where every step is taken on the host: {on_host / each:.3f}")
    print(f"  peak {peak_bytes / 1e6:.1f} of {size / 1e6:.1f} MB; activations {peak / 1e6:.1f} MB")
    print(f"  {found.evictions} evictions, {found.prefetch_hits} of {found.fetches} fetches ahead of need")
    return {"speed": ratio, "least / moved": least / each, "peak / budget": peak_bytes / size}


def moved_by(shape: Shape, precision: str, policy: str, size: int, rounds: int) -> tuple[float, float]:
    """Bytes a step: in the first, which runs on demand and evicts what was used longest ago, and by plan."""
    told = {"device": "emulated", "budget": Budget(device=size, host=HOST), "options": Options(policy=policy)}
    with under(shape, precision, **told) as (model, step):
        step()
        first = moved(model)
        step()
        before = moved(model)
        for _ in range(rounds):
            step()
        return first, (moved(model) - before) / rounds


def bytes_moved(shape: Shape, precision: str, repeats: Repeats) -> dict[str, float]:
    """Bytes a step over the least that is possible: by plan, by a plan that evicts as LRU does, by LRU on demand."""
    print(f"bytes moved a step over the least possible, {precision}")
    peak, data = peak_of_activations(shape, precision), parameters_of(shape) * DTYPES[precision].itemsize
    found: dict[str, float] = {}
    for part in PARTS:
        size = peak + int(part * data)
        least = least_moved(shape, precision, size, peak)
        try:
            first, planned = moved_by(shape, precision, "belady", size, repeats.rounds)
            _, lru = moved_by(shape, precision, "lru", size, repeats.rounds)
        except DoesNotFit as error:
            print(f"  room for {part:4.0%} of the parameters: {str(error).splitlines()[0]}")
            continue
        row = {"plan": planned / least, "LRU plan": lru / least, "LRU on demand": first / least}
        found |= {f"{name} at {part:.0%}": ratio for name, ratio in row.items()}
        shown = ", ".join(f"{name} {ratio:.3f}" for name, ratio in row.items())
        print(f"  room for {part:4.0%} of the parameters: {shown} (least {least / 1e6:.1f} MB)")
    return found


def bookkeeping(layers: int, rounds: int) -> dict[str, float]:
    """Microseconds a call of a module with parameters, forward and backward together, where these hardly compute."""
    shape = Shape(layers=layers, hidden=16, heads=2, vocabulary=32, batch=1, length=4)
    check(shape, "fp32")
    batch = next(batches(shape))
    plain_model, model = make(shape), make(shape)
    calls = sum(bool(module._parameters) for module in model.modules())
    budget = Budget(device="64MiB", host="64MiB")
    model, optimizer = chunked(model, AdamW(), device="emulated", precision="fp32", budget=budget)
    contenders = {"plain": (plain_model, torch.optim.AdamW(plain_model.parameters())), "managed": (model, optimizer)}
    costs: list[float] = []
    try:
        for turn in range(10 * rounds + 5):
            seconds = {}
            for name in sorted(contenders, reverse=bool(turn % 2)):
                trained, with_optimizer = contenders[name]
                start = time.perf_counter()
                trained(batch).backward()
                seconds[name] = time.perf_counter() - start
                with_optimizer.step()
                with_optimizer.zero_grad()
            costs.append(1e6 * (seconds["managed"] - seconds["plain"]) / calls)
        found = statistics(model)
    finally:
        release(model)
    costs = costs[5:]  # the first are recorded and planned
    print(f"bookkeeping: {spread(costs)} microseconds a module call, of {len(costs)} rounds and {calls} modules")
    print(f"  {found.groups} groups; {found.planned_passes} of {found.passes} passes by plan, {found.fetches} fetches")
    return {"microseconds": numbers.median(costs)}


FIGURES: dict[str, Callable[[Shape, str, Repeats], dict[str, float]]] = {
    "all-fits": all_fits,
    "tight": tight,
    "bytes": bytes_moved,
}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"found {text}; expected 1 or more")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of the engine.")
    parser.add_argument("figures", nargs="*", default=[*FIGURES, "bookkeeping"])
    parser.add_argument("--rounds", type=_positive, default=Repeats().rounds)
    parser.add_argument(
        "--starts", type=_positive, default=Repeats().starts, help="times that the processes are started"
    )
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=list(DTYPES))
    told = parser.parse_args()
    for name in told.figures:
        for precision in told.precision if name in FIGURES else ():
            FIGURES[name](Shape(), precision, Repeats(told.rounds, told.starts))
    if "bookkeeping" in told.figures:
        bookkeeping(24, told.rounds)


if __name__ == "__main__":
    main()
