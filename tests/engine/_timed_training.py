"""What is trained beside a clock: a small language model, with an H200's rates in proportion to a small batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from _models import VOCABULARY, Language
from ps_core._simulate.machine import MACHINES

ROWS, LENGTH = 4, 8
_SMALLER = ROWS * LENGTH / 8192
_H200 = MACHINES["h200"]
MACHINE = replace(
    _H200,
    name="small",
    matmul_flops=_H200.matmul_flops * _SMALLER,
    matmul_flops_fp32=_H200.matmul_flops_fp32 * _SMALLER,
    latency_s=1e-9,
    moment_overhead_s=2e-9,
    launch_s=0.0,
    tensor_overhead_s=0.0,
)
"""Computing, copies and steps are in proportion as they are on an H200 with a batch of 8 x 1,024."""


class Learner(Language):
    """Returns its loss, so that the first pass is foreseen, operator by operator."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(super().forward(tokens).float().flatten(0, 1), tokens.flatten())


def tokens(index: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(index))
