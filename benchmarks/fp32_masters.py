"""Step a 16-bit model as the engine does, in plain PyTorch: AdamW on fp32 copies of the parameters."""

from __future__ import annotations

import torch
from torch import nn


class MasterAdamW:
    """Fused AdamW on fp32 masters of a model in bf16, in place of an optimizer of the model's own parameters."""

    def __init__(self, model: nn.Module, lr: float = 1e-3) -> None:
        self._model = list(model.parameters())
        self._masters = [p.detach().float().requires_grad_() for p in self._model]
        self._inner = torch.optim.AdamW(self._masters, lr=lr, fused=True)

    def step(self) -> None:
        for parameter, master in zip(self._model, self._masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        self._inner.step()
        with torch.no_grad():
            torch._foreach_copy_(self._model, self._masters)

    def zero_grad(self) -> None:
        self._inner.zero_grad()
