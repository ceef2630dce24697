"""Save and load a training run, exact to the bit; see docs/checkpoints.md."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ps_core._errors import InvalidInput
from ps_core.engine._checkpoint.atomic_folder import AtomicFolder
from ps_core.engine._checkpoint.checkpoint_tensors import EXTRA, TensorSource, extra_states
from ps_core.engine._checkpoint.completeness import OWN_STATES
from ps_core.engine._checkpoint.json_values import encode
from ps_core.engine._checkpoint.manifest import read_manifest
from ps_core.engine._checkpoint.preconditions import (
    all_contents,
    as_state_dict,
    check,
    check_outside,
    finish_pass_for,
    loading_state,
    managed_pair,
    parameters_of,
    readable_values,
    targets_of,
)
from ps_core.engine._checkpoint.rank_errors import CheckpointRanks
from ps_core.engine._checkpoint.reader import Reader, stored
from ps_core.engine._checkpoint.rng_state import restore_random_state
from ps_core.engine._checkpoint.writer import agree, plan_save, save
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._optim.optimizer import ChunkedOptimizer
from ps_core.engine._support.log import log_line


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ChunkedOptimizer | None,
    *,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write all that training needs to go on, and ``extra``, into a new folder; call this between two steps.

    The folder appears when everything is on the disk. With ``overwrite`` it replaces the checkpoint that is there. A
    process that is killed, at any time, leaves either the old checkpoint or the new one. Where several processes share
    the model, all call this with equal arguments, and each writes its shards.
    """
    hooks = hooks_of(model)
    ranks = CheckpointRanks(hooks.engine.together)
    with ranks.all_or_none("save_checkpoint"):
        if not isinstance(extra, Mapping | None):
            raise InvalidInput(f"extra must be a dictionary, or None; found a {type(extra).__name__}")
        folder = AtomicFolder(path)
        model, engine = managed_pair(model, optimizer)
        engine.check_usable()
        check_outside("saved")
    finish_pass_for(engine, "saved")
    hooks.manage_changes()
    with ranks.all_or_none("save_checkpoint"):
        sections = all_contents(model, engine, optimizer)
        manifest, sections[EXTRA] = _manifest(model, engine, optimizer, dict(extra or {}))
    if ranks.several:
        agree(ranks, manifest, sections[EXTRA], overwrite=overwrite)
    engine.updater.compare()
    save(folder, engine, plan_save(ranks, engine, manifest, sections), overwrite=overwrite)


def _manifest(
    model: nn.Module, engine: Engine, optimizer: ChunkedOptimizer | None, extra: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, TensorSource]]:
    """Return the manifest, and the tensors that it refers to by number."""
    kept: dict[str, TensorSource] = {}

    def keep(tensor: torch.Tensor) -> str:
        name = str(len(kept))
        kept[name] = tensor.detach()
        return name

    manifest: dict[str, Any] = {
        "parameters": parameters_of(engine),
        "optimizer": None,
        "modules": encode("a module's extra state", extra_states(model), keep),
        "extra": encode("extra", extra, keep),
    }
    if optimizer is not None:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        scaler, trained = engine.loss_scale, [record for record in engine.records if record.trainable]
        manifest["optimizer"] = {
            "name": optimizer.rule.name,
            "groups": encode("param_groups", groups, keep),
            "steps": {record.name: record.steps for record in trained},
            "loss_scale": None if scaler is None else scaler.state_dict(),
        }
        if optimizer.rule.name not in OWN_STATES:
            manifest["optimizer"]["states"] = list(optimizer.rule.states)
            manifest["optimizer"]["scalars"] = {record.name: dict(record.scalars) for record in trained}
    return manifest, kept


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: ChunkedOptimizer | None
) -> dict[str, Any]:
    """Restore the model, optimizer and random numbers as `save_checkpoint` wrote them; return its ``extra``.

    Budget, device, group size and the number of processes may differ. For a model without an optimizer, only weights
    and buffers are loaded.
    """
    hooks = hooks_of(model)
    ranks = CheckpointRanks(hooks.engine.together)
    with ranks.all_or_none("load_checkpoint"):
        model, engine = managed_pair(model, optimizer)
        engine.check_usable(loading=True)
        check_outside("loaded")
        folder = AtomicFolder(path)
        if ranks.leads:
            folder.recover()
    hooks.manage_changes()
    with ranks.all_or_none("load_checkpoint"):
        saved = read_manifest(folder.path, files_too=ranks.leads)
    ranks.agree("the checkpoint that is loaded", f"{saved.path.name} ({saved.fingerprint})")
    with ranks.all_or_none("load_checkpoint"):
        sections = all_contents(model, engine, optimizer)
        check(saved, model, engine, optimizer, sections)
        random = None if optimizer is None else saved.random_of(ranks.rank)
    targets, extra_tensors = targets_of(saved, sections)
    engine.stepping.end()
    engine.discard_gradients()
    engine.finish_pass()
    find = extra_tensors.__getitem__
    with loading_state(engine, f"load_checkpoint({str(saved.path)!r}, ...)"):
        Reader(engine, ranks).read(stored(saved, targets, ranks.rank))
        with ranks.all_or_none("load_checkpoint"):
            if optimizer is not None:
                _restore(engine, optimizer, readable_values(saved, "optimizer", find))
            modules = dict(model.named_modules())
            for name, state in readable_values(saved, "modules", find).items():
                modules[name].set_extra_state(state)
            if random is not None:
                restore_random_state(random)
    if optimizer is not None and (count := ranks.size) != saved.ranks and ranks.leads:
        log_line(
            f"{saved.path} was saved by {saved.ranks} processes, and {count} load it: rank i goes on with the "
            f"random numbers of rank i modulo {saved.ranks}"
        )
    extra: dict[str, Any] = readable_values(saved, "extra", find)
    return extra


def _restore(engine: Engine, optimizer: ChunkedOptimizer, state: dict[str, Any]) -> None:
    """Restore settings, loss scale, step counts and scalars; masters and states have been read already."""
    engine.masters.forget()  # the checkpoint has them all
    for record in engine.records:
        record.set_progress(0)  # or the optimizer would clear states that it finds no entry for
    optimizer.load_state_dict(as_state_dict(state))
    for record in engine.records:
        scalars = state.get("scalars", {}).get(record.name, {})
        record.set_progress(state["steps"].get(record.name, 0), tuple(scalars.items()))  # a frozen one has none
