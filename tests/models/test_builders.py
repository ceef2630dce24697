"""`build` and `pstar plan` speak of the same parameters; a name is enough, and costs nothing on `meta`."""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core import Phase, Trace, Workload, analytic_trace
from ps_core._errors import InvalidInput
from ps_core._workloads.named_shapes import names, shape
from ps_core._workloads.shapes import tensors
from ps_core.engine import trace
from ps_models import BERT, GPT, BERTConfig, GPTConfig, Llama, LlamaConfig, build

SMALL: dict[str, Any] = {"layers": 3, "hidden": 128, "heads": 4, "vocabulary": 1024, "positions": 128}


@pytest.mark.parametrize("name", names())
def test_parameters_are_those_that_are_planned(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = build(name)
    found = [(each, parameter.numel()) for each, parameter in model.named_parameters()]
    assert all(parameter.is_meta and parameter.dtype is torch.float32 for parameter in model.parameters())
    assert found == [(tensor.name, tensor.numel) for tensor in tensors(shape(name))]
    assert sum(numel for _, numel in found) == shape(name).parameters
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb < 200_000, "of gigabytes"


def test_the_plan_s_bytes_are_the_model_s() -> None:
    """14 bytes a parameter at the same vocabulary, each counted once."""
    planned = analytic_trace(shape("gpt-18b", vocabulary=32000), Workload())
    model = build("gpt-18b", vocabulary=32000)
    assert [(t.name, t.numel) for t in planned.tensors] == [(n, p.numel()) for n, p in model.named_parameters()]
    model.to(torch.bfloat16)
    held = sum(parameter.nbytes + 3 * 4 * parameter.numel() for parameter in model.parameters())
    assert held == 14 * sum(tensor.numel for tensor in planned.tensors)


def parts(found: Trace, phase: Phase) -> list[str]:
    """Parts of the model as forward first reads them, or as backward is done with their gradients."""
    moments = [moment for moment in found.moments if moment.phase is phase]
    if phase is Phase.BACKWARD:
        moments.reverse()
    every = (index for moment in moments for index in (moment.reads if phase is Phase.FORWARD else moment.grads))
    order = list(dict.fromkeys(part(found.tensors[index].name) for index in every))
    return order if phase is Phase.FORWARD else order[::-1]


def part(name: str) -> str:
    """Embedding, a block, or what follows."""
    words = name.split(".")
    number = next((word for word in words if word.isdigit()), None)
    return number or ("embedding" if words[1] in ("wte", "wpe", "embeddings", "embed_tokens") else "head")


CASES = [
    ("gpt2", {}),
    ("gpt2", {"tied_head": False}),
    ("bert-base", {}),
    ("llama-10m", {}),
]


@pytest.mark.parametrize(
    ("dtype", "kept", "rows"),
    [(torch.float32, False, None), (torch.bfloat16, True, 128), (torch.bfloat16, False, 128)],
    ids=["fp32", "bf16-kept-chunks", "bf16-chunks"],
)
@pytest.mark.parametrize(("name", "changes"), CASES, ids=["gpt", "untied", "bert", "llama"])
def test_the_trace_planned_with_is_the_one_that_is_traced(
    name: str, changes: dict[str, Any], dtype: torch.dtype, kept: bool, rows: int | None
) -> None:
    model = build(name, **{**SMALL, **changes}, checkpoint_blocks=kept, loss_chunk_tokens=rows).to(dtype)
    ids = torch.zeros(4, 128, dtype=torch.long)
    batch: dict[str, Tensor] = {"input_ids": ids, "labels": ids}
    if name == "bert-base":
        batch["next_sentence_label"] = torch.zeros(4, dtype=torch.long)
    found = trace(model, batch)
    work = Workload(
        batch=4,
        seq=128,
        precision_bytes=dtype.itemsize,
        checkpointing=kept,
        chunked_loss=rows is not None,
        loss_chunk_tokens=rows or 1024,
        fused=name != "llama-10m",  # PyTorch's RMS norm is several operators on the CPU
    )
    planned = analytic_trace(model.config.shape, work)
    assert [(t.name, t.numel, t.trainable) for t in found.tensors] == [
        (t.name, t.numel, t.trainable) for t in planned.tensors
    ]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert parts(found, phase) == parts(planned, phase)
        for what in ("reads", "grads"):
            touched = [
                {index for moment in each.moments if moment.phase is phase for index in getattr(moment, what)}
                for each in (found, planned)
            ]
            # What backward reads again is its own affair: autograd's, for one, reads no bias.
            assert touched[0] == touched[1] or (phase is Phase.BACKWARD and what == "reads")
    assert 0.95 <= planned.peak_nonmodel_bytes / found.peak_nonmodel_bytes <= 1.05


def test_build_takes_overrides() -> None:
    model = build("gpt-10m", device="cpu", layers=1, hidden=32, heads=2, checkpoint_blocks=True)
    assert isinstance(model, GPT)
    assert (model.config.shape.head_dim, model.config.shape.ffn, model.config.checkpoint_blocks) == (16, 128, True)
    assert not model.transformer.wte.weight.is_meta
    assert build("gpt-10m", heads=8).config.shape.ffn == shape("gpt-10m").ffn
    narrow = build("llama-50m", hidden=128, heads=8).config.shape
    assert (narrow.kv_heads, narrow.head_dim, narrow.ffn) == (4, 16, 345)
    assert isinstance(build("bert-base", layers=1), BERT)
    assert isinstance(build("llama-10m", layers=1), Llama)
    assert build("gpt-3x64").config.shape.layers == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"depth": 3}, r"cannot override 'depth'; known: .*layers"),
        ({"heads": 0}, "heads must be a whole number"),
        ({"dropout": 1.0}, r"dropout must be at least 0 and below 1, found 1\.0"),
        ({"loss_chunk_tokens": 0}, "loss_chunk_tokens must be at least 1, or None, found 0"),
        ({"checkpoint_blocks": (0, 10)}, "checkpoint_blocks names block 10, but gpt-10m has blocks 0 to 9"),
        ({"tiles": 0}, "tiles must be at least 1"),
        ({"tiles": 500}, "256 outputs can be cut into 1 to 256 tiles, found 500"),
        ({"experts": 2, "experts_chosen": 3}, "experts_chosen must be from 1 to 2, found 3"),
        ({"experts_chosen": 1}, "experts_chosen=1 of no experts"),
    ],
)
def test_wrong_overrides_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build("gpt-10m", **overrides)


