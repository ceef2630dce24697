"""Libraries that need no integration, used as their own examples do: the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, materialized, release, statistics

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries' own dependencies


def managed(model: nn.Module, size: str, **more: Any) -> tuple[Any, Any]:
    where = {"device": "emulated", "budget": Budget(device=size, host="256MiB"), "precision": "fp32"}
    return chunked(model, AdamW(lr=1e-3), options=Options(group_bytes=2**15, poison=True), **where | more)


def plain(model: nn.Module) -> tuple[Any, Any]:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def both(make: Callable[[], nn.Module], size: str, **more: Any) -> Iterator[tuple[Any, Any]]:
    """The model in plain PyTorch, then under management, from the same numbers and with the same ones drawn."""
    for manage in (plain, lambda model: managed(model, size, **more)):
        torch.manual_seed(0)
        yield manage(make())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_diffusers_a_unet_and_its_average() -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    from diffusers.training_utils import EMAModel

    sizes = {"sample_size": 8, "block_out_channels": (16, 16), "norm_num_groups": 4, "layers_per_block": 1}
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}

    def make() -> nn.Module:
        made: nn.Module = diffusers.UNet2DModel(**sizes, **blocks)
        return made

    scheduler, found = diffusers.DDPMScheduler(num_train_timesteps=10), []
    for model, optimizer in both(make, "700KiB"):
        held = materialized(model) if found else nullcontext()
        with held:
            average = EMAModel(model.parameters(), decay=0.5)
        losses = []
        for _ in range(3):
            images, noise, times = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8), torch.randint(10, (2,))
            guess = model(scheduler.add_noise(images, noise, times), times).sample
            loss = nn.functional.mse_loss(guess, noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            with materialized(model) if found else nullcontext():
                average.step(model.parameters())
        if found:
            assert statistics(model).evictions > 0
            release(model)
        found.append((losses, model.state_dict(), {str(i): each for i, each in enumerate(average.shadow_params)}))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])
    same(found[0][2], found[1][2])


@pytest.mark.parametrize("clips", [False, True])
def test_timm_averages_and_clips_adaptively(clips: bool) -> None:
    """Clipping is equal to rounding: the 2-norm of a vector is the one that the engine measured."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    from timm.utils import ModelEmaV3
    from timm.utils.agc import adaptive_clip_grad

    def make() -> nn.Module:
        made: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=16)
        return made

    found = []
    for model, optimizer in both(make, "4MiB"):
        with materialized(model) if found else nullcontext():
            average = ModelEmaV3(model, decay=0.5)
        losses = []
        for step in range(3):
            loss = nn.functional.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.tensor([1, 3]))
            loss.backward()
            if clips:
                adaptive_clip_grad(model.parameters(), clip_factor=0.01)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            with materialized(model) if found else nullcontext():
                average.update(model, step)
        if found:
            assert statistics(model).evictions > 0
            release(model)
        found.append((losses, model.state_dict(), average.module.state_dict()))
    if clips:
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
        return
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])
    same(found[0][2], found[1][2])


def test_sentence_transformers_gradients_in_a_cache() -> None:
    """`CachedMultipleNegativesRankingLoss` calls the model within a hook of the loss's backward pass."""
    library = pytest.importorskip("sentence_transformers", reason="sentence_transformers is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling

    class Ids(nn.Module):
        """Turns word numbers into what a transformer gives, in place of a tokenizer and a download."""

        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3}
            rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            self.bert = transformers.BertModel(transformers.BertConfig(**sizes, **rates, vocab_size=64))

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            out = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
            return {**features, "token_embeddings": out.last_hidden_state}

    def make() -> nn.Module:
        pooling = Pooling(32)
        made: nn.Module = library.SentenceTransformer(modules=[Ids(), pooling], device="cpu")
        return made

    def features() -> dict[str, Any]:
        return {"input_ids": torch.randint(64, (8, 6)), "attention_mask": torch.ones(8, 6, dtype=torch.int64)}

    found = []
    for model, optimizer in both(make, "400KiB", accumulation_steps=4):
        loss_of = CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)
        losses = []
        for _ in range(3):
            loss = loss_of([features(), features()], None)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if found:
            assert statistics(model).evictions > 0
            release(model)
        found.append((losses, model.state_dict()))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])


