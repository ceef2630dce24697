"""Tiny models of well-known kinds, with random weights."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

import _models as models
from _cases import Batch, Case, case, hugging_face, next_token, rows, tokens
from _models import VOCABULARY, WIDTH

SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {"intermediate_size": 2 * WIDTH, "max_position_embeddings": 32}
CLASSES = 7


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=3, n_head=4, n_positions=32))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, **WIDE))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **WIDE, num_key_value_heads=2))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **WIDE, **experts))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    image = {"image_size": 8, "patch_size": 4, "num_labels": CLASSES}
    return ViTForImageClassification(ViTConfig(**sizes, **image, intermediate_size=2 * WIDTH))


def pictures(index: int) -> Batch:
    """Pictures with their classes."""
    (labels,) = tokens(index, 4, 1)
    return (*rows(index, 4, 3, 8, 8), labels[:, 0] % CLASSES)


def classify(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of a transformers classifier."""
    return model(pixel_values=images, labels=labels).loss.float()


def tagged(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of plain logits."""
    return nn.functional.cross_entropy(model(images).float(), labels)


LANGUAGE = {"inputs": tokens, "loss": hugging_face}
ZOO: tuple[Case, ...] = (
    case("gpt2", gpt2, **LANGUAGE),
    case("bert", bert, **LANGUAGE),
    case("t5", t5, **LANGUAGE),
    case("llama", llama, **LANGUAGE),
    case("mixtral", mixtral, **LANGUAGE),
    case("vit", vit, inputs=pictures, loss=classify),
    case("mlp", models.stack),
    case("cnn", partial(models.convolutional, "group"), inputs=pictures, loss=tagged),
    case("lstm", partial(models.Recurrent, nn.LSTM)),
    case("language", models.Language, inputs=tokens, loss=next_token),
)
