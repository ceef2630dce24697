"""Every precision, accumulation, clipping, checkpointing, device and kind of parameters, against plain PyTorch.

SGD, because Adam hides a gradient that is wrong by a factor; and a rate large enough that every bit of it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _models as models
from _cases import finish, next_token, tokens
from _reference import Make, Settings, Spec, plain
from _runs import HOST, check_same, managed, stand_in, tightest
from ps_core import SGD, AdamW, Budget, Group

STEPS = 4
PRECISIONS, MICRO_BATCHES = ("fp32", "bf16", "fp16"), (1, 3)
CLIP = {"clipped": 0.3, "unclipped": None}
KINDS = ("tied", "frozen", "two_groups")
ADAMW = AdamW(lr=1e-2, weight_decay=0.1)
SGD_ = SGD(lr=0.2, momentum=0.9, weight_decay=0.01)


def is_norm_or_bias(name: str, parameter: Any) -> bool:
    return "norm" in name or name.endswith("bias")


def loop(kind: str, spec: Spec, *, micro_batches: int, checkpointing: bool) -> Callable[[Make], list[Tensor]]:
    """Train a small language model."""

    def train(make: Make) -> list[Tensor]:
        model: nn.Module = models.Language(tied=kind == "tied", checkpointing=checkpointing)
        if kind == "frozen":
            model.blocks[1].requires_grad_(False)
            model.table.requires_grad_(False)
        groups = (Group(match=is_norm_or_bias, weight_decay=0.0, lr=0.05),) if kind == "two_groups" else ()
        model, optimizer = make(model, replace(spec, groups=groups))
        logs = []
        for index in range(STEPS):
            for micro in range(micro_batches):
                loss = next_token(model, *tokens(100 * index + micro))
                optimizer.scale(loss).backward()
                logs.append(loss.detach())
            finish(optimizer)
            norm = optimizer.last_norm if math.isfinite(optimizer.last_norm) else -1.0
            logs += [torch.tensor(norm, dtype=torch.float64), torch.tensor(optimizer.loss_scale)]
        return logs

    return train


def rows() -> Iterator[tuple[Any, ...]]:
    """On the CPU all there are; under a budget every second one, so that any four of the five ways meet in all values.

    For each precision and kind of parameters those of the other three with an even sum, or those with an odd one.
    """
    numbers = (range(len(each)) for each in (PRECISIONS, MICRO_BATCHES, CLIP, (False, True), KINDS))
    for way in product(*numbers):
        precision, micro_batches, clip, checkpointing, kind = way
        row = PRECISIONS[precision], MICRO_BATCHES[micro_batches], tuple(CLIP)[clip], bool(checkpointing)
        for device in ("cpu", "emulated")[: 1 + (sum(way) % 2 == 0)]:
            yield *row, device, KINDS[kind]


EVERY = list(rows())


def name(row: tuple[Any, ...]) -> str:
    precision, micro_batches, clip, checkpointing, device, kind = row
    return f"{precision}-{micro_batches}-{clip}-{'re' if checkpointing else 'not_re'}computed-{device}-{kind}"


@pytest.mark.parametrize("row", EVERY, ids=name)
def test_as_the_resident_reference(row: tuple[Any, ...]) -> None:
    precision, micro_batches, clip, checkpointing, device, kind = row
    settings = Settings(precision=precision, max_grad_norm=CLIP[clip], accumulation_steps=micro_batches)
    spec = ADAMW if kind == "tied" else SGD_
    run = loop(kind, spec, micro_batches=micro_batches, checkpointing=checkpointing)
    if device == "cpu":
        check_same(run, settings, managed(run, settings, "cpu", Budget(host=HOST)))
        return
    size, got = tightest(lambda size: managed(run, settings, stand_in, Budget(device=size, host=HOST)), rounds=2)
    check_same(run, settings, got)
    assert got.evictions > 0, f"nothing was ever evicted under {size:,} bytes"


def test_any_four_ways_meet_under_a_budget() -> None:
    under = [row[:4] + row[5:] for row in EVERY if row[4] == "emulated"]
    assert len(under) == 36
    every = (PRECISIONS, MICRO_BATCHES, tuple(CLIP), (False, True), KINDS)
    for chosen in combinations(range(5), 4):
        wanted = set(product(*(every[index] for index in chosen)))
        assert {tuple(row[index] for index in chosen) for row in under} == wanted


def test_the_reference_clips_skips_and_steps() -> None:
    """Else the rows above would show less than they say."""
    run = loop("tied", ADAMW, micro_batches=1, checkpointing=False)
    clipped, unclipped = (plain(run, Settings(max_grad_norm=norm)).logs for norm in CLIP.values())
    assert float(clipped[1]) == float(unclipped[1]) > 0.3
    assert float(clipped[-3]) != float(unclipped[-3])
    scales = [float(each) for each in plain(run, Settings(precision="fp16")).logs[2::3]]
    assert scales == [2.0**15] * STEPS, "the first step was to be skipped, and no other"
