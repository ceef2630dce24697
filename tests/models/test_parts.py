"""Padding, dropout, checkpointed blocks, tiles, experts, heads of classes and sampling, each by itself."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core._errors import InvalidInput
from ps_core._workloads.named_shapes import gpt, shape
from ps_core.engine import HostEmbedding, chunked, release
from ps_models import (
    GPT,
    BERTClassifier,
    BERTConfig,
    GPTClassifier,
    GPTConfig,
    MixtureOfExperts,
    TiledLinear,
    build,
)
from ps_models._layers import Initialiser, Linear, Projection

SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 50, "positions": 16}
NAMES = ["gpt2", "bert-base", "llama-10m"]


def make(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = build(name, "cpu", **{**SMALL, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)  # norms and biases, too
    return model


def tokens(length: int = 10) -> Tensor:
    return torch.randint(1, 50, (3, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_padded_has_no_part(name: str) -> None:
    model, ids = make(name).eval(), tokens()
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    other = ids.clone()
    other[1, 6:] = 7
    one, two = (model(each, attention_mask=mask).logits for each in (ids, other))
    assert torch.equal(one[mask.bool()], two[mask.bool()])
    assert torch.allclose(one[1, :6], model(ids[1:2, :6]).logits[0], atol=1e-5)
    assert torch.allclose(one[0], model(ids).logits[0], atol=1e-5)
    assert not torch.allclose(model(ids).logits[1, :6], model(other).logits[1, :6]) or name != "bert-base"


def test_padding_on_the_left_is_no_number_but_a_number() -> None:
    model, ids = make("gpt2"), tokens()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    assert model(ids, attention_mask=mask).logits.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_dropout_only_in_training(name: str) -> None:
    model, ids = make(name, dropout=0.3, attention_dropout=0.3), tokens()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)
    without = make(name)
    assert torch.equal(model(ids).logits, without.train()(ids).logits)


@pytest.mark.parametrize("name", NAMES)
def test_chosen_blocks_are_recomputed_and_nothing_else_changes(name: str) -> None:
    ids, found = tokens(), []
    for chosen in (False, (1,), True):
        model = make(name, checkpoint_blocks=chosen, dropout=0.1)
        kept: list[int] = []
        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):  # noqa: B023
            loss = model(ids, labels=ids).loss
        loss.backward()
        found.append((sum(kept), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]))
    none, some, every = found
    assert every[0] < some[0] < none[0]
    for other in (some, every):
        assert all(torch.equal(one, two) for one, two in zip(none[1], other[1], strict=True))


@pytest.mark.parametrize("kind", [Linear, Projection])
def test_tiles_are_one_linear_map(kind: Any) -> None:
    torch.manual_seed(0)
    tiled = TiledLinear(10, 3, lambda outputs: kind(6, outputs, bias=True, init=Initialiser(1.0)))
    assert [tile.weight.shape[tile.cut] for tile in tiled.tiles] == [4, 3, 3]
    assert len(list(tiled.parameters())) == 6
    for tile in tiled.tiles:
        nn.init.normal_(tile.bias)
    whole = kind(6, 10, bias=True, init=Initialiser(1.0))
    with torch.no_grad():
        whole.weight.copy_(torch.cat([tile.weight for tile in tiled.tiles], dim=whole.cut))
        whole.bias.copy_(torch.cat([tile.bias for tile in tiled.tiles]))
    x = torch.randn(2, 5, 6)
    assert torch.allclose(tiled(x), whole(x), atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_cut_with_its_weights(bias: bool) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(6, 10, bias=bias, dtype=torch.float64).requires_grad_(False)
    tiled = TiledLinear.from_linear(whole, 3)
    assert torch.equal(torch.cat([tile.weight for tile in tiled.tiles]), whole.weight)
    assert not any(each.requires_grad or each.is_set_to(whole.weight) for each in tiled.parameters())
    x = torch.randn(2, 6, dtype=torch.float64)
    assert torch.allclose(tiled(x), whole(x))
    assert len(list(tiled.parameters())) == (6 if bias else 3)
    assert all(each.is_meta for each in TiledLinear.from_linear(whole.to("meta"), 2).parameters())


def test_an_operator_larger_than_the_budget_trains_in_tiles() -> None:
    """The MLP's matrices take 256 KiB each."""
    sizes = {"layers": 1, "hidden": 64, "heads": 2, "ffn": 1024, "vocabulary": 64, "positions": 16}
    ids = torch.randint(64, (1, 4), generator=torch.Generator().manual_seed(0))

    def losses(tiles: int) -> list[float]:
        torch.manual_seed(0)
        model, optimizer = chunked(
            build("gpt2", "meta", **sizes, tiles=tiles),
            AdamW(lr=1e-2),
            device="emulated",
            budget=Budget(device="250KiB", host="64MiB"),
            options=Options(group_bytes=32768),
            precision="fp32",
        )
        try:
            found = []
            for _ in range(6):
                loss = model(ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found
        finally:
            release(model)

    with pytest.raises(DoesNotFit):
        losses(1)
    found = losses(8)
    assert found[-1] < found[0] - 1


def experts(chosen: int) -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(8, lambda: nn.Linear(8, 8), experts=5, chosen=chosen, std=1.0)


@pytest.mark.parametrize("chosen", [1, 2, 5])
def test_each_token_gets_its_experts_by_their_weights(chosen: int) -> None:
    mixture = experts(chosen)
    x = torch.randn(2, 7, 8)
    found, balance = mixture(x)
    shares = torch.zeros(5)
    chances = []
    for row, token in enumerate(x.flatten(0, 1)):
        chance = (mixture.router.weight @ token).softmax(0)
        best = chance.argsort(descending=True)[:chosen]
        expected = sum(chance[each] / chance[best].sum() * mixture.experts[each](token) for each in best)
        assert torch.allclose(found.flatten(0, 1)[row], expected, atol=1e-5)
        shares[best] += 1 / (14 * chosen)
        chances.append(chance)
    assert balance.item() == pytest.approx(5 * float(shares @ torch.stack(chances).mean(0).detach()), rel=1e-5)


def test_experts_that_nobody_chose_are_not_read() -> None:
    mixture = experts(1)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[3] = 1.0
        for number, expert in enumerate(mixture.experts):
            if number != 3:
                expert.weight.fill_(math.nan)
    found, balance = mixture(torch.rand(4, 8) + 1)
    found.sum().backward()
    assert found.isfinite().all()
    assert balance > 4.9, "all to one of five"
    assert [expert.weight.grad is not None for expert in mixture.experts] == [False, False, False, True, False]


@pytest.mark.parametrize("name", ["gpt2", "llama-10m"])
def test_balance_is_a_part_of_the_loss(name: str) -> None:
    ids = tokens()
    plain = make(name, experts=4, balance_weight=0.0)(ids, labels=ids).loss
    much = make(name, experts=4, balance_weight=10.0)(ids, labels=ids).loss
    assert 5 < (much - plain) < 40
    model = make(name, experts=4, balance_weight=10.0)
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for each, parameter in model.named_parameters() if "router" in each)


