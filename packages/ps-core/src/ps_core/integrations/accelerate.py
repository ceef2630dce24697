"""Use Accelerate under a memory budget: `ChunkedAccelerator` replaces `Accelerator`, and the loop stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ps_core import Budget, InvalidInput, Options
from ps_core._options import check_unused
from ps_core.engine import ChunkedOptimizer, is_managed
from ps_core.integrations._missing import missing
from ps_core.integrations._torch_optimizers import ManagedSettings, check_connected, manage_with, values_on_rank_0

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise missing(error, "accelerate") from error

__all__ = ["ChunkedAccelerator"]

_HOW = "hand model and optimizer to one prepare(model, optimizer, ...)"
_PARTS = (
    "one, two = budget.split(1, 1), then prepare(first, its_optimizer, budget=one) and "
    "prepare(second, its_optimizer, budget=two)"
)
"""Code, for errors, that prepares two models with one accelerator."""


class ManagedAccelerator(Accelerator):
    """An `Accelerator` that does not wrap managed models: the engine shares them between processes."""

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model; neither move nor wrap one that is under management: the engine does what is needed."""
        if is_managed(model):
            device_placement, evaluation_mode = False, True  # only models that are evaluated are not wrapped
        return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer; raise `InvalidInput` if another number of processes shares its model."""
        if isinstance(optimizer, ChunkedOptimizer) and optimizer.processes != self.num_processes:
            raise InvalidInput(
                f"{self.num_processes} processes train this model, and chunked(...) shares it between "
                f"{optimizer.processes}: pass it collectives=ps_dist.connect() in a program that torchrun has started"
            )
        return super().prepare_optimizer(optimizer, device_placement)

    def backward(self, loss: Tensor, **named: Any) -> None:
        """Divide the loss by the number of processes, because the engine sums gradients; then call backward."""
        super().backward(loss if self.num_processes == 1 else loss / self.num_processes, **named)


class ChunkedAccelerator(ManagedAccelerator):
    """An `Accelerator` whose `prepare` puts the model under management, with the settings of the optimizer."""

    def __init__(
        self,
        *arguments: Any,
        budget: Budget | None = None,
        managed_device: str = "auto",
        precision: str = "bf16",
        options: Options | None = None,
        collectives: Any = None,
        **named: Any,
    ) -> None:
        """Make the accelerator; ``budget``, ``precision``, ``options`` and ``collectives`` are `chunked`'s, the rest
        `Accelerator`'s arguments.

        With ``collectives`` (``ps_dist.connect()``), the processes that torchrun started share the model.
        """
        super().__init__(*arguments, **named)
        if self.mixed_precision != "no":
            raise InvalidInput(
                f"mixed_precision={self.mixed_precision!r} does not go with a memory budget: leave it out; precision= "
                "says what is computed in"
            )
        check_connected(collectives, self.num_processes)
        self._settings = ManagedSettings(
            budget=budget or Budget(),
            device=managed_device,
            precision=precision,
            options=options or Options(),
            accumulation_steps=self.gradient_accumulation_steps,
            collectives=collectives,
        )

    def prepare(self, *given: Any, device_placement: list[bool] | None = None, budget: Budget | None = None) -> Any:
        """Manage the model among ``given``, and replace its optimizer; prepare all else as Accelerate does.

        ``budget``: this model's, where several are trained; None: the accelerator's. A model that is under management
        already is left as it is.
        """
        found = list(given)
        places = [index for index, each in enumerate(found) if _is_plain_model(each)]
        optimizers = [index for index, each in enumerate(found) if _is_plain_optimizer(each)]
        if not places and optimizers:  # a second time: `chunked` says what to do
            places = [index for index, each in enumerate(found) if isinstance(each, nn.Module) and is_managed(each)]
        if len(places) > 1 or len(places) != len(optimizers):
            raise _not_together("prepare", len(places), len(optimizers))
        for place, index in zip(places, optimizers, strict=True):
            optimizer = found[index]
            schedulers = [each for each in found if getattr(each, "optimizer", None) is optimizer]
            settings = self._settings_for(found[place], budget)
            found[index] = manage_with(found[place], optimizer, settings, self.device, schedulers)
            if settings.precision == "fp16":
                self.scaler = found[index].scaler
        placed: Sequence[bool | None] = device_placement or [None] * len(found)
        kept = [False if _is_ours(each) else told for each, told in zip(found, placed, strict=True)]
        return super().prepare(*found, device_placement=kept)

    def _settings_for(self, model: nn.Module, budget: Budget | None) -> ManagedSettings:
        """Return the settings for one of the models; raise `InvalidInput` if another one has its budget or scaler."""
        others = [each for each in self._models if is_managed(each) and each is not model]
        if others and self._settings.precision == "fp16":
            raise InvalidInput(
                f"precision='fp16' has a loss scale for each optimizer, and accelerator.backward(loss) knows only that "
                f"of {type(others[0]).__name__}: give this accelerator precision='bf16' or 'fp32', or release(model) "
                "the other one first"
            )
        settings = self._settings if budget is None else replace(self._settings, budget=budget)
        if not is_managed(model):
            try:
                check_unused(settings.budget, type(model).__name__)
            except InvalidInput as error:
                raise InvalidInput(f"{error}. For several models of one accelerator: {_PARTS}") from None
        return settings

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model that is under management; raise `InvalidInput` for another, which no budget would bound."""
        if _is_plain_model(model):
            raise _not_together("prepare_model", 1, 0)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer of `chunked`; raise `InvalidInput` for one of PyTorch, whose model is not known here."""
        if _is_plain_optimizer(optimizer):
            raise _not_together("prepare_optimizer", 0, 1)
        return super().prepare_optimizer(optimizer, device_placement)

    def save_state(self, *arguments: Any, **named: Any) -> str:
        """Save as Accelerate does; where several processes share a model, rank 0 alone holds all values."""
        with values_on_rank_0(self._models, every_process=self.project_configuration.save_on_each_node):
            return super().save_state(*arguments, **named)  # type: ignore[no-any-return]

    def save_model(self, model: nn.Module, *arguments: Any, **named: Any) -> None:
        """Save the weights as Accelerate does; where several processes share them, rank 0 alone holds all."""
        with values_on_rank_0([model], every_process=self.project_configuration.save_on_each_node):
            super().save_model(model, *arguments, **named)


def _not_together(by: str, models: int, optimizers: int) -> InvalidInput:
    if models == optimizers:
        return InvalidInput(f"{by} found {models} models with an optimizer each; call it once for each: {_PARTS}")
    return InvalidInput(
        f"{by} found {models} models and {optimizers} optimizers of torch.optim: {_HOW}; a model that is only "
        "evaluated goes through chunked(model, None) first"
    )


def _is_plain_model(value: Any) -> bool:
    """Return True for a module with parameters that are not under management; a loss function has none."""
    return isinstance(value, nn.Module) and not is_managed(value) and next(value.parameters(), None) is not None


def _is_plain_optimizer(value: Any) -> bool:
    prepared = getattr(value, "_is_accelerate_prepared", False)
    return isinstance(value, torch.optim.Optimizer) and not isinstance(value, ChunkedOptimizer) and not prepared


def _is_ours(value: Any) -> bool:
    """Return True for what the engine moves by itself."""
    return isinstance(value, ChunkedOptimizer) or (isinstance(value, nn.Module) and is_managed(value))
