"""The operators that a trace from a shape counts, against those of a real model's pass."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from ps_core._trace import Trace
from ps_core._workloads.hf import shape_from_config
from ps_core._workloads.named_shapes import gpt
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload
from ps_core.engine._tracing.fake_trace import trace
from ps_models import GPT, GPTConfig
from test_memory_model import THEIRS, numbers

BATCH, LENGTH = 2, 64


def counted(of: Trace) -> float:
    """Operators that launch work."""
    return sum(each.launches for each in of.moments)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("chunk", [None, 32])
def test_operators_of_a_gpt(checkpointing: bool, chunk: int | None) -> None:
    made = gpt(8, 64, heads=2, vocabulary=128, positions=LENGTH)
    model = GPT(GPTConfig(shape=made, checkpoint_blocks=checkpointing, loss_chunk_tokens=chunk)).to(torch.bfloat16)
    ids = numbers(128, BATCH, LENGTH)
    work = Workload(batch=BATCH, seq=LENGTH, checkpointing=checkpointing)
    if chunk is not None:
        work = replace(work, chunked_loss=True, loss_chunk_tokens=chunk)
    found = counted(trace(model, (ids, ids), loss=lambda made: made.loss))
    assert counted(analytic_trace(made, work)) == pytest.approx(found, rel=0.15)


class Losing(nn.Module):
    """A model of transformers that gives its loss."""

    def __init__(self, model: nn.Module, labels: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.model, self.labels = model, labels

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, **self.labels).loss
        return loss


@pytest.mark.parametrize("architecture", THEIRS)
def test_operators_of_models_of_transformers(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    family, entries = THEIRS[architecture]
    config = transformers.AutoConfig.for_model(family, **entries)
    config._attn_implementation, config.use_cache = "sdpa", False
    made = shape_from_config(json.dumps({"model_type": family, "architectures": [architecture], **entries}))
    ids = numbers(256, BATCH, LENGTH)
    labels = {"labels": ids}
    if made.next_sentence:
        labels["next_sentence_label"] = torch.zeros(BATCH, dtype=torch.long)
    model = getattr(transformers, architecture)(config).to(torch.bfloat16).train()
    found = counted(trace(Losing(model, labels), (ids,), loss=lambda loss: loss))
    told = counted(analytic_trace(made, Workload(batch=BATCH, seq=LENGTH, checkpointing=False, fused=False)))
    assert told == pytest.approx(found, rel=0.15)