def test_configurations_refuse_shapes_of_other_families() -> None:
    for kind, name in ((GPTConfig, "bert-base"), (BERTConfig, "gpt2"), (LlamaConfig, "gpt2")):
        with pytest.raises(InvalidInput, match=f"{name} is of the .* family"):
            kind(shape=shape(name))
    with pytest.raises(InvalidInput, match="tied to its token table"):
        BERTConfig(shape=replace(shape("bert-base"), tied_head=False))


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "llama-10m"])
def test_every_module_initialises_itself(name: str) -> None:
    """Emptied and told module by module to fill itself, a model has the distributions that its constructor gave it."""
    torch.manual_seed(0)
    model = build(name, "cpu", layers=2, hidden=64, heads=4, vocabulary=512, positions=64)
    before = {each: parameter.detach().clone() for each, parameter in model.named_parameters()}
    for module in model.modules():
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.fill_(torch.nan)
        if hasattr(module, "reset_parameters"):
            reset: Any = module
            reset.reset_parameters()
    for each, parameter in model.named_parameters():
        old = before[each]
        assert (parameter.dim() == 1) == torch.equal(parameter, old), "norms and biases are the same, matrices new"
        if parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(old.std().item(), rel=0.2)
            assert parameter.mean().abs() < 0.01


def test_bert_draws_nothing_beyond_two_deviations() -> None:
    torch.manual_seed(0)
    model = build("bert-base", "cpu", layers=1, hidden=64, heads=4, vocabulary=512)
    every = torch.cat([parameter.flatten() for parameter in model.parameters() if parameter.dim() > 1])
    assert 0.0399 < every.abs().max() <= 0.04


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "llama-10m"])
def test_a_small_batch_is_learned_by_heart(name: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = build(name, "cpu", layers=2, hidden=32, heads=4, vocabulary=50, positions=16, kv_heads=4)
    ids = torch.randint(50, (2, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 3.5
    assert losses[-1] < 0.5
