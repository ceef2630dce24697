"""Read and write what the ``config.json`` of each family says besides its shape.

Any, in the writers: a configuration of the family, whose own module imports this one.
"""

from __future__ import annotations

from typing import Any

from ps_core._errors import InvalidInput
from ps_core._workloads.shapes import Family, TransformerShape
from ps_models._pretrained import Entries, Files

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def _need(entries: Entries, key: str, default: object, *allowed: object) -> None:
    value = entries.get(key, default)
    if value not in allowed:
        known = " or ".join(repr(each) for each in allowed)
        raise InvalidInput(f"config.json: {key} is {value!r}, of what this model can be only {known} is there")


def _read_gpt2(entries: Entries) -> Entries:
    _need(entries, "activation_function", "gelu_new", *_TANH_GELU)
    _need(entries, "scale_attn_weights", True, True)
    _need(entries, "scale_attn_by_inverse_layer_idx", False, False)
    _need(entries, "add_cross_attention", False, False)
    dropout = entries.get("resid_pdrop", 0.1)
    _need(entries, "embd_pdrop", 0.1, dropout)
    return {
        "dropout": dropout,
        "attention_dropout": entries.get("attn_pdrop", 0.1),
        "norm_epsilon": entries.get("layer_norm_epsilon", 1e-5),
        "init_std": entries.get("initializer_range", 0.02),
    }


def _write_gpt2(config: Any) -> Entries:
    shape = config.shape
    end = 50256 if shape.vocabulary > 50256 else None
    return {
        "model_type": "gpt2",
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "n_positions": shape.positions,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied_head,
        "activation_function": "gelu_new",
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "layer_norm_epsilon": config.norm_epsilon,
        "initializer_range": config.init_std,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def _read_bert(entries: Entries) -> Entries:
    _need(entries, "hidden_act", "gelu", "gelu")
    _need(entries, "position_embedding_type", "absolute", "absolute")
    _need(entries, "is_decoder", False, False)
    return {
        "dropout": entries.get("hidden_dropout_prob", 0.1),
        "attention_dropout": entries.get("attention_probs_dropout_prob", 0.1),
        "norm_epsilon": entries.get("layer_norm_eps", 1e-12),
        "init_std": entries.get("initializer_range", 0.02),
    }


def _write_bert(config: Any) -> Entries:
    shape = config.shape
    return {
        "model_type": "bert",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.positions,
        "vocab_size": shape.vocabulary,
        "type_vocab_size": shape.token_types,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": config.norm_epsilon,
        "initializer_range": config.init_std,
        "pad_token_id": 0,
    }


def _read_llama(entries: Entries) -> Entries:
    rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    _need(rope, "rope_type", rope.get("type", "default"), "default")
    _need(entries, "hidden_act", "silu", "silu")
    _need(entries, "sliding_window", None, None, *(() if entries.get("use_sliding_window", True) else (0,)))
    return {
        "attention_dropout": entries.get("attention_dropout", 0.0),
        "norm_epsilon": entries.get("rms_norm_eps", 1e-6),
        "init_std": entries.get("initializer_range", 0.02),
        "rope_theta": rope.get("rope_theta", entries.get("rope_theta", 10_000.0)),
    }


def _write_llama(config: Any) -> Entries:
    shape = config.shape
    found = {
        "model_type": shape.family.value,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.positions,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied_head,
        "hidden_act": "silu",
        "attention_dropout": config.attention_dropout,
        "rms_norm_eps": config.norm_epsilon,
        "initializer_range": config.init_std,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "sliding_window": None,
    }
    if shape.family is Family.LLAMA:
        found |= {"attention_bias": shape.out_bias, "mlp_bias": shape.mlp_bias}
    return found


def _bert_class(ours: str, shape: TransformerShape) -> str:
    if ours == "BERTClassifier":
        return "BertForSequenceClassification"
    return "BertForPreTraining" if shape.next_sentence else "BertForMaskedLM"


GPT2_FILES = Files(
    read=_read_gpt2,
    write=_write_gpt2,
    architecture=lambda ours, shape: {"GPT": "GPT2LMHeadModel"}.get(ours, "GPT2ForSequenceClassification"),
    base="transformer.",
    heads=("lm_head.", "score."),
    ignored=(".attn.bias", ".attn.masked_bias"),
)
BERT_FILES = Files(
    read=_read_bert,
    write=_write_bert,
    architecture=_bert_class,
    base="bert.",
    heads=("cls.", "classifier."),
    # A tied decoder's; BERT's untied one is not known.
    ignored=("position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    renamed=((".gamma", ".weight"), (".beta", ".bias")),
)
LLAMA_FILES = Files(
    read=_read_llama,
    write=_write_llama,
    architecture=lambda ours, shape: f"{shape.family.value.capitalize()}ForCausalLM",
    base="model.",
    heads=("lm_head.",),
    ignored=("rotary_emb.inv_freq",),
)
