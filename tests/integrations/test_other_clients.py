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
