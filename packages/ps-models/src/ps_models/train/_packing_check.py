"""Check that samples in one sequence do not attend to each other."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ps_core._errors import InvalidInput
from ps_models._loss import IGNORED
from ps_models.train._loop import ManagedModel
from ps_models.train._options import TrainOptions

_REASON = (
    "--pack: found with a model that does not tell the samples of a sequence apart by their positions ({}); allowed is "
    "to leave --pack out, or a model whose attention transformers masks, as that of Llama or Qwen"
)


def check_packing(options: TrainOptions, managed: ManagedModel, vocabulary: int) -> None:
    """Raise `InvalidInput` if the loss of a sequence's second sample changes with its first one.

    Masked tokens have a weight of exactly zero, so losses are compared to the bit.
    """
    model: Any = managed.model  # of transformers
    inner = model.get_base_model() if options.lora is not None else model
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        raise InvalidInput(_REASON.format("it takes no position_ids"))
    half, rows = options.seq // 2, options.batch // managed.ranks.size
    positions = torch.cat([torch.arange(half), torch.arange(options.seq - half)])
    ids = torch.arange(options.seq) % vocabulary
    other = torch.cat([(ids[:half] + vocabulary // 2) % vocabulary, ids[half:]])
    labels = ids.clone()
    labels[: half + 1] = IGNORED
    model.eval()
    try:
        losses = [_loss(managed, rows, input_ids=each, labels=labels, position_ids=positions) for each in (ids, other)]
    finally:
        model.train()
    if losses[0] != losses[1]:
        raise InvalidInput(_REASON.format(f"one sample changes the loss of the next, {losses[0]} and {losses[1]}"))


@torch.no_grad()
def _loss(managed: ManagedModel, rows: int, **row: torch.Tensor) -> float:
    batch = {name: each.expand(rows, -1).to(managed.inputs) for name, each in row.items()}
    found: float = managed.model(**batch).loss.item()
    return found
