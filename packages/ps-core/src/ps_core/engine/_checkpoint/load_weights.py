"""``load_weights``: published weights, or a checkpoint's, into a model under management, file by file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ps_core._errors import CheckpointMismatch, InvalidInput
from ps_core._program import Kind
from ps_core.engine._checkpoint.atomic_folder import AtomicFolder
from ps_core.engine._checkpoint.crc32 import Checksum
from ps_core.engine._checkpoint.manifest import is_checkpoint, read_manifest
from ps_core.engine._checkpoint.preconditions import check_outside, finish_pass_for, loading_state
from ps_core.engine._checkpoint.ranks import CheckpointRanks
from ps_core.engine._checkpoint.reader import Reader, SavedFile, stored, version_of
from ps_core.engine._checkpoint.safetensors_format import damaged, keeps_values, no_key_twice, read_table
from ps_core.engine._checkpoint.sections import BUFFERS, MASTERS, WEIGHTS, TensorSource
from ps_core.engine._checkpoint.tied_weights import owner, settle_ties
from ps_core.engine._execution.hooks import hooks_of
from ps_core.engine._parameters.managed_parameter import ManagedParameter

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
SHOWN = 8


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Read safetensors into a managed model's chunks: a file, a folder as on the Hugging Face hub, or a checkpoint.

    fp32 masters start from what the file holds, unrounded; what is computed with follows from them. Optimizer states
    stay as they are. Gives the names that are missing in the files, and those of the files that the model does not
    have; with ``strict`` such names raise `CheckpointMismatch`, before anything is changed.
    """
    engine = hooks_of(model).engine
    ranks = CheckpointRanks(engine.together)
    with ranks.all_or_none("load_weights"):
        engine.check_usable(loading=engine.half_loaded.startswith("load_weights("))
        check_outside("loaded")
        path = Path(path).absolute()
        if ranks.leads and not path.is_file() and not is_checkpoint(path):
            AtomicFolder(path).recover()  # it may be a checkpoint whose overwriting was cut short
    finish_pass_for(engine, "loaded")
    with ranks.all_or_none("load_weights"):
        found, known = list(_files(path)), _targets(model)
        targets = _matched(found, known, getattr(model, "base_model_prefix", ""))
        present = {owner(held) for held in targets.values() if held is not None}
        missing = list(
            {owner(held): name for name, held in reversed(known.items()) if owner(held) not in present}.values()
        )
        unexpected = [name for name, held in targets.items() if held is None]
        names = (missing, unexpected) if strict else ([], [])
        _check(path, found, targets, *names)
    ranks.agree("the weights that are loaded", f"{path.name} ({_print(found)})")
    with ranks.all_or_none("load_weights"):
        settle_ties(path, found, targets, ranks, strict=strict)
    with loading_state(engine, f"load_weights(model, {str(path)!r})"):
        Reader(engine, ranks).read([replace(file, targets=targets) for file in found])
    for entry in (entry for file in found for entry in file.entries):
        held = targets[entry.owner]
        if isinstance(held, tuple):
            engine.masters.replaced(held[0], entry.dtype)
    engine.masters.weights_loaded()
    return missing, unexpected


def _matched(
    files: Iterable[SavedFile], known: Mapping[str, TensorSource], prefix: str
) -> dict[str, TensorSource | None]:
    """What each name of the files means in the model."""
    return {entry.owner: _find(entry.owner, known, prefix) for file in files for entry in file.entries}


def _print(files: Iterable[SavedFile]) -> str:
    """What tells these files from others, but for the values in them."""
    whole = Checksum()
    for file in files:
        whole.update(f"{file.path.name} {file.start} {file.entries} {file.checksum}".encode())
    return whole.text


# What there is to load.


def _files(path: Path) -> Iterator[SavedFile]:
    if path.is_file():
        yield from _indexed(path) if path.name.endswith(".index.json") else _single(path)
        return
    if is_checkpoint(path):
        yield from stored(read_manifest(path), {section: {} for section in (MASTERS, WEIGHTS, BUFFERS)}, 0)
        return
    if (path / INDEX).is_file():
        yield from _indexed(path / INDEX)
        return
    several = sorted(path.glob("*.safetensors"))
    chosen = [path / WHOLE] if path / WHOLE in several else several
    if len(chosen) != 1:
        found = ", ".join(each.name for each in several) or "none"
        raise InvalidInput(
            f"{path}: expected a safetensors file, or a folder with {WHOLE}, {INDEX} or a checkpoint in it; "
            f"safetensors files found: {found}. Name one of them; pickled weights (.bin, .pt) are not read: save them "
            "anew as safetensors"
        )
    yield from _single(chosen[0])


def _single(path: Path) -> Iterator[SavedFile]:
    version = version_of(path)
    start, entries = read_table(path)
    yield SavedFile(path, start, tuple(entries), {}, version=version)


def _indexed(path: Path) -> Iterator[SavedFile]:
    try:
        places: dict[str, str] = dict(json.loads(path.read_bytes(), object_pairs_hook=no_key_twice)["weight_map"])
        names = dict.fromkeys(places.values())
        paths = [path.parent / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"it is not an index of a model's files ({error})") from None
    files = [file for each in paths for file in _single(each)]
    present: dict[str, Path] = {}
    for file in files:
        for entry in file.entries:
            if entry.name in present:
                raise damaged(file.path, f"it has {entry.name!r}, and so has {present[entry.name]}: keep one of them")
            present[entry.name] = file.path
    for name, place in places.items():
        if name not in present:
            raise damaged(path.parent / place, f"it has no {name!r}, which {path.name} says it has")
    yield from files


# What is known of the model.


def _targets(model: nn.Module) -> dict[str, TensorSource]:
    """Where each name of ``state_dict`` has its newest values; tied ones by all their names."""
    found: dict[str, TensorSource] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            full = f"{prefix}.{name}" if prefix else name
            if isinstance(tensor, ManagedParameter):
                record = tensor._record
                found[full] = (record, Kind.P32 if record.trainable else record.group.weight)
            else:
                found[full] = tensor
    return found


def _find(name: str, known: Mapping[str, TensorSource], prefix: str) -> TensorSource | None:
    """What a name of the files means here: Hugging Face's have, or lack, the prefix of the model without its head."""
    for each in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if each in known:
            return known[each]
    return None


def _check(
    path: Path,
    files: Iterable[SavedFile],
    targets: Mapping[str, TensorSource | None],
    missing: Iterable[str],
    unexpected: Iterable[str],
) -> None:
    """`CheckpointMismatch` if there is something that cannot be, or may not."""
    wrong = [f"{name!r}: in the model, not in the files" for name in missing]
    wrong += [f"{name!r}: in the files, not in the model" for name in unexpected]
    for file, entry in ((each, entry) for each in files for entry in each.entries):
        held = targets[entry.owner]
        if held is None:
            continue
        shape, dtype = (held.shape, held.dtype) if isinstance(held, torch.Tensor) else (held[0].shape, held[0].dtype)
        if tuple(shape) != file.shape_of(entry):
            wrong.append(f"{entry.owner!r}: shape {file.shape_of(entry)} in the files, {tuple(shape)} in the model")
        elif not keeps_values(entry.dtype, dtype):
            wrong.append(f"{entry.name!r}: {entry.dtype} in the files, {dtype} in the model")
    if not wrong:
        return
    shown = wrong[:SHOWN] + ([f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else [])
    raise CheckpointMismatch(
        "\n  ".join(
            [
                f"{path} has not the weights of this model:",
                *shown,
                "try: the configuration that the files were made with; or strict=False, if names may differ",
            ]
        )
    )
