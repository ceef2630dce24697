"""What saving and loading ask of an engine first, and what a load that fails half way leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ps_core._errors import InvalidInput
from ps_core.engine._checkpoint.manifest import SavedCheckpoint
from ps_core.engine._checkpoint.sections import EXTRA, Sections, TensorSource
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.hooks import hooks_of
from ps_core.engine._optim.optimizer import ChunkedOptimizer
from ps_core.engine._parameters.transitions import GradientPlace


def managed_pair(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Engine]:
    """The whole of a managed model, and its engine, if the optimizer is the one that was made with it."""
    management = hooks_of(model)
    engine, whole = management.engine, management._model()
    if whole is None:
        raise InvalidInput(
            f"only this {type(model).__name__} is left of the model that chunked(...) was given: keep it"
        )
    if optimizer is None and not any(record.trainable for record in engine.records):
        return whole, engine
    if not isinstance(optimizer, ChunkedOptimizer):
        found = "None" if optimizer is None else f"a {type(optimizer).__name__}"
        raise InvalidInput(f"expected the optimizer that chunked(...) returned with this model, found {found}")
    if optimizer._gradients is not engine:
        raise InvalidInput("this optimizer is another model's: pass the one that chunked(...) returned with this model")
    return whole, engine


def finish_pass_for(engine: Engine, what: str) -> None:
    """End the pass that is on; `InvalidInput` amid a step."""
    check_outside(what)
    engine.finish_pass()
    engine.check_writes()
    waiting = [record.name for record in engine.records if record.gradient is not GradientPlace.NONE]
    if waiting:
        raise InvalidInput(
            f"{len(waiting)} gradients (the first of {waiting[0]!r}) wait for a step, and cannot be {what}: call "
            "optimizer.step() first, or optimizer.zero_grad() to forget them"
        )


def check_outside(what: str) -> None:
    """`InvalidInput` inside a backward pass."""
    if torch._C._current_graph_task_id() != -1:
        raise InvalidInput(f"inside a backward pass nothing can be {what}: do it after backward() has returned")


@contextmanager
def loading_state(engine: Engine, what: str) -> Iterator[None]:
    """Values are being replaced; if that fails half way, nobody may use what is then a mixture."""
    engine.mark_half_loaded(what)
    engine.collected()
    yield
    engine.mark_half_loaded("")


def targets_of(saved: SavedCheckpoint, held: Sections) -> tuple[Sections, dict[str, torch.Tensor]]:
    """Where each section's tensors go: parameters to where their newest values are kept; and what belongs to nobody."""
    parameters = {**held["weights"], **held["masters"]}
    extra = {
        entry.name: torch.empty(entry.shape, dtype=entry.dtype)
        for file in saved.files
        if file.section == EXTRA
        for entry in file.entries
    }
    kept: dict[str, TensorSource] = dict(extra)
    return {**held, "weights": parameters, "masters": parameters, EXTRA: kept}, extra
