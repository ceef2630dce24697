"""Check before saving and loading that no step is open, and that the checkpoint fits model and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ps_core._errors import CheckpointMismatch, InvalidInput
from ps_core.engine._checkpoint.atomic_folder import MANIFEST
from ps_core.engine._checkpoint.checkpoint_tensors import (
    BUFFERS,
    EXTRA,
    Sections,
    TensorSource,
    contents,
    entries,
    extra_states,
)
from ps_core.engine._checkpoint.completeness import states_of
from ps_core.engine._checkpoint.dense_memory import not_writable
from ps_core.engine._checkpoint.json_values import decode
from ps_core.engine._checkpoint.manifest import SavedCheckpoint
from ps_core.engine._checkpoint.safetensors_format import damaged, type_name
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._gradients.loss_scale import LossScale
from ps_core.engine._optim.optimizer import ChunkedOptimizer
from ps_core.engine._optim.optimizer_state_dict import LOSS_SCALE
from ps_core.engine._parameters.state_transitions import GradientPlace


def managed_pair(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Engine]:
    """Return a managed model and its engine; raise `InvalidInput` if the optimizer was not made with it."""
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


def all_contents(model: nn.Module, engine: Engine, optimizer: ChunkedOptimizer | None) -> Sections:
    """Return every tensor by section; the optimizer's groups then have all parameters that are trained."""
    if optimizer is not None:
        optimizer.complete_groups()
        optimizer.name_groups()
    return contents(model, engine, optimizer)


def finish_pass_for(engine: Engine, what: str) -> None:
    """End the current pass; raise `InvalidInput` if gradients wait for a step. ``what``: saved or loaded, for the
    error.
    """
    check_outside(what)
    engine.finish_pass()
    engine.check_writes()
    engine.stepping.check_saved(what)
    if any(record.gradient is not GradientPlace.NONE for record in engine.records):  # the same on all ranks
        engine.updater.before_gradient(engine.records)  # forgets sums to which no rank gave anything
    waiting = [record.name for record in engine.records if record.gradient is not GradientPlace.NONE]
    if waiting:
        raise InvalidInput(
            f"{len(waiting)} gradients (the first of {waiting[0]!r}) wait for a step, and cannot be {what}: call "
            "optimizer.step() first, or optimizer.zero_grad() to forget them"
        )


def check_outside(what: str) -> None:
    """Raise `InvalidInput` inside a backward pass. ``what``: saved or loaded, for the error."""
    if torch._C._current_graph_task_id() != -1:
        raise InvalidInput(f"inside a backward pass nothing can be {what}: do it after backward() has returned")


@contextmanager
def loading_state(engine: Engine, what: str) -> Iterator[None]:
    """Mark the model as half loaded within the block; after an error it stays so and may not be used."""
    with engine.usability.loading(what):
        engine.state_dicts.forget()
        yield
    engine.usability.mark_half_loaded("")  # also what failed before: all values are replaced


def targets_of(saved: SavedCheckpoint, sections: Sections) -> tuple[Sections, dict[str, torch.Tensor]]:
    """Return the destination of each section's tensors, and new tensors for those of ``extra``."""
    parameters = {**sections["weights"], **sections["masters"]}
    extra = {
        entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for file in saved.files
        if file.section == EXTRA
        for entry in file.entries
    }
    kept: dict[str, TensorSource] = dict(extra)
    return {**sections, "weights": parameters, "masters": parameters, EXTRA: kept}, extra


_FROZEN_HERE = "trained in the checkpoint, frozen in the model: call requires_grad_(True) on it before you load"
_TRAINED_HERE = (
    "frozen in the checkpoint, trained in the model: freeze it before chunked(...), and unfreeze it after you load"
)
SHOWN = 8
"""Differences that a message lists; the rest is counted."""


def parameters_of(engine: Engine) -> dict[str, Any]:
    """Return the manifest's rows for the parameters."""
    return {
        record.name: {
            "shape": list(record.shape),
            "dtype": type_name(record.name, record.dtype),
            "trainable": record.trainable,
        }
        for record in engine.records
    }


def check(
    saved: SavedCheckpoint, model: nn.Module, engine: Engine, optimizer: ChunkedOptimizer | None, sections: Sections
) -> None:
    """Raise `CheckpointMismatch` unless training can go on from the checkpoint; without an optimizer, unless weights
    fit.
    """
    training, theirs = optimizer is not None, saved.manifest["optimizer"]
    found = [] if optimizer is None else list(_of_optimizer(theirs, optimizer))
    found += [*_of_parameters(saved, engine, training=training and theirs is not None)]
    found += [*_of_the_rest(saved, model, sections)]
    if optimizer is not None and not found:
        found += [*_of_numbers(readable_values(saved, "optimizer", _zero), optimizer, engine)]
    if not found:
        return
    shown = [f"  {line}" for line in found[:SHOWN]]
    if len(found) > SHOWN:
        shown.append(f"  and {len(found) - SHOWN} differences more")
    raise CheckpointMismatch(
        "\n".join(
            [
                f"{saved.path} is of something else:",
                *shown,
                "  try: build the model, and call chunked(...), as when it was saved; or take over the weights only:",
                f"  load_weights(model, {str(saved.path)!r})",
            ]
        )
    )


