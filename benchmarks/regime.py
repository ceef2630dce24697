"""Refuse to time a model that does not train as models do: its arithmetic would be measured, not what runs it.

A head that shares a token table drawn from N(0, 1) makes logits that lie far apart. Their softmax has gradients below
the smallest normal number (*subnormal* ones), on which a CPU computes several times slower. Whatever an engine adds to
a step is then lost in a step that takes five times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STEPS = 4
"""The last one is searched for subnormal numbers: the first steps may have none yet."""
LOSS_TOLERANCE = 0.1
LARGEST_SHARE = 1e-3
SAMPLE = 1 << 16
"""Elements of each tensor that are looked at."""
WIDE = (torch.float32, torch.bfloat16)
"""In float16 a gradient may be subnormal; there a loss scale is to prevent that."""


class Subnormals(TorchDispatchMode):
    """Keep the largest share of subnormal numbers in any tensor that an operator computes with.

    Results are looked at when another operator reads them, and views not at all: new memory has no values yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0
        self.where = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = any(row.alias_info is not None and not row.alias_info.is_write for row in func._schema.returns)
        for each in () if views else tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and each.dtype in WIDE and each.numel():
                share = self._share_of(each)
                if share > self.share:
                    self.share, self.where = share, f"a tensor {tuple(each.shape)} that {func} reads"
        return result

    @staticmethod
    def _share_of(tensor: Tensor) -> float:
        some = tensor.reshape(-1)[:: -(-tensor.numel() // SAMPLE)].abs()
        return float(((some > 0) & (some < torch.finfo(some.dtype).tiny)).float().mean())


def check_first_loss(loss: float, classes: int) -> None:
    """End the program with one line unless an untrained model finds all ``classes`` about equally likely."""
    expected = math.log(classes)
    if not abs(loss - expected) <= LOSS_TOLERANCE * expected:
        raise SystemExit(
            f"not timed: the first loss is {loss:.2f}, but ln({classes}) = {expected:.2f} (within "
            f"{LOSS_TOLERANCE:.0%}) is expected before training; draw embeddings with a standard deviation of 0.02"
        )


def check_regime(model: nn.Module, loss_of: Callable[[], Tensor], classes: int) -> None:
    """Train ``model`` for a few steps on one batch; end the program with one line unless it trains as models do.

    ``loss_of`` computes the loss of that batch, a mean cross-entropy over ``classes``. Expected are a first loss near
    ln(classes), a smaller one after it, and no subnormal numbers in activations, gradients and optimizer states.
    """
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found, losses = Subnormals(), list[float]()
    for step in range(STEPS):
        with found if step == STEPS - 1 else nullcontext():
            loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    check_first_loss(losses[0], classes)
    if not min(losses[1:]) < losses[0]:  # the last step may overshoot
        raise SystemExit(
            f"not timed: {STEPS} steps on one batch must lower the loss, found {losses[0]:.2f} and then at least "
            f"{min(losses[1:]):.2f}"
        )
    if found.share > LARGEST_SHARE:
        raise SystemExit(
            f"not timed: {found.share:.0%} of {found.where} is subnormal after {STEPS} steps, on which a CPU computes "
            "several times slower; expected none: draw initial weights with a smaller standard deviation"
        )
