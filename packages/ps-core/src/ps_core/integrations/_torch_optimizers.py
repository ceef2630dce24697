"""Put a model under management with the settings of a ``torch.optim`` optimizer that was made for it.

Trainers of other libraries make their optimizer and schedulers themselves, from their own options. An integration takes
over what they made: the numbers of each param group, and the schedulers.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ps_core import SGD, Adam, AdamW, Budget, Group, InvalidInput, Options, Precision, TorchOptimizer
from ps_core._options import check_unused
from ps_core.engine import ChunkedOptimizer, chunked, is_managed, rank0_only, release

_SPECS: dict[type, Any] = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam, torch.optim.SGD: SGD}
_NUMBERS = {
    torch.optim.AdamW: ("lr", "betas", "eps", "weight_decay"),
    torch.optim.Adam: ("lr", "betas", "eps", "weight_decay"),
    torch.optim.SGD: ("lr", "momentum", "weight_decay"),
}
_BEFORE_TRAINING: weakref.WeakKeyDictionary[nn.Module, Budget] = weakref.WeakKeyDictionary()
"""Models that are managed for evaluations and may be trained later, each with a budget that nothing else uses."""
_VARIANTS = ("amsgrad", "maximize", "nesterov", "dampening")
"""Settings that the engine's own AdamW, Adam and SGD lack; with them PyTorch's code steps."""


@dataclass(frozen=True, kw_only=True)
class ManagedSettings:
    """The arguments of `chunked` besides the model and its optimizer."""

    budget: Budget = field(default_factory=Budget)
    device: str = "auto"
    """The device, as for `chunked`; ``"auto"``: see `device_for`."""
    precision: str = "bf16"
    options: Options = field(default_factory=Options)
    accumulation_steps: int = 1
    collectives: Any = None
    """The result of ``ps_dist.connect()``; None: one process trains the model. (Any: `check_connected` checks it.)"""

    def device_for(self, inputs: torch.device) -> str:
        """Return the device to manage the model on, where ``inputs`` is the device of the library's batches."""
        if self.device != "auto":
            return self.device
        if inputs.type == "cuda":
            return str(inputs)
        return "cpu" if self.budget.device is None else "emulated"


def check_connected(collectives: Any, processes: int) -> None:
    """Raise `InvalidInput` unless what ``ps_dist.connect()`` returned joins as many processes as the library has."""
    if collectives is None and processes > 1:
        raise InvalidInput(
            f"{processes} processes run this program, and each would train a model of its own: pass "
            "collectives=ps_dist.connect()"
        )
    if collectives is not None and not hasattr(collectives, "processes"):
        raise InvalidInput(f"collectives: expected what ps_dist.connect() returned, found {collectives!r}")
    if collectives is not None and collectives.processes != processes:
        raise InvalidInput(
            f"the library runs {processes} processes, but ps_dist.connect() joined {collectives.processes}: start the "
            "program by torchrun, call connect() first, and give Lightning's Trainer devices= and num_nodes= alike"
        )


@contextmanager
def values_on_rank_0(models: Iterable[nn.Module], *, every_process: bool = False) -> Iterator[None]:
    """Keep values of the models' state dicts on rank 0 alone; ``every_process``: keep them on all processes."""
    with ExitStack() as stack:
        for each in models:
            if is_managed(each) and not every_process:
                stack.enter_context(rank0_only(each))
        yield


def manage(
    model: nn.Module,
    optimizer: Adam | AdamW | SGD | TorchOptimizer | None,
    settings: ManagedSettings,
    inputs: torch.device,
) -> ChunkedOptimizer | None:
    """Call `chunked` with these settings; return the optimizer, or None for a model that is only evaluated."""
    return chunked(
        model,
        optimizer,
        device=settings.device_for(inputs),
        budget=settings.budget,
        precision=settings.precision,
        accumulation_steps=settings.accumulation_steps,
        options=settings.options,
        collectives=settings.collectives,
    )[1]


def manage_before_training(model: nn.Module, settings: ManagedSettings, inputs: torch.device) -> None:
    """Manage a model for evaluations, so that `end_evaluation` can return its parameters as they came.

    In 16 bits the fp32 masters of an optimizer without other states keep them; that optimizer never steps.
    """
    narrow = settings.precision != Precision.FP32 and any(each.requires_grad for each in model.parameters())
    keeps = TorchOptimizer(torch.optim.SGD, lr=0.0) if narrow else None
    own = replace(settings, budget=replace(settings.budget))
    alone = replace(own, options=replace(settings.options, step="after_backward"))
    manage(model, keeps, alone if narrow else own, inputs)
    _BEFORE_TRAINING[model] = own.budget


def end_evaluation(model: nn.Module) -> None:
    """Return a model to plain PyTorch, as it came, if `manage_before_training` manages it still."""
    budget = _BEFORE_TRAINING.pop(model, None)
    if budget is None:
        return
    try:
        check_unused(budget, type(model).__name__)
    except InvalidInput:  # its management lasts; otherwise the user has ended it, and may have begun another
        release(model, in_first_types=True)


