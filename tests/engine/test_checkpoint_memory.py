"""A checkpoint takes no more memory than two chunks besides the model's own, whatever the size of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from _checkpoints import TIERS
from _memory import grown_by
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, load_checkpoint, load_weights, release, save_checkpoint

LAYERS, WIDTH = 6, 1024
CHUNK_BYTES = 4 * WIDTH * WIDTH * 2
"""Two layers in each of three groups, in fp32."""
NOISE_BYTES = 2**20
"""What Python, threads and the memory allocator take for themselves; an eighth of a chunk."""


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def test_the_measure_itself() -> None:
    assert grown_by(lambda: torch.ones(CHUNK_BYTES // 4)) > 0.9 * CHUNK_BYTES
    assert grown_by(lambda: None) < NOISE_BYTES


@pytest.mark.parametrize("tiers", [each for each in TIERS if each != "cuda"])  # its memory is played in memory
def test_at_most_two_chunks(tmp_path: Path, tiers: str) -> None:
    device, budget = TIERS[tiers]
    above_disk = budget.disk is not None
    room = Budget(
        device=None if budget.device is None else "40MiB",
        host="64MiB" if above_disk else "400MiB",
        disk="400MiB" if above_disk else None,
        disk_dir=budget.disk_dir,
    )
    options = Options(group_bytes=2 * WIDTH * WIDTH * 2)
    model, optimizer = chunked(build(), AdamW(), device=device(), budget=room, options=options)
    for _ in range(2):  # that all memory has been touched
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    weights = {name: value.half() for name, value in build().state_dict().items()}
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors")
    save_checkpoint(tmp_path / "a", model, optimizer)  # that everything has been imported
    for work in (
        lambda: save_checkpoint(tmp_path / "a", model, optimizer, overwrite=True),
        lambda: load_checkpoint(tmp_path / "a", model, optimizer),
        lambda: load_weights(model, tmp_path / "w.safetensors"),
    ):
        assert grown_by(work) <= 2 * CHUNK_BYTES + NOISE_BYTES
    release(model)