def test_classifiers_read_the_last_token_and_the_first() -> None:
    torch.manual_seed(0)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    last = GPTClassifier(GPTConfig(shape=gpt(2, 32, heads=4, vocabulary=50, positions=16)), classes=3)
    found = last(ids, attention_mask=mask).logits
    assert found.shape == (3, 3)
    hidden, _ = last.transformer(ids[1:2, :6])
    assert torch.allclose(found[1], last.score(hidden[0, -1]), atol=1e-5)
    hidden, _ = last.transformer(ids)
    assert torch.allclose(last(ids).logits[1], last.score(hidden[1, -1]), atol=1e-5)
    small = build("bert-base", **SMALL).config.shape
    first = BERTClassifier(BERTConfig(shape=small), classes=3)
    _, pooled = first.bert(ids, mask, None)
    assert torch.allclose(first(ids, attention_mask=mask).logits, first.classifier(pooled), atol=1e-5)
    for model in (last, first):
        loss = model(ids, labels=torch.tensor([0, 2, 1])).loss
        loss.backward()
        assert loss.item() == pytest.approx(math.log(3), abs=0.1)


def test_bert_s_losses_add_up() -> None:
    model, ids = make("bert-base").eval(), tokens()
    labels, relation = ids.masked_fill(ids % 3 > 0, -100), torch.tensor([0, 1, 1])
    both = model(ids, labels=labels, next_sentence_label=relation)
    words, sentence = model(ids, labels=labels).loss, model(ids, next_sentence_label=relation).loss
    assert both.loss.item() == pytest.approx(words.item() + sentence.item(), rel=1e-6)
    assert both.prediction_logits is None
    assert both.seq_relationship_logits.shape == (3, 2)
    whole = model(ids, labels=labels, return_logits=True)
    assert torch.allclose(whole.logits, model(ids).prediction_logits, atol=1e-6)
    assert whole.loss.item() == pytest.approx(words.item(), rel=1e-6)
    alone = make("bert-base", next_sentence=False)
    assert alone(ids).seq_relationship_logits is None
    with pytest.raises(InvalidInput, match="has no next-sentence head"):
        alone(ids, next_sentence_label=relation)


