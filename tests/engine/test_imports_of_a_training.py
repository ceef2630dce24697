"""Train on the CPU without importing PyTorch's compiler, which takes a second and 70 MB in each process."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAINING = """
import sys
import torch
from ps_core import AdamW, Budget, Group
from ps_core.engine import chunked, release

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
groups = (Group(match=lambda name, parameter: name.endswith("bias"), weight_decay=0.0),)
model[2].weight.requires_grad_(False)
told = {{"device": "cpu", "budget": Budget(host="1MiB"), "precision": "{precision}"}}
model, optimizer = chunked(model, AdamW(groups=groups), **told)
model[2].weight.requires_grad_(True)
optimizer.add_param_group({{"params": [model[2].weight], "lr": 1e-2}})
for _ in range(2):
    model(torch.ones(2, 4)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
release(model)
print([len(group["params"]) for group in optimizer.param_groups], "torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_compiler_where_nothing_moves(precision: str) -> None:
    """Only a first pass on fake tensors needs the compiler. One process on the CPU makes none."""
    program = TRAINING.format(precision=precision)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[1, 2, 1] False"
