"""What a token table in the computer's memory and a head in tiles save: the least budget, and bytes moved a step.

    python benchmarks/table_figures.py [--budget 19.5MiB]

Deterministic: nothing here is a time. Two models with 16,384 words of 128 numbers (a table of 4 MiB in bf16), trained
for three steps of 4 sequences of 32 tokens: a Llama with a head of its own, whole and in 16 tiles, and a BERT that
classifies. For each the least budget (to 64 KiB) at which it trains, and what a step moves at ``--budget``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ps_core import AdamW, Budget, DoesNotFit
from ps_core._workloads.named_shapes import shape
from ps_core.engine import chunked, release, statistics
from ps_models import BERTClassifier, BERTConfig, build

WORDS, ROUNDS = 16384, 10


def llama(*, away: bool, head_tiles: int = 1) -> Any:
    """Its head is as large as the table."""
    wide = {"hidden": 128, "heads": 4, "layers": 4, "vocabulary": WORDS, "tied_head": False, "loss_chunk_tokens": 64}
    return build("llama-10m", checkpoint_blocks=True, cpu_embedding=away, head_tiles=head_tiles, **wide)


def tiled(*, away: bool) -> Any:
    """The same, its head in tiles."""
    return llama(away=away, head_tiles=16)


def classifier(*, away: bool) -> Any:
    """Nothing else is as large as the table."""
    found = replace(shape("bert-base"), layers=4, hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=512)
    found = replace(found, vocabulary=WORDS, positions=128)
    with torch.device("meta"):
        return BERTClassifier(BERTConfig(shape=found, checkpoint_blocks=True, cpu_embedding=away))


def moved(make: Callable[..., Any], size: int, *, away: bool) -> int:
    """Bytes that the last two of three steps move, a step; `DoesNotFit` where it does not train."""
    torch.manual_seed(0)
    budget = Budget(device=size, host="1GiB")
    model, optimizer = chunked(make(away=away), AdamW(lr=1e-3), device="emulated", budget=budget, precision="bf16")
    assert optimizer is not None
    counts = []
    try:
        for index in range(3):
            ids = torch.randint(WORDS, (4, 32), generator=torch.Generator().manual_seed(index))
            labels = torch.tensor([0, 1, 1, 0]) if make is classifier else ids
            model(ids, labels=labels).loss.backward()
            optimizer.step()
            counts.append(sum(statistics(model).moved_bytes.values()))
    finally:
        release(model)
    return (counts[-1] - counts[0]) // 2


def least(make: Callable[..., Any], *, away: bool) -> int:
    """The smallest budget, to one part in 2**ROUNDS."""
    low, high = 0, 2**26
    for _ in range(ROUNDS):
        middle = (low + high) // 2
        try:
            moved(make, middle, away=away)
            high = middle
        except DoesNotFit:
            low = middle
    return high


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description="What a token table in the computer's memory saves.")
    parser.add_argument("--budget", default="19.5MiB", help="at which moved bytes are counted")
    size = Budget(device=parser.parse_args().budget).device_bytes
    assert size is not None
    torch.set_num_threads(1)
    for make in (llama, tiled, classifier):
        for away in (False, True):
            where = "in the computer's memory" if away else "anywhere"
            print(
                f"{make.__name__}, table {where}: least budget {least(make, away=away) / 2**20:.2f} MiB, "
                f"{moved(make, size, away=away) / 2**20:.2f} MiB a step at {size / 2**20:.2f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
