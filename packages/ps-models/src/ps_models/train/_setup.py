"""Make a managed model from the options."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

import ps_kernels
from ps_core import AdamW, Budget, Group, InvalidInput, Options, UnsupportedParameter
from ps_core._units import format_count
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.shapes import Family, TransformerShape
from ps_core.engine import ChunkedOptimizer, chunked
from ps_models._build import build
from ps_models.train._data import Corpus
from ps_models.train._loop import ManagedModel
from ps_models.train._objectives import MaskedTokenObjective, NextTokenObjective, Objective
from ps_models.train._options import TrainOptions
from ps_models.train._packing_check import check_packing
from ps_models.train._ranks import TrainingRanks
from ps_models.train._sample_objective import SampleObjective
from ps_models.train._transformers_model import TransformersModel

Found: TypeAlias = TransformerShape | TransformersModel
"""The model of the options: built by its name, or read from a folder."""


def model_of(options: TrainOptions) -> Found:
    """Return the model that the options name or give a folder of, before anything is read of the data."""
    return shape_of(options) if options.hf is None else TransformersModel(options)


def fitted(found: Found, options: TrainOptions, data: Corpus) -> Found:
    """Return the model with the data's vocabulary; raise `InvalidInput` if a model from a folder lacks tokens."""
    if isinstance(found, TransformerShape):
        return shape_of(options, data)
    found.check_tokens(data.tokenizer)
    return found


def objective_for(options: TrainOptions, data: Corpus, found: Found) -> Objective:
    """Return the objective of a model, which has the data's vocabulary."""
    if isinstance(found, TransformerShape) and found.family is Family.BERT:
        if data.samples is not None:
            raise InvalidInput(
                f"--data: found prompts with completions, or conversations, with --model {options.model}, which learns "
                "hidden tokens of texts; allowed are texts"
            )
        return MaskedTokenObjective(options, data, found)
    if options.mask_token is not None:
        raise InvalidInput(f"--mask-token: found {options.mask_token} with {options.model}; allowed with a BERT only")
    return NextTokenObjective(options, data, found) if data.samples is None else SampleObjective(options, data)


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


def manage(options: TrainOptions, found: Found, ranks: TrainingRanks, *, fresh: bool = True) -> ManagedModel:
    """Build the model without memory, and put it under management, alone or with other ranks.

    ``fresh``: no checkpoint will be loaded.
    """
    if options.threads is not None:
        ps_kernels.set_threads(options.threads)  # PyTorch's, too
    disk_dir = budget_of(options).disk_dir
    if disk_dir is not None:
        try:
            Path(disk_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"--disk-dir: cannot make {disk_dir!r}: {error.strerror}; allowed is a folder that can be written to"
            ) from error
    torch.manual_seed(options.seed)
    if isinstance(found, TransformerShape):
        model, optimizer = _managed(options, _built(options, found), ranks)
    else:
        try:
            model, optimizer = _managed(options, found.build(options, whole=fresh and not found.streams), ranks)
        except (RuntimeError, UnsupportedParameter):
            if found.is_read:
                raise
            # Some initial values cannot be drawn later, such as an orthogonal matrix.
            model, optimizer = _managed(options, found.build(options, whole=True), ranks)
    inputs = torch.device("cuda" if device_of(options) == "cuda" else "cpu")
    return ManagedModel(model=model, optimizer=optimizer, inputs=inputs, ranks=ranks)


def _managed(options: TrainOptions, model: nn.Module, ranks: TrainingRanks) -> tuple[nn.Module, ChunkedOptimizer]:
    # Two groups in either case: then a checkpoint of one is one of the other, and --decay may change.
    groups = (Group(match=_is_vector, weight_decay=0.0 if options.decay == "matrices" else options.weight_decay),)
    with warnings.catch_warnings():
        if options.hf is not None:
            warnings.simplefilter(
                "ignore"
            )  # warnings that values differ from a build on the CPU: all are read from files
        _, optimizer = chunked(
            model,
            AdamW(
                lr=options.lr,
                betas=(options.beta1, options.beta2),
                eps=options.eps,
                weight_decay=options.weight_decay,
                groups=groups,
            ),
            device=device_of(options),
            budget=budget_of(options),
            precision=options.precision,
            max_grad_norm=options.clip or None,
            accumulation_steps=options.accumulate,
            options=Options(
                keep_fp32=options.keep_fp32, step="speculative" if options.step_speculative else "after_backward"
            ),
            collectives=ranks.together,
        )
    assert optimizer is not None, "an optimizer was asked for"
    return model, optimizer


def prepare(
    options: TrainOptions, found: Found, managed: ManagedModel, say: Callable[[str], None], *, fresh: bool
) -> None:
    """Read the weights of a model from a folder, unless a checkpoint will be loaded; check what ``--pack`` needs."""
    if isinstance(found, TransformerShape):
        return
    unused = found.load() if fresh else ""
    if unused:
        say(unused)
    if options.pack:
        check_packing(options, managed, found.vocabulary)


def _built(options: TrainOptions, found: TransformerShape) -> nn.Module:
    overrides = {"vocabulary": found.vocabulary, "positions": found.positions, "tied_head": found.tied_head}
    if options.head_tiles > 1:
        overrides["head_tiles"] = options.head_tiles  # which a BERT does not have
    return build(
        options.model,
        "meta",
        checkpoint_blocks=options.checkpointing,
        offload_checkpoints=options.offload_checkpoints,
        cpu_embedding=options.cpu_embedding,
        **overrides,
    )


def _is_vector(name: str, parameter: Any) -> bool:
    """Return True for norms and biases; ``Any`` as in `Group`."""
    found: bool = parameter.dim() < 2
    return found


def budget_of(options: TrainOptions) -> Budget:
    """Return the memory that the options allow."""
    folder = options.disk_dir
    if options.disk is not None and folder is None:
        folder = str(Path(options.out) / "disk")
    return Budget(device=options.device_memory, host=options.host_memory, disk=options.disk, disk_dir=folder)


def told(found: Found, options: TrainOptions, ranks: TrainingRanks) -> str:
    """Return a line about the model, and with several ranks another about these."""
    count = options.batch // ranks.size
    others = (
        f"\n{ranks.size} processes, each with {count} of the {options.batch} sequences of a micro-batch; "
        "below, tokens/s is of all, everything else of the first"
    )
    hint = "" if _is_native(options) else _NOT_NATIVE.format(options.precision)
    kind = f"{found.layers} layers of {found.hidden}" if isinstance(found, TransformerShape) else found.kind
    kind += "" if options.lora is None else f" with adapters of rank {options.lora}"
    return (
        f"{found.name}: {format_count(found.parameters)} parameters, {kind}, "
        f"{found.vocabulary} tokens; {options.precision} on {device_of(options)}, "
        f"{options.tokens_per_step:,} tokens a step{others if ranks.size > 1 else ''}{hint}"
    )


_NOT_NATIVE = "\nthis processor has no instructions for {}: with --precision fp32 a step takes a fraction of the time"


def _is_native(options: TrainOptions) -> bool:
    """Return False if PyTorch computes on this processor, and knows that it has no instructions for the precision."""
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{options.precision}_supported", None)
    return device_of(options) == "cuda" or asked is None or bool(asked())
