"""Which architectures of transformers train under a budget as they do in plain PyTorch, to the bit.

    python benchmarks/architectures.py [NAME ...] [--precision fp32] [--checkpoint]

Small models with random weights, four steps with AdamW: in plain PyTorch, and on an emulated accelerator with the least
budget, of a few, in which the model trains. In 16 bits both are managed, one in plain memory, as plain PyTorch keeps no
masters. An architecture counts as the same if all losses and parameters are, but for the last few elements of a tensor
that fill no vector, which PyTorch leaves to other code (docs/kernels.md). Exits with 1 if one is not.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ps_core import AdamW, Budget, DoesNotFit
from ps_core.engine import chunked, release, statistics

STEPS, WORDS, WIDTH = 4, 97, 32
SHARES = (0.6, 0.8, 1.0, 1.4, 2.0, 4.0, 8.0, 30.0, 200.0)
"""Budgets tried, in units of all weights; the rest of it is for activations."""
CONSTANT_BYTES, VECTOR = 40_000, 16
Batch = dict[str, Tensor]
Build = Callable[[], nn.Module]


def seeded(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + index)


def words(index: int) -> Tensor:
    return torch.randint(1, WORDS, (2, 12), generator=seeded(index))


def language(index: int) -> Batch:
    return {"input_ids": words(index), "labels": words(index)}


def translation(index: int) -> Batch:
    return {"input_ids": words(index), "labels": words(index + 50)}


def text_class(index: int) -> Batch:
    return {"input_ids": words(index), "labels": torch.tensor([0, 1])}


def picture(index: int) -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=seeded(index)), "labels": torch.tensor([0, 1])}


def sound(index: int) -> Batch:
    return {"input_values": torch.randn(2, 1600, generator=seeded(index)), "labels": torch.tensor([0, 1])}


def speech(index: int) -> Batch:
    return {"input_features": torch.randn(2, 20, 40, generator=seeded(index)), "labels": words(index)}


def captioned(index: int) -> Batch:
    return {"input_ids": words(index), "pixel_values": picture(index)["pixel_values"]}


ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, **ENDS}
TEXT |= {"intermediate_size": 64, "max_position_embeddings": 64}
GROUPED = TEXT | {"num_key_value_heads": 2}
N_STYLE = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": 64, **ENDS}
D_STYLE = {"vocab_size": WORDS, "d_model": WIDTH, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, **ENDS}
D_STYLE |= {f"{side}_layers": 2 for side in ("encoder", "decoder")}
D_STYLE |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
D_STYLE |= {f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")}
D_STYLE |= {"max_position_embeddings": 64, "decoder_start_token_id": 1, "forced_eos_token_id": 2}
IMAGE = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
IMAGE |= {"image_size": 32, "patch_size": 8, "num_labels": 3}
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 3}
WAVES = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
WAVES |= {"intermediate_size": 64, "conv_dim": [16] * 3, "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3]}
WAVES |= {"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
WAVES |= {"num_labels": 3, "classifier_proj_size": 16, "apply_spec_augment": False, "layerdrop": 0.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """Architectures that are built and called alike; ``others`` have settings of their own."""

    head: str
    batch: Callable[[int], Batch]
    settings: dict[str, Any]
    names: str = ""
    others: dict[str, dict[str, Any]] = field(default_factory=dict)

    def members(self) -> dict[str, tuple[Build, Callable[[int], Batch]]]:
        every = {name: {} for name in self.names.split()} | self.others
        return {name: (self._build(name, own), self.batch) for name, own in every.items()}

    def _build(self, name: str, own: dict[str, Any]) -> Build:
        def build() -> nn.Module:
            config = transformers.AutoConfig.for_model(name, **(self.settings | own))
            made: nn.Module = getattr(transformers, self.head).from_config(config)
            return made

        return build


FAMILIES = (
    Family(
        "AutoModelForCausalLM",
        language,
        GROUPED,
        "llama mistral qwen2 phi phi3 stablelm olmo olmo2 starcoder2 cohere granite smollm3 nemotron persimmon exaone4 "
        "ernie4_5 seed_oss arcee gpt_neox biogpt",
        {name: {"head_dim": 8} for name in ("gemma", "gemma2", "glm", "qwen3", "helium")}
        | {
            "mixtral": EXPERTS | {"num_local_experts": 4},
            "phimoe": EXPERTS | {"num_local_experts": 4},
            "olmoe": EXPERTS | {"num_experts": 4},
            "gpt_oss": EXPERTS | {"num_local_experts": 4, "head_dim": 8},
            "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
            "qwen3_moe": EXPERTS | {"num_experts": 4, "head_dim": 8},
            "deepseek_v3": EXPERTS
            | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
            | {"first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
            | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
            "recurrent_gemma": {"head_dim": 8, "lru_width": WIDTH, "attention_window_size": 16},
            "jamba": {"num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8}
            | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
            | {"use_mamba_kernels": False},
            "qwen3_next": EXPERTS
            | {"num_hidden_layers": 4, "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 32}
            | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
            | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            "lfm2": {"block_ff_dim": 64, "full_attn_idxs": [1]},
            "falcon": {"num_key_value_heads": 4},
            "bloom": {"n_layer": 3, "n_head": 4},
            "opt": {"ffn_dim": 64, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
        },
    ),
    Family(
        "AutoModelForCausalLM",
        language,
        N_STYLE,
        "gpt2 gpt_bigcode openai-gpt",
        {"codegen": {"rotary_dim": 4}, "gptj": {"rotary_dim": 4}, "ctrl": {"dff": 64}}
        | {"mpt": {"d_model": WIDTH, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}}
        | {"xglm": {"d_model": WIDTH, "num_layers": 3, "attention_heads": 4, "ffn_dim": 64}},
    ),
    Family(
        "AutoModelForCausalLM",
        language,
        {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 3, "state_size": 8},
        "mamba falcon_mamba",
        {"mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}}
        | {"rwkv": {"attention_hidden_size": WIDTH, "intermediate_size": 64, "context_length": 64}},
    ),
    Family(
        "AutoModelForSequenceClassification",
        text_class,
        TEXT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "bert roberta electra deberta deberta-v2 mpnet camembert convbert fnet nystromformer layoutlm "
        "big_bird rembert ibert megatron-bert roformer data2vec-text xlm-roberta-xl mra yoso",
        {
            "albert": {"embedding_size": 16},
            "distilbert": {"dim": WIDTH, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
            "modernbert": {"cls_token_id": 1, "sep_token_id": 2},
            "mobilebert": {"embedding_size": WIDTH, "intra_bottleneck_size": 16},
            "longformer": {"attention_window": 4},
            "esm": {"mask_token_id": 3},
            "canine": {"num_hash_functions": 2, "num_hash_buckets": 16},
            "xlm": {"emb_dim": WIDTH, "n_layers": 3, "n_heads": 4},
        },
    ),
    Family(
        "AutoModelForSeq2SeqLM",
        translation,
        D_STYLE,
        "t5 mt5 umt5 longt5 bart mbart pegasus marian m2m_100 blenderbot bigbird_pegasus plbart",
        {"led": {"attention_window": 4, "max_encoder_position_embeddings": 64}},
    ),
    Family(
        "AutoModelForImageClassification",
        picture,
        IMAGE,
        "vit beit dinov2 dinov2_with_registers vit_msn data2vec-vision",
    ),
    Family(
        "AutoModelForImageClassification",
        picture,
        {"image_size": 32, "num_labels": 3, "depths": [1, 1]},
        "",
        {name: {"embed_dim": 16, "patch_size": 4, "num_heads": [2, 2], "window_size": 4} for name in ("swin", "swinv2")}
        | {name: {"embedding_size": 8, "hidden_sizes": [8, 16]} for name in ("resnet", "regnet")}
        | dict.fromkeys(("convnext", "convnextv2", "poolformer"), STAGES)
        | {name: STAGES | {"num_attention_heads": [1, 1, 2, 2]} for name in ("segformer", "pvt")}
        | {"focalnet": {"embed_dim": 16, "focal_levels": [1, 1], "focal_windows": [3, 3]}}
        | {"mobilenet_v2": {"depth_multiplier": 0.35}}
        | {"mobilevit": {"hidden_sizes": [16] * 3, "neck_hidden_sizes": [8] * 7}}
        | {"efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}},
    ),
    Family(
        "AutoModelForAudioClassification",
        sound,
        WAVES,
        "wav2vec2 hubert wavlm unispeech data2vec-audio wav2vec2-conformer",
        {"sew": {"squeeze_factor": 2}},
    ),
    Family(
        "AutoModelForSpeechSeq2Seq",
        speech,
        D_STYLE | {"num_mel_bins": 20, "max_source_positions": 20, "max_target_positions": 64},
        "whisper",
    ),
    Family(
        "AutoModel",
        captioned,
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16},
        "clip siglip",
    ),
)
ARCHITECTURES = {name: made for family in FAMILIES for name, made in family.members().items()}


@dataclass(frozen=True)
class Ran:
    """A training's losses and where it ended."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    seen: str = ""


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    result = model(**batch)
    loss: Tensor | None = getattr(result, "loss", None)
    return result[0].float().square().mean() if loss is None else loss