def readable_values(saved: SavedCheckpoint, key: str, find: Callable[[str], torch.Tensor]) -> Any:
    """Decode the manifest's value of a key (any: see `json_values`); raise `CheckpointDamaged` if that fails."""
    try:
        return decode(saved.manifest[key], find)
    except (TypeError, ValueError) as error:
        raise damaged(saved.path / MANIFEST, f"its {key!r} cannot be read ({error})") from None


def as_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's optimizer settings in ``state_dict``'s format, without states."""
    groups, index = [], 0
    for group in state["groups"]:
        count = len(group["param_names"])
        groups.append({**group, "params": list(range(index, index + count))})
        index += count
    scale = {} if state["loss_scale"] is None else {LOSS_SCALE: state["loss_scale"]}
    return {"state": {}, "param_groups": groups, **scale}


def _of_parameters(saved: SavedCheckpoint, engine: Engine, *, training: bool) -> Iterator[str]:
    own, theirs = parameters_of(engine), saved.manifest["parameters"]
    yield from _names("parameter", theirs, own)
    for name, row in own.items():
        for key in ("shape", "dtype") if training else ("shape",):
            if name in theirs and theirs[name][key] != row[key]:
                yield f"{name!r}: {key} {theirs[name][key]} in the checkpoint, {row[key]} in the model"
        if training and name in theirs and theirs[name]["trainable"] is not row["trainable"]:
            yield f"{name!r}: {_FROZEN_HERE if theirs[name]['trainable'] else _TRAINED_HERE}"


def _of_the_rest(saved: SavedCheckpoint, model: nn.Module, sections: Sections) -> Iterator[str]:
    buffers = {entry.name: entry for file in saved.files if file.section == BUFFERS for entry in file.entries}
    mine = {entry.name: entry for entry in entries(sections[BUFFERS])}
    yield from _names("buffer", buffers, mine)
    for name, other in mine.items():
        one = buffers.get(name, other)
        if one != other:
            yield f"{name!r}: {one.dtype} {one.shape} in the checkpoint, {other.dtype} {other.shape} in the model"
        target = sections[BUFFERS][name]
        if isinstance(target, torch.Tensor) and (why := not_writable(target)):
            yield f"{name!r}: in the model it is {why}"
    yield from _names("state of module", saved.manifest["modules"], extra_states(model))


def _of_optimizer(theirs: Mapping[str, Any] | None, optimizer: ChunkedOptimizer) -> Iterator[str]:
    if theirs is None:
        yield "the optimizer: none in the checkpoint, so there are no masters and states to go on from"
        return
    if theirs["name"] != optimizer.rule.name:
        yield f"the optimizer: {theirs['name']} in the checkpoint, {optimizer.rule.name} here"
    elif (kept := states_of(theirs)) != tuple(optimizer.rule.states):
        yield f"the optimizer's states: {', '.join(kept)} in the checkpoint, {', '.join(optimizer.rule.states)} here"
    rule = optimizer.rule
    known = [set(rule.scalar_names(index)) for index in range(len(rule.groups))]
    for name, row in theirs.get("scalars", {}).items():
        if theirs["steps"][name] and row.keys() not in known:
            yield f"{name!r}: the optimizer's {', '.join(row)} in the checkpoint, {', '.join(*known[:1])} here"
    members = [[group["param_names"] for group in groups] for groups in (theirs["groups"], optimizer.param_groups)]
    if len(members[0]) != len(members[1]):
        yield f"the optimizer's groups: {len(members[0])} in the checkpoint, {len(members[1])} here"
        return
    saved, now = ({name: i for i, names in enumerate(each) for name in names} for each in members)
    for name, place in saved.items():
        if now.get(name, place) != place:
            yield f"{name!r}: in param_groups[{place}] in the checkpoint, in param_groups[{now[name]}] here"


def _of_numbers(theirs: Mapping[str, Any], optimizer: ChunkedOptimizer, engine: Engine) -> Iterator[str]:
    """Yield settings of the groups and of the loss scale that cannot be loaded."""
    try:
        optimizer._match_groups(as_state_dict(theirs)["param_groups"])
    except (LookupError, TypeError, ValueError) as error:
        yield f"the optimizer's groups: {error}"
    if (theirs["loss_scale"] is None) != (engine.loss_scale is None):
        yield f"the loss scale: {theirs['loss_scale']} in the checkpoint, {engine.loss_scale} here"
    elif theirs["loss_scale"] is not None:
        try:
            LossScale().load_state_dict(theirs["loss_scale"])
        except InvalidInput as error:
            yield str(error)


def _zero(_: str) -> torch.Tensor:
    """Stand in for a number that is kept as a tensor, which has not been read yet."""
    return torch.zeros((), dtype=torch.float32, device="cpu")


def _names(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    for name in saved:
        if name not in own:
            yield f"{what} {name!r}: in the checkpoint, not in the model"
    for name in own:
        if name not in saved:
            yield f"{what} {name!r}: in the model, not in the checkpoint"
