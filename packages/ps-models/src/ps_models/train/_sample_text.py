"""Make text with the trained model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ps_core import DoesNotFit
from ps_models.train._data import Corpus
from ps_models.train._loop import ManagedModel
from ps_models.train._objectives import MaskedTokenObjective, Objective
from ps_models.train._options import TrainOptions

_GAP = "[?]"
_NOTHING = "sample: none, for what the model gives is not finite"


def sample(options: TrainOptions, data: Corpus, managed: ManagedModel, objective: Objective) -> str:
    """Return the prompt and its continuation; for a BERT a held-back text with gaps, and its guesses."""
    try:
        if isinstance(objective, MaskedTokenObjective):
            return filled(options, data, managed, objective)
        return written(options, data, managed)
    except (DoesNotFit, torch.OutOfMemoryError) as error:  # the training is saved: this is no failure of the run
        if managed.ranks.size > 1:
            raise  # the other ranks wait in collectives
        return f"sample: none, {str(error).splitlines()[0]}; try fewer tokens (--sample)"


def written(options: TrainOptions, data: Corpus, managed: ManagedModel) -> str:
    """Return the prompt and its continuation; numbers for token files, which have no tokenizer."""
    chosen = data.tokenizer
    start = data.validation[0][:1].tolist() if chosen is None else chosen.encode(options.prompt.encode()).tolist()
    if chosen is not None:
        start = [*chosen.start, *start] or [chosen.end]
    ids = torch.tensor([start], device=managed.inputs)
    model: Any = managed.model  # `generate` is not nn.Module's
    model.eval()
    with torch.no_grad():
        if not model(input_ids=ids).logits[:, -1].isfinite().all():
            return _NOTHING
    end = None if chosen is None else chosen.end
    tokens = _by_transformers(options, model, ids, end) if options.hf else _by_ours(options, model, ids, end)
    return f"sample:\n{_text(data, tokens)}"


def _by_ours(options: TrainOptions, model: Any, ids: Tensor, end: int | None) -> list[int]:
    generator = torch.Generator(ids.device).manual_seed(options.seed)
    found: list[int] = model.generate(
        ids, options.sample, temperature=options.temperature, end_token=end, generator=generator
    )[0].tolist()
    return found


def _by_transformers(options: TrainOptions, model: Any, ids: Tensor, end: int | None) -> list[int]:
    """Sample by transformers, which draws from PyTorch's own generator."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    count = options.sample if positions is None else min(options.sample, positions - ids.shape[1])
    if count < 1:
        return [int(each) for each in ids[0]]
    how = {"do_sample": True, "temperature": options.temperature, "top_k": 0} if options.temperature else {}
    with torch.random.fork_rng(devices=[] if ids.device.type == "cpu" else None):
        torch.manual_seed(options.seed)
        found: list[int] = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            eos_token_id=end,
            pad_token_id=end,
            **({"do_sample": False} | how),
        )[0].tolist()
    return found


@torch.no_grad()
def filled(options: TrainOptions, data: Corpus, managed: ManagedModel, objective: MaskedTokenObjective) -> str:
    """Return a held-back text with gaps, and with the likeliest tokens in them."""
    ids, hidden = objective.example(options.sample)
    seen = ids.clone()
    seen[hidden] = objective.marks.mask
    managed.model.eval()
    logits = managed.model(input_ids=seen[None].to(managed.inputs)).logits[0].to("cpu")
    if not logits.isfinite().all():
        return _NOTHING
    guessed = logits[hidden].argmax(-1)
    full = ids.clone()
    full[hidden] = guessed
    right = int((guessed == ids[hidden]).sum())
    gaps, tokens = set(hidden.tolist()), seen.tolist()
    pieces = groupby(range(len(tokens)), key=gaps.__contains__)
    shown = [
        _GAP * len(places) if gap else _text(data, [tokens[place] for place in places])
        for gap, places in ((gap, list(each)) for gap, each in pieces)
    ]
    return (
        f"sample: {len(hidden)} of {len(ids)} tokens that were held back are hidden, {right} were guessed\n"
        f"{(' ' if data.tokenizer is None else '').join(shown)}\nfilled:\n{_text(data, full.tolist())}"
    )


def _text(data: Corpus, tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens)) if data.tokenizer is None else data.tokenizer.decode(tokens)
