"""GPT against a computation by hand, against transformers, and against the list of its tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ps_core._errors import InvalidInput
from ps_core._workloads.named_shapes import gpt, shape
from ps_core._workloads.shapes import tensors
from ps_models import GPT, GPTConfig, build
from ps_models._loss import IGNORED

TINY = gpt(2, 16, heads=2, vocabulary=29, positions=12)


def tiny(seed: int = 0, **options: Any) -> GPT:
    model = GPT(GPTConfig(shape=TINY, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms must matter
            parameter.normal_(0.1, 0.3, generator=generator)
    return model


def tokens(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(TINY.vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def norm_by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def logits_by_hand(p: dict[str, Tensor], ids: Tensor) -> Tensor:
    """One sequence, head by head, with scores and mask written out."""
    x = p["wte.weight"][ids] + p["wpe.weight"][: len(ids)]
    width = TINY.head_dim
    later = torch.ones(len(ids), len(ids)).triu(1).bool()
    for layer in range(TINY.layers):
        w = {key.removeprefix(f"h.{layer}."): value for key, value in p.items() if key.startswith(f"h.{layer}.")}
        qkv = norm_by_hand(x, w["ln_1.weight"], w["ln_1.bias"]) @ w["attn.c_attn.weight"] + w["attn.c_attn.bias"]
        q, k, v = qkv[:, :16], qkv[:, 16:32], qkv[:, 32:]
        heads = []
        for start in range(0, 16, width):
            part = slice(start, start + width)
            scores = (q[:, part] @ k[:, part].t() / math.sqrt(width)).masked_fill(later, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, part])
        x = x + torch.cat(heads, -1) @ w["attn.c_proj.weight"] + w["attn.c_proj.bias"]
        inner = norm_by_hand(x, w["ln_2.weight"], w["ln_2.bias"]) @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"]
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + inner @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"]
    return norm_by_hand(x, p["ln_f.weight"], p["ln_f.bias"]) @ p["wte.weight"].t()


def test_loss_and_logits_equal_those_by_hand() -> None:
    model, ids = tiny().double(), tokens()
    labels = ids.clone()
    labels[0, 3] = IGNORED
    weights = {name.removeprefix("transformer."): value.detach() for name, value in model.named_parameters()}
    out = model(ids, labels=labels, return_logits=True)
    losses = []
    for row, row_labels, row_logits in zip(ids, labels, out.logits, strict=True):
        logits = logits_by_hand(weights, row)
        assert torch.allclose(row_logits, logits, rtol=1e-10, atol=1e-10)
        losses += [
            -logits[at].log_softmax(-1)[label] for at, label in enumerate(row_labels[1:].tolist()) if label != IGNORED
        ]
    assert out.loss is not None
    assert len(losses) == 11
    assert out.loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
    assert model(ids).loss is None


def test_a_later_token_changes_no_earlier_logits() -> None:
    model, ids = tiny(), tokens()
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % TINY.vocabulary
    before, after = model(ids).logits, model(other).logits
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(-1).any()


def test_every_tensor_gets_a_gradient_and_a_step_down_lowers_the_loss() -> None:
    model, ids = tiny(), tokens()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum() > 0] == []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.01)
    assert model(ids, labels=ids).loss < loss


def test_checkpointing_changes_nothing_but_memory() -> None:
    plain, kept, ids = tiny(), tiny(checkpoint_blocks=True), tokens()
    saved = []
    for model in (plain, kept):
        count = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: count.append(x.numel()) or x, lambda x: x):  # noqa: B023
            loss = model(ids, labels=ids).loss
        loss.backward()
        saved.append(sum(count))
    assert saved[1] < saved[0]
    for one, other in zip(plain.parameters(), kept.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, kept(ids).logits)


def test_initialisation_is_gpt2_s() -> None:
    torch.manual_seed(3)
    model = GPT(GPTConfig(shape=gpt(8, 64, heads=4, vocabulary=512, positions=64)))
    block = model.transformer.h[0]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.transformer.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.transformer.wpe.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert torch.equal(block.ln_1.weight, torch.ones(64))
    assert not block.attn.c_attn.bias.any()
    ids = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(0))
    assert model(ids, labels=ids).loss.item() == pytest.approx(math.log(512), rel=0.02)


@pytest.mark.parametrize("name", ["gpt-10m", "gpt-50m", "gpt2", "gpt2-xl", "gpt-18b", "gpt-175b"])
def test_tensors_are_those_the_shape_lists(name: str) -> None:
    model = build(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [(n, p.numel()) for n, p in model.named_parameters()] == [(t.name, t.numel) for t in tensors(shape(name))]


def test_an_untied_head_and_missing_biases_are_listed_too() -> None:
    model = build("gpt-10m", layers=1, tied_head=False, qkv_bias=False, out_bias=False, mlp_bias=False)
    assert [(n, p.numel()) for n, p in model.named_parameters()] == [
        (t.name, t.numel) for t in tensors(model.config.shape)
    ]
    ids = torch.zeros(1, 3, dtype=torch.long)
    untied = build("gpt-10m", device="cpu", layers=1, tied_head=False, vocabulary=9)
    with torch.no_grad():
        untied.lm_head.weight.zero_()
    assert untied(ids, labels=ids).loss.item() == pytest.approx(math.log(9))


def test_build_takes_overrides() -> None:
    model = build("gpt-10m", device="cpu", layers=1, hidden=32, heads=2, checkpoint_blocks=True)
    assert (model.config.shape.head_dim, model.config.shape.ffn, model.config.checkpoint_blocks) == (16, 128, True)
    assert not model.transformer.wte.weight.is_meta
    assert build("gpt-10m", heads=8).config.shape.ffn == shape("gpt-10m").ffn
    with pytest.raises(InvalidInput, match=r"cannot override 'depth'; known: .*layers"):
        build("gpt-10m", depth=3)
    with pytest.raises(InvalidInput, match="heads must be a whole number"):
        build("gpt-10m", heads=0)


def test_wrong_shapes_and_sequences_are_refused() -> None:
    with pytest.raises(InvalidInput, match="bert-base is of the bert family, GPT needs a gpt2 shape"):
        GPTConfig(shape=shape("bert-base"))
    with pytest.raises(InvalidInput, match="longer than the 12 positions"):
        tiny()(tokens(1, 13))


def test_weights_of_transformers_load_and_give_its_numbers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=29, n_positions=12, bos_token_id=0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_dict({**config.to_dict(), "eos_token_id": 0}))
    ours, ids = GPT(GPTConfig(shape=replace(TINY, name="same"))), tokens()
    ours.load_state_dict(dict(theirs.named_parameters()))
    expected = theirs.eval()(ids, labels=ids)
    found = ours(ids, labels=ids, return_logits=True)
    assert torch.allclose(found.logits, expected.logits, atol=1e-5)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
