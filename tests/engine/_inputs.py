"""What the cases of refused inputs share: their table, and small models."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import nn

from _followed import Followed
from _refusals import X, net, train
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, is_managed, release

TABLE = Followed()
case, row = TABLE.case, TABLE.row
ADAMW = AdamW()
IN_BACKWARD = Options(step="in_backward", group_bytes=64)


def made(model: nn.Module | None = None, optimizer: Any = ADAMW, **more: Any) -> Any:
    """A managed model and its optimizer, on an emulated accelerator."""
    where = {"device": "emulated", "budget": Budget(device="64KiB", host="1MiB"), "precision": "fp32"}
    return chunked(net() if model is None else model, optimizer, **{**where, **more})


def works(model: nn.Module | None = None, optimizer: Any = ADAMW, **more: Any) -> None:
    """Manage a model and train it."""
    goes_on(*made(model, optimizer, **more))


def goes_on(model: nn.Module, optimizer: Any) -> None:
    """Make a step, and let go of the model."""
    try:
        train(model, optimizer)
    finally:
        if is_managed(model):
            release(model)


def backward(model: nn.Module) -> None:
    model(X).float().square().sum().backward()


def folder() -> Path:
    """A new folder, which the test's fixture has put below its own."""
    return Path(mkdtemp())


def zeros(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
