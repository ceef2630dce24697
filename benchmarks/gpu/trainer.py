"""One training in a process of its own, which takes steps when it is told to: ``engine.py`` starts and asks it.

Told ``turn 3``, it takes three steps, waits for the device, and answers with a line of JSON behind ``@@``. Weights
repeat one random block, for drawing all of them takes longer than the steps that are timed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from fp32_masters import MasterAdamW
from regime import check_first_loss, check_regime

Row = dict[str, Any]
MARK = "@@ "


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    name: str
    how: str
    """``engine``, ``plain`` (all on the device), ``masters`` (so, computed in bf16 beside fp32 masters), ``fsdp2``
    (PyTorch's own offloading to the CPU), ``torchao`` or ``deepspeed`` (bf16, the optimizer on the CPU)."""
    layers: int
    hidden: int
    device_bytes: int | None = None
    """The engine's budget; None: what is free less a tenth."""
    host_bytes: int | None = None
    batch: int = 8
    length: int = 1024
    vocabulary: int = 50304
    warm_ups: int = 3
    on: str = "cuda"
    reshard: bool = True
    """FSDP2: whether weights come anew for backward; kept on the device they are copied there once a step."""
    checkpoint: bool = True
    in_backward: bool = False
    """The engine's steps within backward, for which gradients are not clipped."""
    machine: str | None = None
    """The engine's machine file; None: built-in rates."""
    timeline: str | None = None
    """The file, without its ending, that timelines of profiled steps are written to; None: none is written."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What was made for a case."""

    parameters: int
    step: Callable[[torch.Tensor], float]
    """Forward, backward, clipping, optimizer; returns the loss, for which it waits."""
    facts: Callable[[], Row]
    model: Any
    """As the engine has it, or any other."""


def build(case: Case, on: str) -> Any:
    from ps_models import build as make

    torch.manual_seed(0)
    shape = {"layers": case.layers, "hidden": case.hidden, "heads": max(1, case.hidden // 128)}
    return make(
        "gpt2", on, checkpoint_blocks=case.checkpoint, vocabulary=case.vocabulary, positions=case.length, **shape
    )


@cache
def numbers() -> torch.Tensor:
    return torch.randn(4_194_301, generator=torch.Generator().manual_seed(0))


def tile(weight: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: object = None) -> torch.Tensor:
    """Fill a weight as ``torch.nn.init.normal_`` does, with copies of one block of numbers.

    Each weight begins elsewhere in it, and its length is a prime number: so no row of a weight equals another.
    """
    block = numbers().roll(int(torch.randint(len(numbers()), (), device="cpu"))) * std + mean
    with torch.no_grad():
        for part in weight.view(-1).split(block.numel()):
            part.copy_(block[: part.numel()])
    return weight


def check(case: Case, where: torch.device) -> None:
    """End the process with one line unless the model trains as models do."""
    model = build(case, where.type)
    tokens = torch.randint(case.vocabulary, (case.batch, case.length), device=where)

    def loss_of() -> Any:
        with torch.autocast(where.type, torch.bfloat16):
            return model(tokens, labels=tokens).loss

    check_regime(model, loss_of, case.vocabulary)


def with_engine(case: Case, where: torch.device) -> Training:
    from ps_core import AdamW, Budget, Options
    from ps_core.engine import chunked, statistics

    step_when = "in_backward" if case.in_backward else "after_backward"
    model, optimizer = chunked(
        build(case, "meta"), AdamW(lr=1e-4), device=case.on,
        budget=Budget(device=case.device_bytes, host=case.host_bytes), max_grad_norm=None if case.in_backward else 1.0,
        options=Options(machine=case.machine, step=step_when),
    )  # fmt: skip
    assert optimizer is not None

    def step(tokens: torch.Tensor) -> float:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def facts() -> Row:
        return {"statistics": statistics(model).as_dict()}

    return Training(parameters=sum(p.numel() for p in model.parameters()), step=step, facts=facts, model=model)


def with_torch(model: Any, where: torch.device, *, autocast: bool) -> Training:
    """PyTorch's fused AdamW, wherever the parameters are."""
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), where, autocast=autocast)


def trained(model: Any, optimizer: Any, where: torch.device, *, autocast: bool, clips: bool = True) -> Training:
    """A plain loop."""

    def step(tokens: torch.Tensor) -> float:
        with torch.autocast(where.type, torch.bfloat16, enabled=autocast):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return Training(parameters=sum(p.numel() for p in model.parameters()), step=step, facts=dict, model=model)


def with_plain(case: Case, where: torch.device) -> Training:
    """fp32 weights under autocast."""
    check(case, where)
    if where.type == "cuda":  # the memory of the check is not the training's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return with_torch(build(case, "cpu").to(where), where, autocast=True)


def with_fsdp2(case: Case, where: torch.device) -> Training:
    """One process; parameters, gradients and AdamW's states on the CPU, pinned."""
    from torch.distributed import device_mesh, init_process_group
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    port = os.environ.get("PS_PORT", "29541")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="1")
    init_process_group("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo")
    model = build(case, "cpu")
    options: dict[str, Any] = {
        "mesh": device_mesh.init_device_mesh(where.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=where.type == "cuda"),
    }
    if not case.reshard:  # else the default: all but the outermost module's
        options["reshard_after_forward"] = False
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return with_torch(model, where, autocast=False)


