"""What the engine must equal bit for bit: plain PyTorch, everything resident, one kernel call a tensor.

16-bit modes: the parameters are rounded copies of fp32 masters, and the masters start from the *unrounded* initial
values. Gradients arrive in the parameters' type, once a backward pass; a second pass before the step adds in fp32. The
global norm is the root of the tensors' sums of squares (each a single, in the order of the parameters) added in double;
a gradient that is not finite anywhere leaves everything as it was. A parameter without a gradient is not stepped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import ps_kernels
from ps_core import SGD, Adam, AdamW, Group, Options, TorchOptimizer
from ps_core._options import for_parameter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INITIAL_SCALE, GROWTH_INTERVAL, BACKOFF = 2.0**16, 2000, 0.5
CLIP_EPS = 1e-6
SEED, GROUP_BYTES = 11, 2048
Spec = Adam | AdamW | SGD | TorchOptimizer
NAMES = {"step": "steps", "exp_avg": "momentum", "momentum_buffer": "momentum", "exp_avg_sq": "variance"}
"""What is compared under another name than torch's."""


@dataclass
class State:
    """A trained parameter in fp32, flat, and what its optimizer keeps beside it."""

    name: str
    parameter: nn.Parameter
    master: Tensor
    momentum: Tensor
    variance: Tensor
    gradient: Tensor | None = None
    steps: int = 0
    torch: torch.optim.Optimizer | None = None
    """Of a `TorchOptimizer`: PyTorch's own, of the master alone."""

    def collect(self, parameter: Tensor) -> None:
        """Take over the gradient of one backward pass; called by autograd."""
        assert parameter.grad is not None
        found = parameter.grad.reshape(-1).float()
        if self.gradient is None:
            self.gradient = found.clone()
        else:
            self.gradient += found
        parameter.grad = None


class Resident(torch.optim.Optimizer):
    """Optimizer of a plain mixed-precision loop."""

    def __init__(self, states: list[State], spec: Spec, precision: str, max_grad_norm: float | None) -> None:
        self.max_grad_norm = max_grad_norm
        self.dynamic = precision == "fp16"
        self.loss_scale = INITIAL_SCALE if self.dynamic else 1.0
        self.good_steps = self.skipped = 0
        self.last_norm = math.nan
        self.states = states
        for each in states:
            each.parameter.register_post_accumulate_grad_hook(each.collect)
        super().__init__(_param_groups(states, spec), {})
        self._kind: type[Spec] = type(spec)
        self._spec = spec

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale."""
        return loss * self.loss_scale if self.dynamic else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for each in self.states:
            each.gradient = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Check, measure, clip and step."""
        assert closure is None
        with_gradient = [each for each in self.states if each.gradient is not None]
        finite, squares = True, 0.0
        for each in with_gradient:
            out = torch.zeros(2)
            ps_kernels.sumsq_finite(each.gradient, out)
            squares += float(out[0])
            finite = finite and not out[1]
        self.last_norm = math.sqrt(squares) / self.loss_scale
        if finite:
            factor = 1.0
            if self.max_grad_norm is not None:
                factor = min(1.0, self.max_grad_norm / (self.last_norm + CLIP_EPS))
            for each in with_gradient:
                self._step_one(each, factor / self.loss_scale)
        self._adjust_scale(finite)

    def _step_one(self, state: State, grad_scale: float) -> None:
        settings = next(group for group in self.param_groups if any(p is state.parameter for p in group["params"]))
        state.steps += 1
        if isinstance(self._spec, TorchOptimizer):
            self._step_by_torch(state, {key: value for key, value in settings.items() if key != "params"}, grad_scale)
            state.parameter.copy_(state.master.view(state.parameter.shape))
            return
        common = {"lr": settings["lr"], "weight_decay": settings["weight_decay"], "grad_scale": grad_scale}
        if self._kind is SGD:
            decay = settings["momentum"]
            ps_kernels.sgd_step(state.master, state.momentum, state.gradient, momentum_decay=decay, **common)
        else:
            (beta1, beta2), eps, decoupled = settings["betas"], settings["eps"], self._kind is AdamW
            numbers = {"step": state.steps, "beta1": beta1, "beta2": beta2, "eps": eps, "decoupled": decoupled}
            ps_kernels.adam_step(state.master, state.momentum, state.variance, state.gradient, **numbers, **common)
        state.parameter.copy_(state.master.view(state.parameter.shape))

    def _step_by_torch(self, state: State, settings: dict[str, Any], grad_scale: float) -> None:
        if state.torch is None:
            made: Any = _kind(self._spec, state)
            state.torch = made([state.master.view(state.parameter.shape)], **settings)
        assert state.gradient is not None
        group = state.torch.param_groups[0]
        group.update(settings)
        (whole,) = group["params"]
        whole.grad = (state.gradient * grad_scale).view(whole.shape)
        state.torch.step()
        whole.grad = None

    def _adjust_scale(self, finite: bool) -> None:
        self.skipped += not finite
        self.good_steps = self.good_steps + 1 if finite else 0
        if self.dynamic and not finite:
            self.loss_scale *= BACKOFF
        elif self.dynamic and self.good_steps == GROWTH_INTERVAL:
            self.loss_scale, self.good_steps = self.loss_scale * 2, 0

    def values(self) -> dict[str, Tensor]:
        """Every master, and the moments of every parameter that was stepped, by the parameter's name."""
        found: dict[str, Tensor] = {}
        for each in self.states:
            flat = {"master": each.master}
            if each.torch is not None:
                entry = next(iter(each.torch.state.values()), {})  # SGD without momentum keeps nothing
                found |= {f"{each.name}/{NAMES.get(key, key)}": value.clone() for key, value in entry.items()}
            elif isinstance(self._spec, TorchOptimizer):
                assert not each.steps
            elif each.steps and self._kind is not SGD:
                flat |= {"momentum": each.momentum, "variance": each.variance}
                found[f"{each.name}/steps"] = torch.tensor(float(each.steps))
            elif each.steps and any(group.get("momentum") for group in self.param_groups):
                flat["momentum"] = each.momentum
            found |= {f"{each.name}/{kind}": value.clone().view(each.parameter.shape) for kind, value in flat.items()}
        return found


