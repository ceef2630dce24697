"""What tests/gpu trains on: a CUDA device, or with ``PS_FAKE_CUDA=1`` one that the CPU plays, so that the tests run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

# Before CUDA begins: the same bits on every stream, and wherever operands lie, by which cuBLASLt chooses what it runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("DISABLE_ADDMM_CUDA_LT", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional

import ps_kernels
from _fake_cuda import FakeRuntime
from _reference import BACKOFF, CLIP_EPS, INITIAL_SCALE
from ps_core import AdamW, Budget, DoesNotFit, Options, machine
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._devices.cuda.runtime import CudaRuntime, TorchRuntime

FAKE = os.environ.get("PS_FAKE_CUDA") == "1"
WHERE = torch.device("cpu") if FAKE else torch.device("cuda", 0)
MISSING = not FAKE and not torch.cuda.is_available()
HOST = "512MiB"
WIDTH, VOCABULARY, LENGTH, STEPS = 64, 128, 8, 4
ADAMW = AdamW(lr=1e-2, weight_decay=0.1)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def new_runtime() -> Any:
    return FakeRuntime(1) if FAKE else TorchRuntime(0)


class Slow(TorchRuntime):
    """Copies come late, now and then."""

    def __init__(self, seed: int, index: int = 0) -> None:
        super().__init__(index)
        self._random = Random(seed)

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        with self.using(stream):
            self.dawdle()
        super().copy(stream, target, source)

    def dawdle(self) -> None:
        if self._random.random() < 0.4:
            torch.cuda._sleep(self._random.randrange(3_000_000))  # type: ignore[no-untyped-call]


def warm_up(*streams: Any) -> None:
    """Let libraries take their workspaces (for each stream, and for backward's thread) before anybody counts."""
    for stream in streams or (torch.cuda.current_stream(),):
        with torch.cuda.stream(stream):
            for kind in DTYPES.values():
                Model(checkpointing=True).to(WHERE, kind)(batch(0)).backward()
    torch.cuda.synchronize()


class Norm(nn.LayerNorm):
    """Computed in what its weights have: PyTorch's on CUDA does not take single-precision ones beside 16-bit inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Block(nn.Module):
    """Sizes that keep every tensor of a group on a boundary of 128 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def reset_parameters(self) -> None:
        """For those who build it on meta."""
        self.get_buffer("scale").fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(functional.gelu(self.wide(self.norm(x)))) * self.scale.to(x.dtype)


class Model(nn.Module):
    """A language model that returns its loss; blocks may be recomputed, and may ask for more memory than there is."""

    def __init__(self, *, blocks: int = 4, checkpointing: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = Norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.checkpointing = checkpointing
        self.appetite: dict[str, int] = {}
        self.between: Callable[[], None] = lambda: None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            self.between()
            if self.checkpointing:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        x = Eat.apply(x, self.appetite)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Eat(torch.autograd.Function):
    """Takes memory where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, appetite: dict[str, int]) -> Tensor:
        ctx.appetite = appetite
        torch.empty(appetite.get("forward", 0), dtype=torch.uint8, device=x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        torch.empty(ctx.appetite.get("backward", 0), dtype=torch.uint8, device=gradient.device)
        return gradient, None


def batch(index: int, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    start = torch.randint(VOCABULARY, (rows, 1), generator=generator)
    return ((start + torch.arange(LENGTH)) % VOCABULARY).to(WHERE)


@dataclass
class Run:
    """One training to compare with another."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    statistics: Any = None
    on_device: int = 0
    """Groups whose states live on the device when it ends."""
    early: list[int] = field(default_factory=list)
    """Of each step, how many groups were stepped within backward."""
    early_on_device: int = 0
    """Number of groups that the plan steps on the device within backward."""

    def differs(self, other: Run) -> list[str]:
        """Everything that is not the same to the bit."""
        wrong = [f"losses {self.losses} and {other.losses}"] if self.losses != other.losses else []
        wrong += [f"norms {self.norms} and {other.norms}"] if self.norms != other.norms else []
        for name, value in self.values.items():
            if not torch.equal(value, other.values[name]):
                wrong.append(f"{name}: by up to {(value.double() - other.values[name].double()).abs().max():.3g}")
        return wrong


def train_step(
    model: Any, optimizer: Any, index: int, micro_batches: int = 1, between: Callable[[], None] = lambda: None
) -> float:
    """Take a step; ``between`` is called between backward and the step of the optimizer."""
    loss = torch.zeros(())
    for micro in range(micro_batches):
        loss = model(batch(10 * index + micro))
        optimizer.scale(loss).backward()
    between()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@contextmanager
def managed(model: nn.Module, spec: Any, size: int | str | None, **more: Any) -> Iterator[tuple[Any, Any, CudaDevice]]:
    """Under management on the device of these tests; released at the end, whatever happens."""
    runtime: CudaRuntime | None = more.pop("runtime", None)
    runtime = runtime or new_runtime()
    options = more.pop("options", Options(group_bytes=32 * 1024, poison=True))
    device = CudaDevice(runtime)
    with runtime if isinstance(runtime, FakeRuntime) else nullcontext():
        made, optimizer = chunked(
            model, spec, device=device, budget=Budget(device=size, host=HOST), options=options, **more
        )
        try:
            yield made, optimizer, device
        finally:
            release(made)


def train(
    spec: Any,
    size: int | str | None,
    *,
    steps: int = STEPS,
    micro_batches: int = 1,
    checkpointing: bool = False,
    **more: Any,
) -> Run:
    """From the same start each time; ``max_grad_norm`` may be a list, of one limit a step."""
    torch.manual_seed(3)
    model, run, limits = Model(checkpointing=checkpointing), Run(), more.get("max_grad_norm")
    model.between = more.pop("between", model.between)
    if isinstance(limits, list):
        more["max_grad_norm"] = limits[0]
    with managed(model, spec, size, accumulation_steps=micro_batches, **more) as (made, optimizer, _):
        engine = made.table.weight._owner

        def count_early() -> None:
            undecided = () if engine.speculation is None else engine.speculation._early
            run.early.append(len(engine.stepping.groups) + len(undecided))

        for index in range(steps):
            if isinstance(limits, list):
                optimizer.max_grad_norm = limits[index]
            run.losses.append(train_step(made, optimizer, index, micro_batches, count_early))
            run.norms.append(optimizer.last_norm)
        run.on_device = sum(
            chunk.home.tier == 0 for group in engine.groups for kind, chunk in group.chunks.items() if kind.value == "m"
        )
        plan = engine.passes.scheduler.planned
        run.early_on_device = 0 if plan is None else len(plan.plan.stepped_in_backward)
        run.statistics = statistics(made)
        run.values = {name: value.cpu() for name, value in made.state_dict().items()}
        masters = optimizer.state_dict(masters=True)
        for index, entry in masters["state"].items():
            run.values |= {f"{key} {index}": value for key, value in entry.items()}
    return run


LOOSE, STRICT = 1e9, 1e-3
LIMITS = [*[LOOSE] * 4, STRICT, *[LOOSE] * 3, STRICT, *[LOOSE] * 3]
"""Of each step: a norm that no gradients have, or that all exceed."""


def train_early(step: str, least_bytes: int, at: int = -1, *, on_device: bool = False, **more: Any) -> Run:
    """Train in the first of several budgets in which groups are stepped within backward, at this step of the run.

    With hardly any memory a plan moves one thing at a time, and with much of it the device steps all groups: neither
    has such steps. In between the planner has them where the simulated time is less with them. On built-in GPUs a
    model as small as this waits for its launches, whenever it steps. So plans are for a machine that takes no time for
    them. ``on_device``: the plan must step groups on the device, as it does where the processor is slow.
    """
    rates = machine("cpu")
    slow = replace(rates, host_bandwidth=rates.host_bandwidth / 50, host_dram_bandwidth=rates.host_bandwidth)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "machine.toml"
        file.write_text((slow if on_device else rates).to_toml(), "utf-8")
        options = Options(group_bytes=32 * 1024, poison=True, step=step, machine=str(file))
        for halves in (5, 6, 8, 4, 12, 3):
            run = train(ADAMW, least_bytes * halves // 2, options=options, **more)
            if run.early[at] and (run.early_on_device or not on_device):
                return run
    raise AssertionError("no plan steps a group within backward")


def check_undone(run: Run) -> None:
    """Raise unless groups were stepped within backward, and some of that undone, as `LIMITS` wants it.

    A first plan may be of fake tensors. Where a card shows that it is wrong, another takes its place, and steps are
    undone for that.
    """
    steps = zip(LIMITS, run.norms, strict=True)
    stopped = [limit == STRICT or norm is None or not math.isfinite(norm) for limit, norm in steps]
    undone = sum(count for count, bad in zip(run.early, stopped, strict=True) if bad)
    replaced = 0 if FAKE else sum(run.early[:2])
    assert 0 < undone <= run.statistics.undone_group_steps <= undone + replaced
    assert sum(run.early) > undone, "none was kept"
    behind = [count for count, bad in zip(run.early[1:], stopped, strict=False) if bad]
    assert not any(behind), "a group was stepped within backward after a step that was clipped or skipped"


@cache
def tight(precision: str = "bf16", micro_batches: int = 1, *, checkpointing: bool = False) -> int:
    """About the smallest budget that such a training runs in."""

    def attempt(size: int) -> None:
        train(ADAMW, size, steps=2, precision=precision, micro_batches=micro_batches, checkpointing=checkpointing)

    return least(attempt)


def least(attempt: Callable[[int], object]) -> int:
    """About the smallest budget with which this does not raise `DoesNotFit`."""
    size = 128 * 1024
    while True:
        try:
            attempt(size)
            return size if FAKE else size + size // 8  # on a card a later step may come to need a little more
        except DoesNotFit as error:
            size = max(size + size // 4, error.needed_bytes)


def train_plain(
    spec: Any,
    precision: str,
    *,
    max_grad_norm: float | None,
    steps: int = STEPS,
    micro_batches: int = 1,
    rounds: bool = False,
) -> Run:
    """Everything resident on the device, one call of a kernel a tensor, AdamW.

    ``rounds``: sums of gradients are rounded once to what is computed with, as sums over processes are.
    """
    torch.manual_seed(3)
    model, run = Model(), Run()
    masters = [p.detach().float().reshape(-1).clone().to(WHERE) for p in model.parameters()]
    states = [(torch.zeros_like(each), torch.zeros_like(each)) for each in masters]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(WHERE, DTYPES[precision])
    model.to(WHERE)
    scale = INITIAL_SCALE if precision == "fp16" else 1.0
    taken = 0
    for index in range(steps):
        sums: list[Tensor | None] = [None] * len(masters)
        loss = torch.zeros(())
        for micro in range(micro_batches):
            loss = model(batch(10 * index + micro))
            (loss * scale).backward()
            for place, parameter in enumerate(model.parameters()):
                assert parameter.grad is not None
                before, sums[place] = sums[place], parameter.grad.reshape(-1).float()
                sums[place] = sums[place] if before is None else before + sums[place]
                parameter.grad = None
        if rounds:
            sums = [None if each is None else each.to(DTYPES[precision]).float() for each in sums]
        squares, finite = 0.0, True
        for gradient in sums:
            out = torch.zeros(2, device=WHERE)
            ps_kernels.sumsq_finite(gradient, out)
            squares, finite = squares + out[0].item(), finite and not out[1].item()
        norm = math.sqrt(squares) / scale
        run.losses.append(loss.item())
        run.norms.append(norm if finite else math.inf)
        if not finite:
            scale *= BACKOFF
            continue
        factor = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + CLIP_EPS))
        taken += 1
        for parameter, master, (first, second), gradient in zip(model.parameters(), masters, states, sums, strict=True):
            ps_kernels.adam_step(
                master, first, second, gradient, step=taken, lr=spec.lr, beta1=spec.betas[0], beta2=spec.betas[1],
                eps=spec.eps, weight_decay=spec.weight_decay, grad_scale=factor / scale,
            )  # fmt: skip
            with torch.no_grad():
                parameter.copy_(master.view(parameter.shape))
    run.values = {f"master {place}": each.cpu().view(p.shape) for place, (each, p) in enumerate(
        zip(masters, model.parameters(), strict=True))}  # fmt: skip
    return run
