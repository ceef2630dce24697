"""Make a managed model from the options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ps_kernels
from ps_core import AdamW, Budget, Group, InvalidInput
from ps_core._units import format_count
from ps_core._workloads.named import shape
from ps_core._workloads.shapes import Family, TransformerShape
from ps_core.engine import chunked
from ps_models._build import build
from ps_models.train._data import Corpus
from ps_models.train._loop import ManagedModel
from ps_models.train._options import TrainOptions
from ps_models.train._ranks import TrainingRanks


def shape_of(options: TrainOptions, data: Corpus | None = None) -> TransformerShape:
    """Return the named shape, with the data's vocabulary, and positions for a whole sequence."""
    try:
        found = shape(options.model)
    except InvalidInput as error:
        raise InvalidInput(f"--model: found {options.model!r}; {error}") from None
    if options.untied_head and found.family is Family.BERT:
        raise InvalidInput(
            f"--untied-head: found with --model {options.model}, and a BERT's head is its token table; allowed with "
            "other models"
        )
    tied = found.tied_head and not options.untied_head
    if options.cpu_embedding and tied:
        raise InvalidInput(
            f"--cpu-embedding: found with --model {options.model}, whose head is its token table and needs all of it; "
            "allowed with models that have a head of their own, as with --untied-head"
        )
    if options.head_tiles > 1 and tied:
        raise InvalidInput(
            f"--head-tiles: found {options.head_tiles} with --model {options.model}, whose head is its token table; "
            "allowed with models that have a head of their own, as with --untied-head"
        )
    if data is None:
        return found
    words = options.vocab or (found.vocabulary if data.tokenizer is None else data.tokenizer.vocabulary)
    if data.tokenizer is not None and words < data.tokenizer.vocabulary:
        raise InvalidInput(
            f"--vocab: found {words}, allowed is at least {data.tokenizer.vocabulary}, which the tokenizer has"
        )
    if options.head_tiles > words:
        raise InvalidInput(f"--head-tiles: found {options.head_tiles}, allowed is at most {words}, the model's tokens")
    return replace(found, vocabulary=words, positions=max(found.positions, options.seq), tied_head=tied)


def device_of(options: TrainOptions) -> str:
    """Return the device; ``auto`` is CUDA if there is any."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("--device: found 'cuda', but PyTorch finds none; allowed here are cpu and emulated")
    if options.device != "auto":
        return options.device
    if torch.cuda.is_available():
        return "cuda"
    return "cpu" if options.device_memory is None else "emulated"


def manage(options: TrainOptions, found: TransformerShape, ranks: TrainingRanks) -> ManagedModel:
    """Build the model without memory, and put it under management, alone or with others."""
    if options.threads is not None:
        ps_kernels.set_threads(options.threads)  # PyTorch's, too
    device = device_of(options)
    budget = budget_of(options)
    if budget.disk_dir is not None:
        Path(budget.disk_dir).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    overrides = {"vocabulary": found.vocabulary, "positions": found.positions, "tied_head": found.tied_head}
    if options.head_tiles > 1:
        overrides["head_tiles"] = options.head_tiles  # which a BERT does not have
    model = build(
        options.model,
        "meta",
        checkpoint_blocks=options.checkpointing,
        offload_checkpoints=options.offload_checkpoints,
        cpu_embedding=options.cpu_embedding,
        **overrides,
    )
    # Two groups in either case: then a checkpoint of one is one of the other, and --decay may change.
    groups = (Group(match=_is_vector, weight_decay=0.0 if options.decay == "matrices" else options.weight_decay),)
    _, optimizer = chunked(
        model,
        AdamW(
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            groups=groups,
        ),
        device=device,
        budget=budget,
        precision=options.precision,
        max_grad_norm=options.clip or None,
        accumulation_steps=options.accumulate,
        collectives=ranks.together,
    )
    assert optimizer is not None, "an optimizer was asked for"
    inputs = torch.device("cuda" if device == "cuda" else "cpu")
    return ManagedModel(model=model, optimizer=optimizer, inputs=inputs, ranks=ranks)


def _is_vector(name: str, parameter: Any) -> bool:
    """True for norms and biases; ``Any`` as in `Group`."""
    found: bool = parameter.dim() < 2
    return found


def budget_of(options: TrainOptions) -> Budget:
    """Return the memory that the options allow."""
    folder = options.disk_dir
    if options.disk is not None and folder is None:
        folder = str(Path(options.out) / "disk")
    return Budget(device=options.device_memory, host=options.host_memory, disk=options.disk, disk_dir=folder)


def told(found: TransformerShape, options: TrainOptions, ranks: TrainingRanks) -> str:
    """Return a line about the model, and with several ranks another about them."""
    count = options.batch // ranks.size
    others = (
        f"\n{ranks.size} processes, each with {count} of the {options.batch} sequences of a micro-batch; "
        "below, tokens/s is of all, everything else of the first"
    )
    return (
        f"{found.name}: {format_count(found.parameters)} parameters, {found.layers} layers of {found.hidden}, "
        f"{found.vocabulary} tokens; {options.precision} on {device_of(options)}, "
        f"{options.tokens_per_step:,} tokens a step{others if ranks.size > 1 else ''}"
    )
