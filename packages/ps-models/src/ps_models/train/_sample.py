"""Text from the model that was trained."""

from __future__ import annotations

from typing import Any

import torch

from ps_models.train._data import Corpus
from ps_models.train._loop import Managed
from ps_models.train._options import TrainOptions


def sample(options: TrainOptions, data: Corpus, managed: Managed) -> str:
    """The prompt, gone on with. Of token files, which nothing here can spell out, the numbers."""
    chosen = data.tokenizer
    start = data.validation[0][:1].tolist() if chosen is None else chosen.encode(options.prompt.encode()).tolist()
    if not start and chosen is not None:
        start = [chosen.end]
    generator = torch.Generator(managed.inputs).manual_seed(options.seed)
    model: Any = managed.model  # `generate` is not nn.Module's
    tokens = model.generate(
        torch.tensor([start], device=managed.inputs),
        options.sample,
        temperature=options.temperature,
        end_token=None if chosen is None else chosen.end,
        generator=generator,
    )[0].tolist()
    text = " ".join(map(str, tokens)) if chosen is None else chosen.decode(tokens)
    return f"sample:\n{text}"
