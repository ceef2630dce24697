"""The CUDA kernel of the cross entropy, unmodified, run on the CPU: the same bits as numpy's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import ps_kernels
from _emulated import EmulatedLauncher, build
from ps_kernels import _backends, _losses
from ps_kernels._cuda import CudaBackend
from ps_kernels._cuda_source import KERNELS, source

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: the emulation was not built")
KINDS = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1e-45, -87.0, -87.00001, -1e4, 300.0, -np.inf]
WORST = [np.inf, np.nan]
TURN = 16 * 64 * 64
"""Columns whose powers a thread block adds between two barriers."""
COLUMNS = [1, 2, 63, 64, 65, 129, 1023, 4095, 4096, 4097, 8200, TURN, TURN + 4097]
Bits = Callable[[Any], np.ndarray]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLauncher:
    built = build(source("loss"), KERNELS["loss"], tmp_path_factory.mktemp("emulated"), "loss")
    return EmulatedLauncher(libraries={"loss": built})


@pytest.fixture
def emulated(launcher: EmulatedLauncher, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedLauncher]:
    """Calls for torch tensors go to the emulated kernel; on a fresh record."""
    backends = {"torch": CudaBackend(launcher), "numpy": _backends.load("numpy")}
    monkeypatch.setattr(_losses, "choose", lambda name, library, device, wanted: backends[library])
    launcher.launched.clear()
    launcher.order = 0
    yield launcher
    assert launcher.launched, "the emulated kernel was not used"


def logits_of(kind: torch.dtype, rows: int, columns: int, offset: int, odd: list[float]) -> torch.Tensor:
    """Logits with some special ones, ``offset`` elements behind an aligned address."""
    rng = np.random.default_rng(rows * columns)
    values = rng.standard_normal((rows, columns)).astype(np.float32) * 4
    some = rng.random((rows, columns)) < 0.05
    values[some] = rng.choice(odd, int(some.sum()))
    room = torch.zeros(rows * columns + 16, dtype=kind)
    first = -room.data_ptr() % 16 // room.element_size() + offset
    made = room[first : first + rows * columns].view(rows, columns)
    return made.copy_(torch.from_numpy(values))


def by_both(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> list[tuple[Any, Any]]:
    """Losses, and what the logits are then: from the kernel, and from numpy."""
    array = (
        logits.view(torch.int16).numpy().view(np.uint16) if logits.dtype == torch.bfloat16 else logits.numpy()
    ).copy()
    losses, theirs = torch.full((len(labels),), 7.0), np.full(len(labels), 7, np.float32)
    ps_kernels.cross_entropy(logits, labels, losses, **options)
    ps_kernels.cross_entropy(array, labels.numpy(), theirs, **options)
    return [(losses, theirs), (logits, array)]


@pytest.mark.parametrize("odd", [[0.0], SPECIAL, SPECIAL + WORST], ids=["plain", "special", "not finite"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_the_bits_are_numpys(
    emulated: EmulatedLauncher, bits: Bits, columns: int, kind: torch.dtype, odd: list[float]
) -> None:
    for offset, gradient, emulated.order in [(0, True, 0), (1, True, 1), (2, False, 2)]:
        logits = logits_of(kind, 3, columns, offset, odd)
        labels = torch.tensor([columns - 1, -100, columns // 3])
        for ours, theirs in by_both(logits, labels, factor=0.37, gradient=gradient):
            np.testing.assert_array_equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("processors", [1, 100])
def test_more_rows_than_thread_blocks(emulated: EmulatedLauncher, bits: Bits, processors: int) -> None:
    emulated.processors = processors
    labels = torch.arange(70)
    labels[::7] = 300
    for ours, theirs in by_both(logits_of(torch.bfloat16, 70, 300, 0, SPECIAL), labels, ignored=300):
        np.testing.assert_array_equal(bits(ours), bits(theirs))
    assert [blocks for _, blocks in emulated.launched] == [32 if processors == 1 else 70]


@pytest.mark.parametrize("label", [-1, 9, 2**40])
def test_a_wrong_label_gives_nans_in_its_row_alone(emulated: EmulatedLauncher, label: int) -> None:
    for gradient in (False, True):
        logits, losses = torch.ones(3, 9), torch.full((3,), 7.0)
        ps_kernels.cross_entropy(logits, torch.tensor([2, label, -100]), losses, gradient=gradient)
        assert losses.isnan().tolist() == [False, True, False]
        assert logits.isnan().all(1).tolist() == [False, gradient, False]
        assert logits.isnan().any(1).tolist() == [False, gradient, False]


def test_no_rows_start_nothing(launcher: EmulatedLauncher) -> None:
    launcher.launched.clear()
    nothing = torch.empty(0, 9), torch.empty(0, dtype=torch.int64), torch.empty(0)
    assert CudaBackend(launcher).cross_entropy(*nothing, ignored=-100, factor=1.0, gradient=True) == -1
    assert not launcher.launched
