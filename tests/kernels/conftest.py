"""The same numbers as numpy arrays and as torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import ps_kernels
from ps_kernels import _backends
from ps_kernels._backends import fastest
from ps_kernels._say_once import say_once


@pytest.fixture(autouse=True)
def _as_a_process_begins() -> Iterator[None]:
    """What is said, or looked up, once a process is so once a test."""
    say_once.cache_clear()
    _backends.choose.cache_clear()
    yield
    _backends.choose.cache_clear()


def _as_numpy(values: np.ndarray) -> np.ndarray:
    return values.copy()


def _as_torch(values: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(values.copy())
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


@pytest.fixture(params=["numpy", "torch", "compiled"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who does the work of a call that names no backend; compiled code takes arrays of both libraries."""
    if request.param == "compiled":
        if fastest() is None:
            pytest.skip(ps_kernels.backends()["scalar"])
        return "torch"
    monkeypatch.setattr(_backends, "fastest", lambda: None)
    return str(request.param)


@pytest.fixture
def make(library: str) -> Callable[[np.ndarray], Any]:
    """Turn a numpy array into the library's own; bfloat16 is uint16 in numpy."""
    return _as_numpy if library == "numpy" else _as_torch


@pytest.fixture(scope="session")
def bits() -> Callable[[Any], np.ndarray]:
    """Any array's bits, with every nan made the same one."""

    def look(array: Any) -> np.ndarray:
        if isinstance(array, torch.Tensor):
            array = (array.view(torch.int16) if array.dtype == torch.bfloat16 else array).numpy()
            array = array.view(np.uint16) if array.dtype == np.int16 else array
        if array.dtype == np.uint16:
            return np.where((array & 0x7FFF) > 0x7F80, 0x7FC0, array)
        words = array.view({2: np.uint16, 4: np.uint32}[array.itemsize])
        return np.where(np.isnan(array), 0, words + 1)

    return look
