"""What does not fit is said in full: where, when, how much, and three things to do; word by word."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, release


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))


def train(model: nn.Module, budget: Budget, rows: int) -> None:
    chunked(model, AdamW(), device="emulated", budget=budget, options=Options(group_bytes=2**17))
    try:
        model(torch.randn(rows, 256)).float().square().mean().backward()
    finally:
        release(model)


def refusal(*, device: int, host: int, rows: int = 0) -> str:
    model = layers()
    with pytest.raises(DoesNotFit) as caught:
        train(model, Budget(device=device, host=host), rows)
    return str(caught.value)


def test_model_data_beyond_all_tiers() -> None:
    assert refusal(device=2**18, host=2**20) == (
        "does not fit: all tiers together needs 3,670,016 bytes at 'between steps', "
        "more than the 1,310,720 bytes it has\n"
        '  try: Budget(host="4MiB"): 2.2 MiB more\n'
        "  try: freeze half of the parameters: 1.5 MiB less\n"
        "  try: a smaller model: each parameter takes 14 bytes"
    )


def test_a_group_beyond_the_device() -> None:
    assert refusal(device=2**16, host=2**23) == (
        "does not fit: device needs 131,072 bytes at 'forward of 0.weight', more than the 65,536 bytes it has\n"
        "  try: Budget(device=131072): 65,536 bytes more\n"
        "  try: activation checkpointing: only a block's activations at a time\n"
        "  try: a smaller batch or sequence: less non-model data, of which nothing is known yet"
    )


def test_activations_beyond_the_device() -> None:
    assert refusal(device=2**18, host=2**23, rows=512) == (
        "does not fit: device needs 655,360 bytes at 'forward of 0.weight', more than the 262,144 bytes "
        "it has\n"
        "  try: Budget(device=655360): 0.4 MiB more\n"
        "  try: activation checkpointing: only a block's activations at a time\n"
        "  try: half the batch or sequence: about 0.2 MiB less non-model data"
    )


class WithLoss(nn.Module):
    """Layers that return their loss, so that fake tensors can follow a whole pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


def test_what_a_whole_pass_needs_is_said_at_once() -> None:
    """The first moment that does not fit needs less than later ones, which fake tensors have seen."""

    def attempt(size: int) -> None:
        torch.manual_seed(0)
        model = WithLoss()
        told = {"device": "emulated", "options": Options(group_bytes=2**17)}
        chunked(model, AdamW(), budget=Budget(device=size, host=2**23), **told)
        try:
            model(torch.randn(512, 256)).backward()
        finally:
            release(model)

    with pytest.raises(DoesNotFit) as caught:
        attempt(2**18)
    needed = caught.value.needed_bytes
    assert needed > 3 * 2**18
    attempt(needed)