def trained(model: nn.Module, optimizer: Any, batch: Callable[[int], Batch]) -> list[Tensor]:
    losses = []
    scale: Callable[[Tensor], Tensor] = getattr(optimizer, "scale", lambda loss: loss)
    for index in range(STEPS):
        torch.manual_seed(1000 + index)
        loss = loss_of(model, batch(index))
        scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def made(build: Build, *, checkpoint: bool) -> nn.Module:
    torch.manual_seed(0)
    model = build().train()
    if checkpoint and getattr(model, "supports_gradient_checkpointing", False):
        switch: Any = model.gradient_checkpointing_enable
        switch(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def plain(model: nn.Module, batch: Callable[[int], Batch]) -> Ran:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    return Ran(trained(model, optimizer, batch), dict(model.named_parameters()))


def managed(model: nn.Module, batch: Callable[[int], Batch], precision: str, share: float | None) -> Ran:
    """In plain memory, or with so much of the weights' bytes on an emulated accelerator."""
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    budget = None if share is None else Budget(device=int(weights * share) + CONSTANT_BYTES)
    device = "cpu" if share is None else "emulated"
    spec = AdamW(lr=1e-3, weight_decay=0.01)
    model, optimizer = chunked(model, spec, device=device, budget=budget, precision=precision)
    try:
        losses = trained(model, optimizer, batch)
        seen = statistics(model)
    finally:
        release(model)
    told = (
        f"{share} of its weights and {CONSTANT_BYTES} bytes; {seen.evictions} evictions, {seen.divergences} plans left"
    )
    return Ran(losses, dict(model.named_parameters()), told)


def unlike(one: Ran, other: Ran) -> str:
    """Where they differ first; empty if nowhere that counts."""
    for step, (left, right) in enumerate(zip(one.losses, other.losses, strict=True)):
        if not torch.allclose(left, right, rtol=0, atol=0, equal_nan=True):
            return f"loss {step}: {left.item()!r}, {right.item()!r}"
    for name, left in one.weights.items():
        whole = left.numel() // VECTOR * VECTOR
        if not torch.equal(left.detach().flatten()[:whole], other.weights[name].detach().flatten()[:whole]):
            return name
    return ""


def compared(name: str, precision: str, *, checkpoint: bool) -> tuple[bool, str]:
    """Whether it trains the same, and how little was enough."""
    build, batch = ARCHITECTURES[name]
    first = made(build, checkpoint=checkpoint)
    try:
        expected = plain(first, batch) if precision == "fp32" else managed(first, batch, precision, None)
    except (RuntimeError, NotImplementedError) as error:  # of operators that have no such types
        return False, f"does not run in {precision} at all: {str(error).splitlines()[0]}"
    for share in SHARES:
        try:
            ran = managed(made(build, checkpoint=checkpoint), batch, precision, share)
        except DoesNotFit:
            continue
        difference = unlike(expected, ran)
        return not difference, f"differs at {difference}" if difference else f"the same with {ran.seen}"
    return False, f"does not fit in {SHARES[-1]} of its weights"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--checkpoint", action="store_true", help="with gradient checkpointing, where there is any")
    chosen = parser.parse_args()
    unknown = sorted({*chosen.names} - {*ARCHITECTURES})
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(ARCHITECTURES)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("ps_core").addHandler(logging.NullHandler())
    count = 0
    for name in chosen.names or ARCHITECTURES:
        same, told = compared(name, chosen.precision, checkpoint=chosen.checkpoint)
        count += same
        print(f"{name}: {told}", flush=True)
    every = len(chosen.names or ARCHITECTURES)
    print(f"{count} of {every} the same in {chosen.precision}, transformers {transformers.__version__}")
    return int(count < every)


if __name__ == "__main__":
    sys.exit(main())
