"""Several processes on CUDA devices: one, two that share a card, and one for every card there is.

With ``PS_FAKE_CUDA=1`` devices that the CPU plays stand in, which shows that these tests run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed import is_nccl_available

import _crew
import _gpu_cases as cases
import _on_cuda as on
from _crew import crew

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(on.MISSING, reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
CARDS = 0 if on.FAKE or on.MISSING else torch.cuda.device_count()


NCCL = pytest.param("nccl", marks=pytest.mark.skipif(on.FAKE or not is_nccl_available(), reason="no NCCL"))
GLOO = pytest.param("gloo", marks=pytest.mark.skipif(on.FAKE, reason="on devices that the CPU plays it is the default"))
WAYS = pytest.mark.parametrize("transport", [None, GLOO, NCCL])


@contextmanager
def ranks(count: int, transport: str | None = None) -> Iterator[Callable[..., list[Any]]]:
    """What runs a training on so many; what their cards' memory travels by is as it should be."""
    wanted = by_itself(count) if transport is None else transport
    if wanted == "gloo" and count > 1:
        wanted = "shared"  # processes of one computer read each other's host memory
    how_joined = {"timeout_s": 120, "transport": transport}
    with crew(count) as made:
        made.run(cases.warm)
        yield lambda *how: made.run(cases.as_a_plain_loop, *how, **how_joined)
        assert made.run(cases.transport, **how_joined) == [wanted] * count


def by_itself(count: int) -> str:
    """What is decided for so many: nothing of it on devices that the CPU plays, which are no cards."""
    if on.FAKE:
        return "gloo"
    if count == 1:
        return "none"
    return "nccl" if is_nccl_available() and count <= CARDS else "gloo"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled by every process."""
    monkeypatch.setattr(_crew, "_WAIT_S", 150.0)


@WAYS
@pytest.mark.parametrize("precision", ["fp32", "bf16"], ids=["one-fp32", "one-bf16"])
def test_a_group_of_one(precision: str, transport: str | None) -> None:
    with ranks(1, transport) as train:
        train(precision, "16MiB", False)


@pytest.mark.skipif(CARDS > 1, reason="each process has a card of its own here")
def test_two_that_share_a_card() -> None:
    """With plenty of memory, and in little with copies that are late."""
    with ranks(2) as train:
        for precision in ("fp32", "bf16", "fp16"):
            train(precision, "16MiB", False)
            for moved in train(precision, "1536KiB", True):
                assert moved["host->device"] > 0


@pytest.mark.skipif(CARDS < 2, reason="one CUDA device, or none: see the test before")
@WAYS
def test_one_for_every_card(transport: str | None) -> None:
    with ranks(min(CARDS, 8), transport) as train:
        for precision in ("fp32", "bf16"):
            train(precision, "16MiB", True)
