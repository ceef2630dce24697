"""One of two computers trains a tiny model until the other cannot be reached any more."""

import os
import sys
import time

import torch
from torch import nn

import ps_dist
from ps_core import AdamW, RanksDiverged
from ps_core.engine import chunked

TIMEOUT_S = 20.0

torch.set_num_threads(1)
together = ps_dist.connect(timeout_s=TIMEOUT_S)
torch.manual_seed(0)
model, optimizer = chunked(nn.Linear(16, 16), AdamW(lr=1e-2), precision="fp32", collectives=together)
data = torch.Generator().manual_seed(together.rank)
print(f"process {os.getpid()}", flush=True)
before, step = time.monotonic(), 0
try:
    while True:
        inputs = torch.randn(4, 16, generator=data)
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        before, step = time.monotonic(), step + 1
        if step == 3:
            print("trained", flush=True)
except RanksDiverged:
    sys.stdout.write(f"seconds {time.monotonic() - before}\n")
    raise