@pytest.mark.parametrize("name", ["gpt2", "llama-10m"])
def test_the_likeliest_tokens_come_one_after_the_other(name: str) -> None:
    model, ids = make(name, dropout=0.5), tokens(4)
    found = model.generate(ids, 6, temperature=0)
    assert model.training
    model.eval()
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, model(expected).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, expected)


def test_a_classifier_has_no_head_to_cut() -> None:
    config = GPTConfig(shape=replace(gpt(2, 32, heads=4, vocabulary=50, positions=16), tied_head=False), head_tiles=4)
    with pytest.raises(InvalidInput, match="head_tiles=4: a GPTClassifier has no head of words"):
        GPTClassifier(config)


@pytest.mark.parametrize("name", ["gpt2", "llama-10m"])
def test_logits_of_the_last_tokens(name: str) -> None:
    model, ids = make(name).eval(), tokens(6)
    whole = model(ids).logits
    for count in (1, 3, 6, 9):
        kept = model(ids, logits_to_keep=count).logits
        assert kept.shape[1] == min(count, 6)
        torch.testing.assert_close(kept, whole[:, -count:])
    with pytest.raises(InvalidInput, match="logits_to_keep must be at least 0"):
        model(ids, logits_to_keep=-1)


def test_a_long_text_is_sampled_where_its_logits_would_not_fit() -> None:
    """A head in tiles that trains within the budget, too."""
    words, length = 8192, 64
    shape = {"layers": 1, "hidden": 32, "heads": 2, "vocabulary": words, "positions": length, "tied_head": False}
    budget = Budget(device="512KiB", host="64MiB")
    model = build("gpt2", "meta", head_tiles=16, cpu_embedding=True, loss_chunk_tokens=8, **shape)
    chunked(model, AdamW(), device="emulated", budget=budget, options=Options(group_bytes=2**15))
    ids = torch.randint(words, (1, length))
    try:
        assert model.generate(ids[:, :-3], 3, temperature=0).shape == ids.shape
        with torch.no_grad(), pytest.raises(DoesNotFit):
            model(ids)
    finally:
        release(model)


def test_sampling_repeats_with_its_generator_and_keeps_to_the_likeliest() -> None:
    model, ids = make("gpt2"), tokens(4)
    one, two, other = (model.generate(ids, 8, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(model.generate(ids, 8, top_k=1), model.generate(ids, 8, temperature=0))
    # Past the last position the window moves on.
    assert model.generate(ids, 20).shape == (3, 24)


def test_rows_end_where_they_drew_the_end() -> None:
    model, ids = make("gpt2"), tokens(4)
    greedy = model.generate(ids, 6, temperature=0)
    end = int(greedy[0, 5])
    found = model.generate(ids, 6, temperature=0, end_token=end)
    at = greedy[0, 4:].tolist().index(end) + 4
    assert torch.equal(found[0, : at + 1], greedy[0, : at + 1])
    assert (found[0, at:] == end).all()
    alone = model.generate(ids[:1], 6, temperature=0, end_token=end)
    assert alone.shape[1] == at + 1


def test_a_model_samples_under_a_budget() -> None:
    ids = tokens(4)
    torch.manual_seed(0)
    expected = build("gpt2", "cpu", **SMALL).eval().generate(ids, 5, temperature=0)
    torch.manual_seed(0)
    budget = Budget(device="112KiB")
    model, _ = chunked(build("gpt2", **SMALL), None, device="emulated", budget=budget, precision="fp32")
    try:
        assert torch.equal(model.generate(ids, 5, temperature=0), expected)
    finally:
        release(model)


@pytest.mark.parametrize(("ids", "options"), [(torch.ones(2, 0), {}), (torch.ones(3), {}), (tokens(), {"top_k": 0})])
def test_what_cannot_be_sampled_is_refused(ids: Tensor, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"generate needs rows|top_k at least 1"):
        make("gpt2").generate(ids.long(), 1, **options)


def test_shapes_without_some_parts() -> None:
    ids = tokens()
    bare = build("gpt-10m", **SMALL, qkv_bias=False, out_bias=False, mlp_bias=False, tied_head=False, device="cpu")
    bare(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in bare.parameters())
    untyped = build("bert-base", "cpu", **SMALL, token_types=0)
    assert untyped(ids).prediction_logits.shape == (3, 10, 50)
    assert shape("bert-base").token_types == 2


@pytest.mark.parametrize("name", NAMES)
def test_models_are_copied_and_pickled(name: str) -> None:
    model, ids = make(name, **({} if name == "bert-base" else {"experts": 2})).eval(), tokens()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids).logits, model(ids).logits)


