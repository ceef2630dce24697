"""A model may be freed at any instant, so also while code of the user's, or a fake pass, has modes of PyTorch on."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import _models as models
from _cases import finish, rows, square
from _runs import HOST
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._tracing.fake_copy import FakeTensors


class NoFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called under a mode of the user's")


class NoOperator(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran under a mode of the user's")


def fakes() -> AbstractContextManager[Any]:
    both = ExitStack()
    mode = both.enter_context(FakeTensorMode())
    both.enter_context(FakeTensors(mode))
    return both


@pytest.mark.parametrize("mode", [NoFunction, NoOperator, torch.inference_mode, fakes, lambda: torch.device("meta")])
@pytest.mark.parametrize("step", ["after_backward", "speculative"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_model_is_freed_under_a_mode(
    device: str, step: Any, mode: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector calls the finalizer within the mode; the finalizer frees the memory outside of it."""
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: failed.append(each.exc_value))
    torch.manual_seed(0)
    budget = Budget(host=HOST) if device == "cpu" else Budget(device="256KiB", host=HOST)
    options = Options(group_bytes=4096, step=step)
    model, optimizer = chunked(models.stack(), AdamW(lr=1e-3), device=device, budget=budget, options=options)
    for seed in range(4):
        square(model, *rows(seed)).backward()
        finish(optimizer)
    square(model, *rows(4)).backward()
    store = hooks_of(model).engine.store
    model.itself = [model]  # a cycle, which only the garbage collector ends
    gc.disable()
    try:
        with mode():
            del model
            gc.collect()
    finally:
        gc.enable()
    assert not failed
    assert not store.arena._memory.numel()
    assert optimizer is not None
