"""One of two computers trains a tiny model until the other cannot be reached any more."""

import os

import torch
from torch import nn

import ps_dist
from ps_core import AdamW
from ps_core.engine import chunked

torch.set_num_threads(1)
together = ps_dist.connect(timeout_s=20)
torch.manual_seed(0)
model, optimizer = chunked(nn.Linear(16, 16), AdamW(lr=1e-2), precision="fp32", collectives=together)
data = torch.Generator().manual_seed(together.rank)
print(f"process {os.getpid()}", flush=True)
step = 0
while True:
    inputs = torch.randn(4, 16, generator=data)
    (model(inputs) - inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 3:
        print("trained", flush=True)
