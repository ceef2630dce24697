"""Processes that train together and leave together; all but the first, which keeps the store, are late to ask it.

The first prints when it has left, the others when they asked.
"""

import time

import torch

import ps_dist
from ps_core import SGD
from ps_core.engine import chunked

together = ps_dist.connect(timeout_s=120)
torch.manual_seed(0)
model, optimizer = chunked(torch.nn.Linear(8, 8), SGD(lr=0.1), precision="fp32", collectives=together)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
watchdog = together._watchdog
publish = watchdog._publish
asked: list[float] = []


def publish_late(*, left: bool = False) -> None:
    """Tell the others, late as on a busy computer."""
    time.sleep(0.5 * together.mesh.rank)
    publish(left=left)
    asked.append(time.monotonic())


watchdog._publish = publish_late  # type: ignore[method-assign]
together.close()
print(asked[-1] if together.mesh.rank else time.monotonic(), flush=True)
