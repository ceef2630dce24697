"""Every kind of model under a budget in which hardly anything fits: the same bits as plain PyTorch, from `meta` on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from _reference import Loop, Make, Settings, differences, plain
from _runs import HOST, managed, stand_in
from ps_core import AdamW, Budget, Options
from ps_core.engine._parameters.unseen_writes import ExposedParameters
from ps_models import build

STEPS, VOCABULARY, LENGTH = 6, 61, 12
SMALL: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 4, "vocabulary": VOCABULARY, "positions": 16}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
AWAY = {"cpu_embedding": True, "checkpoint_blocks": True}
BUDGETS = {
    "gpt": (400_000, 235_000),
    "untied": (215_000, 110_000),
    "table on the host": (0, 110_000),
    "llama's too": (0, 260_000),
    "head in tiles": (213_000, 106_000),
    "whole logits": (360_000, 180_000),
    "tiles": (350_000, 205_000),
    "bert": (500_000, 310_000),
    "llama": (400_000, 220_000),
    "offloaded": (0, 250_000),
    "experts": (600_000, 380_000),
    "gpt experts": (300_000, 180_000),
}
"""Of fp32 and bf16: hardly more than the least that fits; 0: not trained in that."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"name": "gpt2", "loss_chunk_tokens": 10, "checkpoint_blocks": (0, 2), **DROPOUT},
    "untied": {"name": "gpt2", "tied_head": False, "loss_chunk_tokens": 10, "checkpoint_blocks": True},
    "table on the host": {"name": "gpt2", "tied_head": False, "checkpoint_blocks": True, "cpu_embedding": True},
    "llama's too": {"name": "llama-10m", "tied_head": False, "cpu_embedding": True, "checkpoint_blocks": True},
    "head in tiles": {"name": "gpt2", "tied_head": False, "head_tiles": 3, "tiles": 2, **AWAY, "loss_chunk_tokens": 10},
    "whole logits": {"name": "gpt2", "loss_chunk_tokens": None},
    "tiles": {"name": "gpt2", "tiles": 3},
    "bert": {"name": "bert-base", "loss_chunk_tokens": 10, **DROPOUT},
    "llama": {"name": "llama-10m", "kv_heads": 2, "loss_chunk_tokens": 10, "checkpoint_blocks": (1,)},
    "offloaded": {"name": "llama-10m", "checkpoint_blocks": True, "offload_checkpoints": True, **DROPOUT},
    "experts": {"name": "llama-10m", "experts": 4, "loss_chunk_tokens": 10},
    "gpt experts": {"name": "gpt2", "experts": 3, "experts_chosen": 1, "checkpoint_blocks": True},
}


def batch(index: int, kind: str) -> dict[str, Tensor]:
    """Rows, the second of them padded."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    found = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if kind == "bert":
        found["labels"] = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.7, -100)
        found["token_type_ids"] = (torch.arange(LENGTH) > 5).long().expand(3, -1)
        found["next_sentence_label"] = torch.tensor([0, 1, 1])
    return found


def loop(kind: str, device: str) -> Loop:
    options = {**SMALL, **MODELS[kind]}
    name = options.pop("name")

    def run(make: Make) -> list[Tensor]:
        model, optimizer = make(build(name, device, **options), AdamW(lr=1e-2, weight_decay=0.1))
        logs = []
        for index in range(STEPS):
            loss = model(**batch(index % 2, kind)).loss
            optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            logs.append(loss.detach())
        return logs

    return run


WAYS = [
    (kind, precision) for place, precision in enumerate(("fp32", "bf16")) for kind in MODELS if BUDGETS[kind][place]
]


def exposed(_: Any, record: Any) -> None:
    """Fail: the engine would compare this weight with its master in each step from now on."""
    raise AssertionError(f"the model keeps an alias of {record.name}")


@pytest.mark.parametrize(("kind", "precision"), WAYS)
def test_the_same_bits_as_plain_pytorch_from_meta(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExposedParameters, "add", exposed)
    settings = Settings(precision=precision, options=Options(poison=True, group_bytes=8192))
    expected = plain(loop(kind, "cpu"), settings)
    assert expected.logs[-1] < expected.logs[1], "it learns something"
    budget = Budget(device=BUDGETS[kind][precision == "bf16"], host=HOST)
    got = managed(loop(kind, "meta"), settings, stand_in, budget)
    assert not differences(expected, got)
    assert got.evictions > 0
    if kind == "offloaded":
        inputs = SMALL["layers"] * SMALL["hidden"] * 3 * LENGTH * 2
        assert min(got.statistics[0].moved_bytes[link] for link in ("device->host", "host->device")) > STEPS * inputs
