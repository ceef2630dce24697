"""Training GPTs on a CUDA device: tokens and TFLOP a second, for models that fit it and models that do not.

Each case runs in a process of its own, so that none inherits memory from another, and under a time limit. TFLOPS count
8 operations a parameter and token, 2 of them for recomputing blocks: the published convention.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    name: str
    how: str
    """``engine``, ``plain`` (all on the device) or ``fsdp2`` (PyTorch's own offloading to the CPU)."""
    layers: int
    hidden: int
    device_bytes: int | None = None
    """The engine's budget; None: what is free less a tenth."""
    batch: int = 8
    length: int = 1024
    vocabulary: int = 50304
    steps: int = 4
    warm_ups: int = 3
    limit_s: int = 100
    on: str = "cuda"


CASES = (
    Case(name="plain, 1.3B", how="plain", layers=24, hidden=2048),
    Case(name="engine, 1.3B, all the device", how="engine", layers=24, hidden=2048),
    Case(name="engine, 1.3B in 12 GiB", how="engine", layers=24, hidden=2048, device_bytes=12 * GIB),
    Case(name="FSDP2 with CPU offload, 1.3B", how="fsdp2", layers=24, hidden=2048),
    Case(name="engine, 2.7B in 16 GiB", how="engine", layers=32, hidden=2560, device_bytes=16 * GIB),
    Case(name="FSDP2 with CPU offload, 2.7B", how="fsdp2", layers=32, hidden=2560, steps=2, warm_ups=1),
)
DRY = tuple(
    Case(
        name=f"engine, dry, {budget}", how="engine", layers=2, hidden=64, device_bytes=budget, batch=2, length=32,
        vocabulary=128, steps=1, warm_ups=2, limit_s=60, on="emulated",
    )
    for budget in (2**21, 2**24)
)  # fmt: skip
LARGEST_LAYERS, LARGEST_HIDDEN = (8, 16, 24, 32, 48), 5120
"""Tried one after the other until one does not fit: 2.8 to 15 thousand million parameters."""


def build(case: Case, on: str) -> Any:
    from ps_models import build as make

    torch.manual_seed(0)
    shape = {"layers": case.layers, "hidden": case.hidden, "heads": max(1, case.hidden // 128)}
    return make("gpt2", on, checkpoint_blocks=True, vocabulary=case.vocabulary, positions=case.length, **shape)


def train(case: Case) -> Row:
    """Time the steps after the first few."""
    where = torch.device("cuda", 0) if case.on == "cuda" else torch.device("cpu")
    made: Callable[[Case, torch.device], tuple[Any, Callable[[torch.Tensor], float], Callable[[], Row]]]
    made = {"engine": with_engine, "plain": with_plain, "fsdp2": with_fsdp2}[case.how]
    parameters, step, more = made(case, where)
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    generator = torch.Generator().manual_seed(1)
    for _ in range(case.warm_ups + case.steps):
        start = time.perf_counter()
        tokens = torch.randint(case.vocabulary, (case.batch, case.length), generator=generator).to(where)
        losses.append(step(tokens))  # which waits for the loss
        times.append(time.perf_counter() - start)
    elapsed = statistics.median(times[case.warm_ups :])
    count = case.batch * case.length
    return {
        "name": case.name,
        "parameters": parameters,
        "step_s": elapsed,
        "steps_s": times,
        "tokens_per_s": count / elapsed,
        "tflops": 8 * parameters * count / elapsed / 1e12,
        "losses": losses,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated() if where.type == "cuda" else None,
        **more(),
    }


def with_engine(case: Case, where: torch.device) -> tuple[int, Callable[[torch.Tensor], float], Callable[[], Row]]:
    from ps_core import AdamW, Budget
    from ps_core.engine import chunked, statistics

    device: Any = case.on
    model, optimizer = chunked(
        build(case, "meta"), AdamW(lr=1e-4), device=device, budget=Budget(device=case.device_bytes), max_grad_norm=1.0
    )
    assert optimizer is not None

    def step(tokens: torch.Tensor) -> float:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return sum(p.numel() for p in model.parameters()), step, lambda: {"statistics": statistics(model).as_dict()}


def with_plain(case: Case, where: torch.device) -> tuple[int, Callable[[torch.Tensor], float], Callable[[], Row]]:
    """fp32 weights under autocast, torch's fused AdamW."""
    model = build(case, "cpu").to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: torch.Tensor) -> float:
        with torch.autocast(where.type, torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return sum(p.numel() for p in model.parameters()), step, dict


def with_fsdp2(case: Case, where: torch.device) -> tuple[int, Callable[[torch.Tensor], float], Callable[[], Row]]:
    """One process; parameters, gradients and AdamW's states on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=where)
    model = build(case, "cpu")
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (1,))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(),
    }
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: torch.Tensor) -> float:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return sum(p.numel() for p in model.parameters()), step, dict


def in_a_process(case: Case) -> Row:
    """A case's row, or why there is none."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=case.limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"name": case.name, "failed": f"not done after {case.limit_s} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        return {"name": case.name, "failed": f"exit status {done.returncode}: {last[:300]}"}
    found: Row = json.loads(lines[-1])
    return found


def largest(limit_s: float) -> list[Row]:
    """Ever larger models, with all that the device and the host have, until one does not fit or time is up."""
    rows: list[Row] = []
    end = time.monotonic() + limit_s
    for layers in LARGEST_LAYERS:
        left = end - time.monotonic()
        if left < 30 or (rows and "failed" in rows[-1]):
            break
        case = Case(
            name=f"engine, {layers} layers of {LARGEST_HIDDEN}, all there is", how="engine", layers=layers,
            hidden=LARGEST_HIDDEN, steps=1, warm_ups=2, limit_s=int(min(left, 150)),
        )  # fmt: skip
        rows.append(in_a_process(case))
    return rows


def show(rows: list[Row]) -> None:
    for each in rows:
        if "failed" in each:
            print(f"{each['name']:44} {each['failed']}")
            continue
        print(
            f"{each['name']:44}{each['parameters'] / 1e9:7.2f}B {each['step_s']:8.3f} s/step"
            f"{each['tokens_per_s']:10.0f} tokens/s{each['tflops']:8.1f} TFLOPS"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0, help="for all cases together")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny models on the emulated device: shows that this runs"
    )
    parser.add_argument("--case", help="one case, in this process")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(train(Case(**json.loads(options.case)))))
        return 0
    end, rows = time.monotonic() + options.seconds, []
    for case in DRY if options.dry_run else CASES:
        if time.monotonic() + 20 < end:
            rows.append(in_a_process(case))
            show(rows[-1:])
    if not options.dry_run:
        rows += largest(end - time.monotonic())
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1), "utf-8")
    print("TABLE training, 8 operations a parameter and token")
    show(rows)
    return int(any("failed" in each for each in rows) and options.dry_run)


if __name__ == "__main__":
    sys.exit(main())
