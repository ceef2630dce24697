"""A small engine in memory, for what stands in front of one: every gradient and state a plain fp32 tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

import ps_kernels
from ps_core._extents import Kind
from ps_core.engine._gradients.loss_scale import LossScale
from ps_core.engine._gradients.managed_grad import ManagedGrad
from ps_core.engine._optim.group_step import clip_factor
from ps_core.engine._optim.kernel_rule import Settings, StepRule
from ps_core.engine._optim.optimizer import ChunkedOptimizer
from ps_core.engine._optim.rules import rule_of
from ps_core.engine._optim.settings import Outcome


class FakeParameter(nn.Parameter):
    """Gives its gradient as the engine's parameters do."""

    engine: FakeEngine
    record: FakeRecord

    @property
    def grad(self) -> torch.Tensor | None:
        if not self.engine.has_gradient(self.record):
            return None
        return ManagedGrad(self.record, self.engine, self.engine.loss_scale)

    @grad.setter
    def grad(self, value: None) -> None:
        assert value is None
        self.engine.discard_gradients([self.record])


@dataclass(eq=False)
class FakeRecord:
    name: str
    parameter: nn.Parameter
    steps: int = 0
    scalars: tuple[tuple[str, float], ...] = ()
    gradient: torch.Tensor | None = None
    factor: float = 1.0
    assigned: bool = False
    states: dict[Kind, torch.Tensor] = field(default_factory=dict)

    def set_progress(self, steps: int, scalars: tuple[tuple[str, float], ...] = ()) -> None:
        self.steps, self.scalars = steps, scalars

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def trainable(self) -> bool:
        return self.parameter.requires_grad


class FakeEngine:
    processes = 1

    def __init__(self, model: nn.Module, loss_scale: LossScale | None = None) -> None:
        self.loss_scale = loss_scale
        self.records = [FakeRecord(name, parameter) for name, parameter in model.named_parameters()]
        for record in self.records:
            record.parameter.__class__ = FakeParameter
            record.parameter.engine, record.parameter.record = self, record
            if record.trainable:
                record.parameter.register_post_accumulate_grad_hook(self._take)
            for kind, value in ((Kind.P32, record.parameter.detach().float()), (Kind.M, None), (Kind.V, None)):
                record.states[kind] = torch.zeros(record.shape) if value is None else value.clone()
        self.steps: list[tuple[dict[str, Settings], float | None, float]] = []

    def optimizer(self, spec: object, max_grad_norm: float | None = None) -> ChunkedOptimizer:
        return ChunkedOptimizer(
            self, self.records, rule_of(spec), loss_scale=self.loss_scale, max_grad_norm=max_grad_norm
        )

    def _take(self, parameter: FakeParameter) -> None:
        """What backward left, out of PyTorch's sight."""
        record, raw = parameter.record, torch.Tensor.grad.__get__(parameter).float()
        record.gradient = raw if record.gradient is None else record.gradient + raw
        torch.Tensor.grad.__set__(parameter, None)

    def put(self, grads: Iterable[torch.Tensor | None]) -> None:
        """As backward would, the loss scale included."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        for record, grad in zip(self.records, grads, strict=True):
            record.gradient, record.factor = None if grad is None else grad * scale, 1.0

    def check_usable(self) -> None:
        """It always is."""

    def has_gradients(self) -> bool:
        return any(record.gradient is not None for record in self.records)

    def has_gradient(self, record: FakeRecord) -> bool:
        return record.gradient is not None

    def gradient_norm(self, record: FakeRecord) -> float:
        return math.sqrt(float(record.gradient.double().square().sum())) * record.factor

    def scale_gradient(self, record: FakeRecord, factor: float) -> None:
        record.factor *= factor

    def read_gradient(self, record: FakeRecord) -> torch.Tensor:
        return record.gradient * record.factor

    def write_gradient(self, record: FakeRecord, value: torch.Tensor) -> None:
        record.gradient, record.factor = value.float().clone(), 1.0

    def discard_gradients(self, records: Iterable[FakeRecord] | None = None) -> None:
        for record in self.records if records is None else records:
            record.gradient, record.factor = None, 1.0

    def step(self, settings: Callable[[FakeRecord], Settings], max_norm: float | None, loss_scale: float) -> Outcome:
        live = [record for record in self.records if record.gradient is not None]
        norm = math.sqrt(math.fsum(self.gradient_norm(record) ** 2 for record in live)) / loss_scale
        self.steps.append(({record.name: settings(record) for record in live}, max_norm, loss_scale))
        if not math.isfinite(norm):
            return Outcome(norm=norm, skipped=True)
        for record in live:
            factor = clip_factor(norm, max_norm) * record.factor / loss_scale
            record.steps += 1
            self._update(record, settings(record), factor)
            with torch.no_grad():
                record.parameter.copy_(record.states[Kind.P32])
        return Outcome(norm=norm, skipped=False)

    def _update(self, record: FakeRecord, numbers: Settings, factor: float) -> None:
        param, first, second = (record.states[kind].flatten() for kind in (Kind.P32, Kind.M, Kind.V))
        shared = {"lr": numbers.lr, "weight_decay": numbers.weight_decay, "grad_scale": factor}
        grad = record.gradient.flatten()
        if numbers.kind is StepRule.SGD:
            ps_kernels.sgd_step(param, first, grad, momentum_decay=numbers.momentum, **shared)
        else:
            betas = {"beta1": numbers.betas[0], "beta2": numbers.betas[1], "eps": numbers.eps}
            ps_kernels.adam_step(
                param, first, second, grad, step=record.steps, decoupled=numbers.decoupled, **betas, **shared
            )
        for kind, flat in ((Kind.P32, param), (Kind.M, first), (Kind.V, second)):
            record.states[kind] = flat.view(record.shape)

    def state_dict_value(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def read_state(self, record: FakeRecord, kind: Kind) -> torch.Tensor:
        return record.states[kind].clone()

    def loading(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def write_state(self, record: FakeRecord, kind: Kind, value: torch.Tensor) -> None:
        record.states[kind] = value.clone()
        if kind is Kind.P32:
            with torch.no_grad():
                record.parameter.copy_(value)

    def load_master(self, record: FakeRecord, value: torch.Tensor) -> None:
        self.write_state(record, Kind.P32, value)

    def states_loaded(self) -> None:
        """Nothing of it is kept."""


def model(seed: int = 0) -> nn.Sequential:
    """Four parameters, two of them matrices."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 5))


def gradients(of: nn.Module, seed: int, size: float = 1.0) -> list[torch.Tensor]:
    """One for each parameter."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(each.shape, generator=rng) * size for each in of.parameters()]
