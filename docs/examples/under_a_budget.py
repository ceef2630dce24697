"""Train a small GPT twice: in plain PyTorch, and on an emulated accelerator that holds a part of its model data.

    python docs/examples/under_a_budget.py

It learns the pages of this documentation, byte by byte. The losses of both trainings and all fp32 weights afterwards
must be the same to the last bit; the exit status is 0 if they are, the budget was kept and the plan was followed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ps_core import AdamW, Budget
from ps_core.engine import Statistics, chunked, statistics
from ps_models import GPT, build

PAGES = Path(__file__).resolve().parents[1]
LAYERS, HIDDEN, HEADS = 12, 128, 4
BATCH, LENGTH, STEPS = 4, 64, 30
LR, WEIGHT_DECAY = 1e-3, 0.1
BUDGET = "7MiB"
T = TypeVar("T")


def make(device: str) -> GPT:
    """The model; on ``meta`` it takes no memory, and `chunked` draws the same weights later."""
    torch.manual_seed(0)
    shape = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "vocabulary": 256, "positions": LENGTH}
    return build("gpt2", device, checkpoint_blocks=True, **shape)


def batches(steps: int) -> Iterator[Tensor]:
    """The same pieces of text each time."""
    text = torch.tensor(list(b"".join(page.read_bytes() for page in sorted(PAGES.glob("*.md")))))
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([text[start : start + LENGTH] for start in starts])


def train_plain(steps: int) -> tuple[list[float], list[Tensor]]:
    """Plain PyTorch in bf16 with fp32 masters, everything in memory: losses and masters."""
    model = make("cpu")
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    model.to(torch.bfloat16)
    losses = []
    for input_ids in batches(steps):
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None, "every parameter is used"
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses, masters


def train_under_a_budget(steps: int) -> tuple[list[float], list[Tensor], Statistics]:
    """The same loop as anybody's, after one call of `chunked`."""
    model, optimizer = chunked(
        make("meta"),
        AdamW(lr=LR, weight_decay=WEIGHT_DECAY),
        device="emulated",
        budget=Budget(device=BUDGET),
        precision="bf16",
    )
    assert optimizer is not None, "an optimizer was asked for"
    losses = []
    for input_ids in batches(steps):
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    masters = [entry["master"] for entry in optimizer.state_dict(masters=True)["state"].values()]
    return losses, masters, statistics(model)


def main(steps: int = STEPS) -> int:
    """Train, compare and tell; 0 if everything is as promised."""
    print(problem())
    torch.set_num_threads(1)  # a model this small is no faster with more, and much slower beside other programs
    train_plain(1)  # the first pass of a process may choose other kernels than the next ones
    plain_s, (free, free_masters) = timed(lambda: train_plain(steps))
    managed_s, (limited, masters, counted) = timed(lambda: train_under_a_budget(steps))
    for step, (one, other) in enumerate(zip(free, limited, strict=True), 1):
        if step in (1, steps) or step % 5 == 0:
            print(f"  {step:4}   {one:18.7f}   {other:18.7f}   {'yes' if one == other else 'NO'}")
    same = free == limited and all(map(torch.equal, free_masters, masters))
    device = counted.tiers["device"]
    kept = device.peak_bytes <= device.budget_bytes
    planned = counted.planned_passes > 0 and counted.evictions > 0
    print(
        f"\n  all {steps} losses and all fp32 weights afterwards: {'equal' if same else 'NOT EQUAL'}",
        f"  bytes on the accelerator       {device.peak_bytes:>13,} at most, of {device.budget_bytes:,}: "
        + ("kept" if kept else "EXCEEDED"),
        *(f"  bytes moved {link:18} {moved:>13,}" for link, moved in counted.moved_bytes.items()),
        f"  evictions                      {counted.evictions:>13,}",
        f"  passes that followed the plan  {counted.planned_passes:>13,} of {counted.passes} "
        f"({counted.moments} moments each, {counted.groups} groups): {'yes' if planned else 'NO'}",
        f"  seconds                        {managed_s:13.1f} (plain PyTorch: {plain_s:.1f})\n",
        sep="\n",
    )
    return 0 if same and kept and planned else 1


def problem() -> str:
    """What is trained."""
    numel = sum(parameter.numel() for parameter in make("meta").parameters())
    return (
        f"A GPT of {numel:,} parameters learns this documentation, byte by byte.\n\n"
        f"  model data        {14 * numel:,} bytes: 14 a parameter (bf16 weight, fp32 weight, two fp32 moments)\n"
        f"  the accelerator   {BUDGET}, emulated: its memory is a part of the computer's, the CPU does its work\n\n"
        "  step   loss, plain PyTorch   loss, under budget   equal, bit for bit"
    )


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """How long it took, and what came out."""
    started = time.monotonic()
    result = work()
    return time.monotonic() - started, result


if __name__ == "__main__":
    sys.exit(main())
