"""Use Lightning under a memory budget: ``Trainer(strategy=ChunkedStrategy(budget=...))``.

Several processes take `ChunkedParallelStrategy`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ps_core import Budget, InvalidInput, Options
from ps_core.engine import ChunkedOptimizer, is_managed
from ps_core.integrations._missing import missing
from ps_core.integrations._torch_optimizers import (
    ManagedSettings,
    check_connected,
    end_evaluation,
    manage,
    manage_before_training,
    manage_with,
    values_on_rank_0,
)

try:
    from lightning.fabric.utilities.device_dtype_mixin import _update_properties
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ModuleNotFoundError as error:
    raise missing(error, "lightning") from error

__all__ = ["ChunkedParallelStrategy", "ChunkedPrecision", "ChunkedStrategy"]


class ChunkedPrecision(Precision):
    """Run the closure before the step; divide the loss by the number of processes, and scale it in fp16."""

    def __init__(self, strategy: _ManagedStrategy) -> None:
        self._strategy = strategy

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Divide the loss, scale it if the precision is fp16, and then do as Lightning does."""
        managed = self._strategy.managed_optimizer
        if self._strategy.processes > 1:
            tensor = tensor / self._strategy.processes  # gradients are summed, and Lightning's are averages
        return super().pre_backward(tensor if managed is None else managed.scale(tensor), module)  # type: ignore[no-any-return]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **named: Any) -> Any:
        """Run the closure and Lightning's hooks, then step; return what the closure returned."""
        result = closure()
        self._after_closure(model, optimizer)
        optimizer.step(**named)
        return result


class _ManagedStrategy(Strategy):
    """Base of the two strategies: manage the model, and step by the engine's optimizer."""

    optimizers: list[Any]
    _settings: ManagedSettings
    managed_optimizer: ChunkedOptimizer | None = None
    """The optimizer of the model under management; None before ``fit``."""

    @property
    def processes(self) -> int:
        """Return how many processes train the model."""
        return 1 if self._settings.collectives is None else self._settings.collectives.processes

    @property
    def precision_plugin(self) -> Any:
        """Return the plugin that steps by the engine's optimizer; Lightning sets it once, as ``Trainer`` was told."""
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and type(plugin) is not Precision:
            raise InvalidInput(
                f"Trainer(precision={plugin.precision!r}) does not go with a memory budget: leave it out; "
                f"{type(self).__name__}(precision=...) says what is computed in"
            )
        self._precision_plugin = None if plugin is None else ChunkedPrecision(self)

    @property
    def managed_module(self) -> nn.Module:
        """Return the module that is, or will be, under management."""
        root: nn.Module = self.lightning_module
        children = [each for each in root.children() if next(each.parameters(), None) is not None]
        alone = len(children) == 1 and not list(root.parameters(recurse=False))
        return children[0] if alone else root

    def setup(self, trainer: Any) -> None:
        """Make optimizer and schedulers as the `LightningModule` says, and put the model under management."""
        self.accelerator.setup(trainer)
        model = self.managed_module
        if trainer.state.fn == "fit":
            end_evaluation(model)
            self.setup_optimizers(trainer)
            if len(self.optimizers) != 1:
                raise InvalidInput(
                    f"configure_optimizers returned {len(self.optimizers)} optimizers; under a memory budget a model "
                    "has one: return one, with a param group for each"
                )
            schedulers = [each.scheduler for each in self.lr_scheduler_configs]
            settings = replace(self._settings, accumulation_steps=trainer.accumulate_grad_batches)
            self.managed_optimizer = manage_with(model, self.optimizers[0], settings, self.root_device, schedulers)
            self.optimizers = [self.managed_optimizer]
        elif not is_managed(model):
            if is_overridden("configure_optimizers", self.lightning_module):
                manage_before_training(model, self._settings, self.root_device)
            else:
                manage(model, None, self._settings, self.root_device)
        self.model_to_device()
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move metrics and buffers that are not under management to the device of the batches."""
        root: nn.Module = self.lightning_module
        _update_properties(root, device=self.root_device)  # what `LightningModule.device` says
        for child in root.children():
            if not is_managed(child):
                child.to(self.root_device)
        for name, buffer in root.named_buffers(recurse=False):
            setattr(root, name, buffer.to(self.root_device))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state, and leave its placement to the engine."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """End the run, and leave the model under management."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class ChunkedStrategy(_ManagedStrategy, SingleDeviceStrategy):
    """Train in one process, with the model within a budget.

    The only child of the `LightningModule` with parameters is managed: a call of it is a whole pass. If parameters are
    in several places, the `LightningModule` itself is managed. The model stays under management after ``fit``: call
    ``release(module)`` when training is over.
    """

    strategy_name = "chunked"

    def __init__(
        self,
        *,
        budget: Budget | None = None,
        precision: str = "bf16",
        managed_device: str = "auto",
        options: Options | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        """Make the strategy; ``device``: of the batches; None: the current CUDA device if there is one, else the
        CPU.
        """
        where = device or ("cuda" if torch.cuda.is_available() and managed_device in ("auto", "cuda") else "cpu")
        super().__init__(device=torch.device(where))
        self._settings = ManagedSettings(
            budget=budget or Budget(), precision=precision, device=managed_device, options=options or Options()
        )

    def setup_environment(self) -> None:
        """Begin a run; raise `InvalidInput` if torchrun has started several processes."""
        if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise InvalidInput(
                f"{processes} processes run this program, and ChunkedStrategy would train a model in each: use "
                "ChunkedParallelStrategy(ps_dist.connect(), ...), without device=, and Trainer(devices=...)"
            )
        super().setup_environment()


class ChunkedParallelStrategy(_ManagedStrategy, DDPStrategy):
    """Share a model between the processes that torchrun started; see also `ChunkedStrategy`.

    Gradients are averages over the processes, as `DDPStrategy` has them.
    """

    strategy_name = "chunked_parallel"

    def __init__(
        self,
        collectives: Any,
        *,
        budget: Budget | None = None,
        precision: str = "bf16",
        managed_device: str = "auto",
        options: Options | None = None,
    ) -> None:
        """Make the strategy; ``collectives`` is what ``ps_dist.connect()`` returned.

        ``Trainer(devices=...)`` must be the number of processes of a node.
        """
        super().__init__()
        self._settings = ManagedSettings(
            budget=budget or Budget(),
            precision=precision,
            device=managed_device,
            options=options or Options(),
            collectives=collectives,
        )

    def setup_environment(self) -> None:
        """Find this process's rank; raise `InvalidInput` if Lightning runs another number of processes."""
        check_connected(self._settings.collectives, self.num_nodes * self.num_processes)
        super().setup_environment()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state dict; values are on rank 0, which writes checkpoints."""
        with values_on_rank_0([self.managed_module]):
            return super().lightning_module_state_dict()  # type: ignore[no-any-return]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state dict; values are on rank 0, which writes checkpoints."""
        with values_on_rank_0([self.managed_module]):
            return super().optimizer_state(optimizer)  # type: ignore[no-any-return]

    def teardown(self) -> None:
        """End the run, and leave the model under management."""
        super().teardown()
        self.cluster_environment.teardown()