def resident(
    model: nn.Module,
    spec: Spec | None,
    *,
    precision: str = "fp32",
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    options: Options | None = None,
) -> tuple[nn.Module, Resident | None]:
    """What ``chunked`` does, without chunks; how many passes go into a step changes no result."""
    assert accumulation_steps >= 1
    options = options or Options()
    states: list[State] = []
    for name, parameter in model.named_parameters():
        if spec is not None and parameter.requires_grad:
            master = parameter.detach().float().contiguous().view(-1).clone()
            states.append(State(name, parameter, master, torch.zeros_like(master), torch.zeros_like(master)))
        kept = any(fnmatch(name, pattern) for pattern in options.keep_fp32)
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if kept else DTYPES[precision])
    if options.cast_inputs and precision != "fp32":
        model.register_forward_pre_hook(_caster(DTYPES[precision]), with_kwargs=True)
    return model, None if spec is None else Resident(states, spec, precision, max_grad_norm)


def _caster(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, args), tree_map(cast, kwargs)

    return hook


def _param_groups(states: list[State], spec: Spec) -> list[dict[str, Any]]:
    """Parameters with the same settings together, in the order of their first one."""
    groups: list[dict[str, Any]] = []
    for each in states:
        values = _settings(spec, each)
        for group in groups:
            if {key: group[key] for key in values} == values:
                group["params"].append(each.parameter)
                break
        else:
            groups.append({"params": [each.parameter], **values})
    return groups


def _settings(spec: Spec, state: State) -> dict[str, Any]:
    if isinstance(spec, TorchOptimizer):
        group = _group(spec, state)
        return {**({} if group and group.kind else spec.settings), **(group.overrides if group else {})}
    chosen = for_parameter(spec, state.name, state.parameter)
    values = {"lr": chosen.lr, "weight_decay": chosen.weight_decay}
    if isinstance(chosen, SGD):
        return values | {"momentum": chosen.momentum}
    return values | {"betas": chosen.betas, "eps": chosen.eps}


def _group(spec: TorchOptimizer, state: State) -> Group | None:
    return next((each for each in spec.groups if each.match(state.name, state.parameter)), None)


def _kind(spec: TorchOptimizer, state: State) -> type:
    group = _group(spec, state)
    return spec.kind if group is None or group.kind is None else group.kind


class Make(Protocol):
    """Puts a model under management, or makes it the plain loop's."""

    def __call__(self, model: nn.Module, spec: Spec | None) -> tuple[nn.Module, Any]: ...


Loop = Callable[[Make], list[Tensor]]
"""Builds and trains; what it returns must be the same whoever makes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What both sides are told."""

    precision: str = "fp32"
    max_grad_norm: float | None = 1.0
    accumulation_steps: int = 1
    options: Options = field(default_factory=lambda: Options(poison=True, group_bytes=GROUP_BYTES))

    def as_arguments(self) -> dict[str, Any]:
        """For ``chunked``."""
        names = ("precision", "max_grad_norm", "accumulation_steps", "options")
        return {name: getattr(self, name) for name in names}


@dataclass
class Result:
    """What a loop logged, what it left, and (under management) what it cost."""

    logs: list[Tensor]
    values: dict[str, Tensor]
    statistics: list[Any] = field(default_factory=list)

    @property
    def evictions(self) -> int:
        """Of all models together."""
        return sum(each.evictions for each in self.statistics)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """torch's fused encoder rounds differently, and torch itself never takes it with parameters of a subclass."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def plain(loop: Loop, settings: Settings) -> Result:
    """Everything resident."""
    made: list[tuple[nn.Module, Any]] = []

    def make(model: nn.Module, spec: Spec | None) -> tuple[nn.Module, Any]:
        made.append(resident(model, spec, **settings.as_arguments()))
        return made[-1]

    torch.manual_seed(SEED)
    with _without_fast_path():
        logs = loop(make)
    values: dict[str, Tensor] = {}
    for index, (model, optimizer) in enumerate(made):
        found = dict(model.state_dict()) | (optimizer.values() if optimizer is not None else {})
        values |= {f"{index}:{name}": value.detach().clone() for name, value in found.items()}
    return Result(logs, values)


def differences(expected: Result, got: Result) -> list[str]:
    """Everything that is not the same to the bit, in words."""
    wrong = [] if len(expected.logs) == len(got.logs) else [f"{len(expected.logs)} logs, got {len(got.logs)}"]
    pairs = {f"log {index}": pair for index, pair in enumerate(zip(expected.logs, got.logs, strict=False))}
    for name in sorted(expected.values.keys() ^ got.values.keys()):
        wrong.append(f"{name} is only {'expected' if name in expected.values else 'found'}")
    pairs |= {name: (value, got.values[name]) for name, value in expected.values.items() if name in got.values}
    for name, (one, other) in pairs.items():
        if one.dtype != other.dtype or one.shape != other.shape:
            wrong.append(f"{name}: {one.dtype} {tuple(one.shape)}, got {other.dtype} {tuple(other.shape)}")
        elif not torch.equal(one, other):
            apart = (one.double() - other.double()).abs()
            wrong.append(f"{name}: {int((apart != 0).sum())} of {apart.numel()} differ, by up to {apart.max():.3g}")
    return wrong
