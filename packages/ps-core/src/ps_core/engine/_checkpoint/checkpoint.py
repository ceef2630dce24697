"""``save_checkpoint`` and ``load_checkpoint``: a training run on disk, exact to the bit; see docs/checkpoints.md."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ps_core._errors import InvalidInput
from ps_core.engine._checkpoint.access import changing, check_outside, load_files, managed_pair, settle, targets_of
from ps_core.engine._checkpoint.compare import check, parameters_of
from ps_core.engine._checkpoint.contents import (
    EXTRA,
    Chunks,
    Held,
    contents,
    entries,
    extra_states,
    largest_chunk_bytes,
)
from ps_core.engine._checkpoint.direct import Buffers, buffers
from ps_core.engine._checkpoint.files import Sink
from ps_core.engine._checkpoint.folder import Folder
from ps_core.engine._checkpoint.manifest import File, cut, read_manifest, write_manifest
from ps_core.engine._checkpoint.random import random_state, restore_random_state
from ps_core.engine._checkpoint.values import decode, encode
from ps_core.engine._engine import Engine
from ps_core.engine._optimizer import ChunkedOptimizer

FILE_BYTES = 4 * 2**30
"""Of tensors, in one file; a larger tensor has a file to itself."""


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ChunkedOptimizer | None,
    *,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write all that training needs to go on, and ``extra``, into a new folder, between two steps.

    The folder appears when everything is on the disk. With ``overwrite`` it takes the place of the checkpoint that is
    there; a process killed at whatever instant leaves that one or the new one.
    """
    model, engine = managed_pair(model, optimizer)
    engine.check_usable()
    if engine.together is not None:
        raise InvalidInput(
            "save_checkpoint of a model shared by several processes: save model.state_dict() and "
            "optimizer.state_dict(masters=True), taken on every rank, from rank 0"
        )
    settle(engine, "saved")
    held = contents(model, engine, optimizer)
    manifest, held[EXTRA] = _manifest(model, engine, optimizer, dict(extra or {}))
    files = [file for name, section in held.items() for file in cut(name, entries(section), FILE_BYTES) if section]
    with Folder(path).replaced(overwrite=overwrite) as folder:
        with buffers(largest_chunk_bytes(engine)) as pair, Chunks(engine, write=False) as chunks:
            sums = {file.name: _write(folder, file, held[file.section], chunks, pair) for file in files}
        write_manifest(folder, manifest, files, sums)


def _manifest(
    model: nn.Module, engine: Engine, optimizer: ChunkedOptimizer | None, extra: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Held]]:
    """What is not a tensor of the model's or the optimizer's; and the tensors among that."""
    kept: dict[str, Held] = {}

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
        scaler = engine.loss_scale
        manifest["optimizer"] = {
            "name": optimizer._name,
            "groups": encode("param_groups", groups, keep),
            "steps": {record.name: record.steps for record in engine.records if record.trainable},
            "loss_scale": None if scaler is None else scaler.state_dict(),
        }
        manifest["random"] = encode("the state of random numbers", random_state(), keep)
    return manifest, kept


def _write(folder: Path, file: File, section: Mapping[str, Held], chunks: Chunks, pair: Buffers) -> str:
    with closing(Sink(folder / file.name, file.entries, pair)) as sink:
        for entry in file.entries:
            sink.put(chunks.tensor(section[entry.name]))
        return sink.finish()


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: ChunkedOptimizer | None
) -> dict[str, Any]:
    """Go on where `save_checkpoint` was called: model, optimizer and random numbers are as they were; gives ``extra``.

    Budget, device and group size may be others. For a model without an optimizer, only weights and buffers are taken.
    """
    model, engine = managed_pair(model, optimizer)
    engine.check_usable(loading=True)
    check_outside("loaded")
    folder = Folder(path)
    folder.recover()
    saved = read_manifest(folder.path)
    held = contents(model, engine, optimizer)
    check(saved, model, engine, optimizer, held)
    targets, extra_tensors = targets_of(saved, held)
    engine.discard_gradients()
    engine.finish_pass()
    with changing(engine, f"load_checkpoint({str(saved.path)!r}, ...)"):
        load_files(saved, targets, engine)
        find = extra_tensors.__getitem__
        if optimizer is not None:
            _restore(engine, optimizer, decode(saved.manifest["optimizer"], find))
        modules = dict(model.named_modules())
        for name, state in decode(saved.manifest["modules"], find).items():
            modules[name].set_extra_state(state)
        if optimizer is not None:
            restore_random_state(decode(saved.manifest["random"], find))
    extra: dict[str, Any] = decode(saved.manifest["extra"], find)
    return extra


def _restore(engine: Engine, optimizer: ChunkedOptimizer, state: dict[str, Any]) -> None:
    """Settings, loss scale and counts of steps; masters and moments are there already."""
    for record in engine.records:
        record.steps = 0  # or the optimizer would clear moments that it finds no state for
    groups, index = [], 0
    for group in state["groups"]:
        count = len(group["param_names"])
        groups.append({**group, "params": list(range(index, index + count))})
        index += count
    whole = {"state": {}, "param_groups": groups}
    if state["loss_scale"] is not None:
        whole["loss_scale"] = state["loss_scale"]
    optimizer.load_state_dict(whole)
    for record in engine.records:
        record.steps = state["steps"].get(record.name, 0)