def with_masters(case: Case, where: torch.device) -> Training:
    """Everything on the device: 16 bytes a parameter, as the engine has them, and gradients."""
    model = build(case, "cpu").to(where, torch.bfloat16)
    return trained(model, MasterAdamW(model, lr=1e-4), where, autocast=False)


def with_torchao(case: Case, where: torch.device) -> Training:
    """bf16 weights and gradients on the device; torchao copies gradients to the CPU, which has states and steps."""
    from torchao.optim import CPUOffloadOptimizer

    model = build(case, "cpu").to(where, torch.bfloat16)
    made = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return trained(model, made, where, autocast=False, clips=False)  # its hooks have copied the gradients by then


def with_deepspeed(case: Case, where: torch.device) -> Training:
    """ZeRO stage 2: bf16 weights on the device; gradients, masters and states on the CPU, which steps."""
    import deepspeed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("PS_PORT", "29541"))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    model = build(case, "cpu")
    told = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    made, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=told)

    def step(tokens: torch.Tensor) -> float:
        loss = made(tokens, labels=tokens).loss
        made.backward(loss)
        made.step()
        return float(loss.detach())

    return Training(parameters=sum(p.numel() for p in model.parameters()), step=step, facts=dict, model=made)


def profiled_steps(training: Training, case: Case, where: torch.device, steps: int) -> Row:
    """Take steps of the engine under its profiler: times of the middle one, measured and planned, and timelines.

    The first step finds nothing left of a step before it, and nothing comes behind the last one.
    """
    from ps_core.engine import profiled

    with profiled(training.model) as seen:
        turn(training, case, where, steps, torch.Generator().manual_seed(2))
    middle = steps // 2
    times = {"measured": seen.summary(middle)}
    if seen.planned:
        times["planned"] = seen.summary(middle, planned=True)
    if case.timeline is not None:
        seen.chrome_trace(f"{case.timeline}.json")
        seen.svg(f"{case.timeline}.svg", step=middle)
    return {name: asdict(found) | {"said": str(found)} for name, found in times.items()}


def turn(training: Training, case: Case, where: torch.device, steps: int, generator: torch.Generator) -> Row:
    """Steps from a device that is idle to a device that is idle."""
    batches = [torch.randint(case.vocabulary, (case.batch, case.length), generator=generator) for _ in range(steps)]
    if where.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    losses = [training.step(tokens.to(where)) for tokens in batches]
    if where.type == "cuda":
        torch.cuda.synchronize()
    return {"step_s": (time.perf_counter() - start) / steps, "losses": losses}


WAYS: dict[str, Callable[[Case, torch.device], Training]] = {
    "engine": with_engine, "plain": with_plain, "masters": with_masters, "fsdp2": with_fsdp2, "torchao": with_torchao,
    "deepspeed": with_deepspeed,
}  # fmt: skip


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    where = torch.device("cuda", 0) if case.on == "cuda" else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    start = time.perf_counter()
    torch.nn.init.normal_ = tile  # type: ignore[assignment]
    training = WAYS[case.how](case, where)
    answer({"parameters": training.parameters, "built_s": time.perf_counter() - start})
    generator, first = torch.Generator().manual_seed(1), True
    for line in sys.stdin:
        word, _, count = line.strip().partition(" ")
        if word == "turn":
            row = turn(training, case, where, int(count), generator)
            if first:
                check_first_loss(row["losses"][0], case.vocabulary)
            first = False
            answer(row)
        elif word == "profile":
            answer({"profile": profiled_steps(training, case, where, int(count))})
        elif word == "facts":
            peak = torch.cuda.max_memory_reserved() if where.type == "cuda" else None
            answer({"reserved_peak_bytes": peak, **training.facts()})
    sys.stdout.flush()
    os._exit(0)  # what is asked for has been answered, and taking tens of gigabytes down in order takes a while


def answer(row: Row) -> None:
    print(MARK + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