def trained(pairs: Iterator[tuple[Any, Any]], batch: Callable[[int], torch.Tensor]) -> list[Any]:
    """Three steps of next-token prediction in each: the losses, and the state dict."""
    found: list[Any] = []
    for model, optimizer in pairs:
        losses = []
        for index in range(3):
            ids = batch(index)
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if found:
            assert statistics(model).evictions > 0
            release(model)
        found.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
    return found


def tokens(index: int) -> torch.Tensor:
    return torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(index))


LITGPT = {"block_size": 32, "vocab_size": 64, "padded_vocab_size": 64, "n_layer": 4, "n_head": 2, "n_embd": 64}
LITGPT_MODELS: dict[str, dict[str, Any]] = {
    "GPT": {},
    "Llama": {
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
        "intermediate_size": 128,
        "n_query_groups": 1,
        "bias": False,
        "parallel_residual": False,
        "rotary_percentage": 1.0,
    },
}


@pytest.mark.parametrize("kind", LITGPT_MODELS)
def test_litgpt(kind: str) -> None:
    litgpt = pytest.importorskip("litgpt", reason="litgpt is not installed")
    config = litgpt.Config(**LITGPT, **LITGPT_MODELS[kind])
    one, other = trained(both(lambda: litgpt.GPT(config), "900KiB"), tokens)
    assert one[0] == other[0]
    same(one[1], other[1])


def test_litgpt_adapters() -> None:
    """Its own LoRA, which stays in training mode, so that nothing is merged."""
    pytest.importorskip("litgpt", reason="litgpt is not installed")
    from litgpt import lora

    where = {f"lora_{name}": True for name in ("query", "value", "projection", "mlp", "head")}
    config = lora.Config(**LITGPT, lora_r=4, lora_alpha=8, lora_dropout=0.0, **where)
    models: list[nn.Module] = []

    def make() -> nn.Module:
        made: nn.Module = lora.GPT(config)
        lora.mark_only_lora_as_trainable(made)
        models.append(made)
        return made

    one, other = trained(both(make, "900KiB"), tokens)
    assert one[0] == other[0]
    same(one[1], other[1])
    assert any("lora_B" in name and value.any() for name, value in one[1].items())
    for model in models:
        lora.merge_lora_weights(model)
    same(models[0].state_dict(), models[1].state_dict())
    assert not torch.equal(models[0].lm_head.linear.weight, one[1]["lm_head.linear.weight"])


def test_torchmetrics_within_and_beside_the_model() -> None:
    """A metric as a child of the model has buffers that change in forward, and no parameters."""
    metrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Embedding(64, 64), *(nn.Linear(64, 64) for _ in range(6)))
            self.accuracy = metrics.classification.MulticlassAccuracy(64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(ids)
            self.accuracy.update(out.detach().float().argmax(-1).flatten(), ids.flatten())
            return out

    measured, loss_of = [], metrics.MeanMetric()
    for model, optimizer in both(Measured, "150KiB"):
        for index in range(3):
            ids = tokens(index)
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            loss_of.update(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        measured.append((model.accuracy.compute().item(), loss_of.compute().item(), dict(model.state_dict())))
        loss_of.reset()
        model.accuracy.reset()
    release(model)
    assert measured[0][:2] == measured[1][:2]
    same(measured[0][2], measured[1][2])


class NanoBlock(nn.Module):
    """A block as nanoGPT has it."""

    def __init__(self, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for each in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).reshape(x.shape))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class Nano(nn.Module):
    """nanoGPT: a head that is its token table, and a forward that takes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(64, 64), nn.Embedding(32, 64)
        self.h, self.ln_f = nn.ModuleList(NanoBlock() for _ in range(3)), nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, 64, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        out: torch.Tensor = self.lm_head(self.ln_f(x))
        return out


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_nanogpt_with_compiled_blocks(backend: str) -> None:
    def make() -> nn.Module:
        made = Nano()
        for block in made.h:
            block.compile(backend=backend)
        return made

    one, other = trained(both(make, "1200KiB"), tokens)
    assert one[0] == other[0]
    same(one[1], other[1])