def manage_with(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: ManagedSettings,
    inputs: torch.device,
    schedulers: Iterable[Any] = (),
) -> ChunkedOptimizer:
    """Manage ``model``, and return the optimizer that replaces ``optimizer``, for ``schedulers`` as well.

    ``optimizer`` must not have stepped. (Any: schedulers have no common base in PyTorch.)
    """
    schedulers = list(schedulers)
    if not schedulers and any("initial_lr" in group for group in optimizer.param_groups):
        raise InvalidInput(
            f"a scheduler was made for this {type(optimizer).__name__}, which is replaced, but is not handed over with "
            "it: give both in one call (accelerator.prepare(model, optimizer, scheduler)), or return it from "
            "configure_optimizers"
        )
    managed = manage(model, _spec_of(model, optimizer), settings, inputs)
    assert managed is not None, "an optimizer was asked for"
    listed = {id(each) for group in optimizer.param_groups for each in group["params"]}
    managed._leave_out(each for each in model.parameters() if id(each) not in listed)
    # It sets no rate, but has PyTorch note the optimizer's steps for other schedulers' warnings.
    torch.optim.lr_scheduler.LambdaLR(managed, lambda _: 1.0)
    for own, given in zip(managed.param_groups, optimizer.param_groups, strict=True):
        del own["initial_lr"]
        own.update({key: value for key, value in given.items() if key not in own or key == "lr"})
    for scheduler in schedulers:
        _hand_over(scheduler, optimizer, managed)
    return managed


def _spec_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return the engine's optimizer with the same numbers for the same parameters; raise `InvalidInput` if there is
    none.
    """
    kind = type(optimizer)
    if any(float(entry.get("step", 1)) for entry in optimizer.state.values()):  # Adagrad makes entries at once
        raise InvalidInput(
            f"this {kind.__name__} has stepped already, and its states would be lost: hand over a new one, and load "
            "its state_dict() into the optimizer that replaces it"
        )
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise InvalidInput(f"param_groups[{index}]['differentiable'] is True: no gradient passes through a step")
    _check_parameters(model, optimizer)
    if kind not in _SPECS or any(group.get(name) for group in optimizer.param_groups for name in _VARIANTS):
        return _as_it_is(optimizer)
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
    if len(decoupled) > 1:
        raise InvalidInput("decoupled_weight_decay differs between param_groups; the engine has one for all of them")
    if decoupled == {True}:
        kind = torch.optim.AdamW  # Adam with decoupled_weight_decay is AdamW
    numbers = [_numbers(kind, group) for group in optimizer.param_groups]
    groups = tuple(
        Group(match=_Members(group["params"]), **own)
        for group, own in zip(optimizer.param_groups[1:], numbers[1:], strict=True)
    )
    return _SPECS[kind](**numbers[0], groups=groups)


def _as_it_is(optimizer: torch.optim.Optimizer) -> TorchOptimizer:
    """Return the optimizer's class with the settings of its param groups."""
    known = inspect.signature(type(optimizer)).parameters
    rows = [
        {key: value for key, value in group.items() if key in known and key != "params"}
        for group in optimizer.param_groups
    ]
    groups = tuple(
        Group(match=_Members(group["params"]), settings=row)
        for group, row in zip(optimizer.param_groups[1:], rows[1:], strict=True)
    )
    return TorchOptimizer(type(optimizer), **rows[0], groups=groups)


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `InvalidInput` unless the optimizer has exactly the parameters that are to be trained."""
    wanted = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    given = {id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
    if left := [name for key, name in wanted.items() if key not in given]:
        raise InvalidInput(
            f"{left[0]!r} requires a gradient, but the optimizer does not have it ({len(left)} such parameters): add "
            "it to the optimizer, or set requires_grad_(False)"
        )
    if len(given) > len(wanted):
        raise InvalidInput(
            f"the optimizer has {len(given) - len(wanted)} parameters that {type(model).__name__} does not have: make "
            "it for model.parameters()"
        )


def _numbers(kind: type, group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a param group as numbers; a rate may be a tensor."""
    found = {name: group[name] for name in _NUMBERS[kind]}
    return {name: tuple(map(float, each)) if name == "betas" else float(each) for name, each in found.items()}


class _Members:
    """Match the parameters of one param group."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._ids = {id(parameter) for parameter in parameters}

    def __call__(self, name: str, parameter: Any) -> bool:
        return id(parameter) in self._ids


def _hand_over(scheduler: Any, optimizer: torch.optim.Optimizer, managed: ChunkedOptimizer) -> None:
    """Replace the optimizer of a scheduler, and of those within it, by the managed one."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _hand_over(inner, optimizer, managed)
    if getattr(scheduler, "optimizer", None) is optimizer:
        scheduler.optimizer = managed