@pytest.mark.parametrize("tiles", [1, 2])
def test_a_model_is_saved_from_under_a_budget(tiles: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Group by group; tiles are put together in the file."""
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    expected = build("gpt2", "cpu", **SMALL, tiles=tiles).state_dict()
    torch.manual_seed(0)
    budget = Budget(device="200KiB")
    model, _ = chunked(build("gpt2", **SMALL, tiles=tiles), AdamW(), device="emulated", budget=budget, precision="fp32")
    whole = []
    state_dict = GPT.state_dict
    monkeypatch.setattr(GPT, "state_dict", lambda self, **how: (whole.append(1), state_dict(self, **how))[1])
    try:
        model.save_pretrained(tmp_path)
        model.save_pretrained(tmp_path)
    finally:
        release(model)
    assert not whole
    monkeypatch.undo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    found = GPT.from_pretrained(tmp_path, tiles=tiles).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.parametrize("name", ["gpt2", "llama-10m"])
def test_a_token_table_on_the_host_makes_no_other_model(name: str, tmp_path: Path) -> None:
    models = [make(name, tied_head=False, cpu_embedding=away) for away in (False, True)]
    tables = [[each for each in model.modules() if isinstance(each, HostEmbedding)] for model in models]
    assert [len(found) for found in tables] == [0, 1]
    ids = torch.randint(50, (2, 16))
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)
    if name == "llama-10m":
        models[1].save_pretrained(tmp_path)
        again = type(models[1]).from_pretrained(tmp_path, cpu_embedding=True)
        assert isinstance(again.model.embed_tokens, HostEmbedding)
        assert torch.equal(again(ids).logits, models[0](ids).logits)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_table_that_is_the_head_does_not_stay_on_the_host(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"cpu_embedding=True, but the head of .* is its token table"):
        build(name, cpu_embedding=True)


def test_a_classifier_s_table_may_be_larger_than_the_accelerator() -> None:
    words = 2**12
    found = replace(shape("bert-base"), layers=2, hidden=32, heads=4, head_dim=8, kv_heads=4, ffn=64, vocabulary=words)
    budget = Budget(device=words * 32 * 2, host="64MiB")
    ids, labels = torch.randint(words, (2, 16)), torch.tensor([0, 1])

    def losses(*, away: bool) -> list[float]:
        torch.manual_seed(0)
        model = BERTClassifier(BERTConfig(shape=found, checkpoint_blocks=True, cpu_embedding=away))
        where: dict[str, Any] = {"device": "emulated", "budget": budget} if away else {}
        _, optimizer = chunked(model, AdamW(lr=1e-2), **where)
        assert optimizer is not None
        numbers = []
        for _ in range(3):
            loss = model(ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            numbers.append(float(loss.detach()))
        release(model)
        return numbers

    assert losses(away=True) == losses(away=False)
    with pytest.raises(DoesNotFit):
        chunked(BERTClassifier(BERTConfig(shape=found)), AdamW(), device="emulated", budget=replace(budget))[0](ids)


@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_maps_what_has_no_view_as_rows(bias: bool) -> None:
    """As `nn.functional.linear` does: jagged batches, other strides, no inputs."""
    part = Projection(6, 4, bias=bias, init=Initialiser(0.1))
    rows = [torch.randn(2, 6), torch.randn(3, 6)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert torch.allclose(part(jagged).values(), part(torch.cat(rows)))
    strided = torch.randn(2, 6, 3).transpose(1, 2)
    assert torch.allclose(part(strided), part(strided.contiguous()))
    assert Projection(0, 4, bias=bias, init=Initialiser(0.1))(torch.zeros(2, 3, 0)).eq(0).all()
