"""A training run with everything in it that a checkpoint must bring back."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

from _cases import finish
from _fake_cuda import FakeRuntime
from _models import VOCABULARY, WIDTH, Residual
from _reference import GROUP_BYTES
from _runs import HOST, let_go, stand_in
from checked_device.device import CheckedDevice
from ps_core import AdamW, Budget, Group, Options
from ps_core._options import Optimizer
from ps_core.engine import chunked
from ps_core.engine._devices.cuda.device import CudaDevice

DISK = {"disk": "64MiB", "disk_dir": tempfile.gettempdir()}
TIERS: dict[str, tuple[Callable[[], Any], Budget]] = {
    "cpu": (lambda: "cpu", Budget(host=HOST)),
    "emulated": (stand_in, Budget(device=112 * 2**10, host=HOST)),
    "cpu, disk": (partial(CheckedDevice, name="cpu", check=True, seed=3), Budget(host=150_000, **DISK)),
    "emulated, disk": (stand_in, Budget(device=130_000, host=80_000, **DISK)),
    "cuda": (lambda: CudaDevice(FakeRuntime(1)), Budget(device=130_000, host=HOST)),
}
"""Every list of tiers; the device is tight, so that groups come and go, and the host above a disk."""
SPEC = AdamW(lr=1e-2, weight_decay=0.1, groups=(Group(match=lambda name, _: name.endswith("bias"), lr=2e-2),))


class Net(nn.Module):
    """Tied weights, a frozen block, buffers that training changes, one that no state dict has, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("places", torch.arange(8), persistent=False)
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = functional.dropout(block(x), 0.1, self.training)
        logits = self.head(self.norm(x.flatten(0, 1).float()).to(x.dtype))
        return functional.cross_entropy(logits.float(), tokens.flatten())


@dataclass
class Run:
    """A model, its optimizer, and a loop that draws from every generator there is."""

    tiers: str
    precision: str = "bf16"
    spec: Optimizer | None = SPEC
    group_bytes: int = GROUP_BYTES
    seed: int = 1
    build: Callable[[], nn.Module] = Net
    told: dict[str, Any] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)
    model: nn.Module = field(init=False)
    optimizer: Any = field(init=False)
    scheduler: Any = field(init=False)

    def __enter__(self) -> Run:
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        numpy.random.seed(self.seed)
        make, budget = TIERS[self.tiers]
        device = make()
        if isinstance(device, CudaDevice):
            self.stack.enter_context(device._runtime)
        self.model, self.optimizer = chunked(
            self.build(),
            self.spec,
            device=device,
            budget=replace(budget),  # one of its own
            precision=self.precision,
            max_grad_norm=1.0,
            options=Options(poison=True, group_bytes=self.group_bytes, keep_fp32=("norm.*", "inner.norm.*")),
            **self.told,
        )
        self.scheduler = None if self.optimizer is None else CosineAnnealingLR(self.optimizer, 20)
        return self

    def __exit__(self, *_: object) -> None:
        let_go(self.model)
        self.stack.close()

    def batch(self) -> Tensor:
        first, last = random.randrange(VOCABULARY), int(numpy.random.randint(VOCABULARY))
        inner = torch.randint(VOCABULARY, (4, 6))
        return torch.cat([torch.full((4, 1), first), inner, torch.full((4, 1), last)], 1)

    def train(self, steps: int) -> list[Tensor]:
        losses = []
        for _ in range(steps):
            loss = self.model(self.batch())
            self.optimizer.scale(loss).backward()
            finish(self.optimizer)
            self.scheduler.step()
            losses.append(loss.detach())
        return losses

    def values(self) -> dict[str, Any]:
        """Everything, by name."""
        found: dict[str, Any] = {f"model {name}": value for name, value in self.model.state_dict().items()}
        if self.optimizer is not None:
            state = self.optimizer.state_dict(masters=True)
            found |= {f"{name} {key}": each for key, row in state["state"].items() for name, each in row.items()}
            found |= {"groups": state["param_groups"], "scale": state.get("loss_scale")}
        return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name
