"""Define ``load_weights``: read published weights, or a checkpoint's, into a managed model, file by file."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ps_core._errors import CheckpointMismatch, InvalidInput
from ps_core._extents import Kind
from ps_core._input_files import stays_inside
from ps_core.engine._checkpoint.atomic_folder import AtomicFolder, checked_path, is_checkpoint, name_checkpoint_below
from ps_core.engine._checkpoint.checkpoint_tensors import BUFFERS, MASTERS, WEIGHTS, TensorSource
from ps_core.engine._checkpoint.crc32 import Checksum
from ps_core.engine._checkpoint.dense_memory import not_writable
from ps_core.engine._checkpoint.manifest import read_manifest
from ps_core.engine._checkpoint.preconditions import check_outside, finish_pass_for, loading_state
from ps_core.engine._checkpoint.rank_errors import CheckpointRanks
from ps_core.engine._checkpoint.reader import Reader, SavedFile, read_full_tensor, stored, version_of
from ps_core.engine._checkpoint.safetensors_format import damaged, keeps_values, no_key_twice, read_table
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._parameters.managed_parameter import ManagedParameter

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
SHOWN = 8


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Read safetensors into a managed model: a file, a folder as on the Hugging Face hub, or a checkpoint.

    fp32 masters start from the file's values, unrounded; the weights follow from the masters. Optimizer states stay as
    they are. Return two lists: names that the files lack, and names in the files that the model lacks. With ``strict``
    such names raise `CheckpointMismatch`, before anything is changed.
    """
    hooks = hooks_of(model)
    engine = hooks.engine
    ranks = CheckpointRanks(engine.together)
    with ranks.all_or_none("load_weights"):
        engine.check_usable(loading=engine.usability.half_loaded.startswith("load_weights("))
        check_outside("loaded")
        path = checked_path(path)
        if ranks.leads and not path.is_file() and not is_checkpoint(path):
            AtomicFolder(path).recover()  # it may be a checkpoint whose overwriting was cut short
    finish_pass_for(engine, "loaded")
    hooks.manage_changes()
    with ranks.all_or_none("load_weights"):
        found, known = list(_files(path)), _targets(model)
        targets = _matched(found, known, getattr(model, "base_model_prefix", ""))
        present = {owner(target) for target in targets.values() if target is not None}
        missing = list(
            {owner(target): name for name, target in reversed(known.items()) if owner(target) not in present}.values()
        )
        unexpected = [name for name, target in targets.items() if target is None]
        names = (missing, unexpected) if strict else ([], [])
        _check(path, found, targets, *names)
    ranks.agree("the weights that are loaded", f"{path.name} ({_fingerprint(found)})")
    with ranks.all_or_none("load_weights"):
        keep_one_name_of_tied(path, found, targets, ranks, strict=strict)
    with loading_state(engine, f"load_weights(model, {str(path)!r})"):
        Reader(engine, ranks).read([replace(file, targets=targets) for file in found])
    for entry in (entry for file in found for entry in file.entries):
        target = targets[entry.owner]
        if isinstance(target, tuple):
            engine.masters.replaced(target[0], entry.dtype)
    engine.masters.weights_loaded()
    return missing, unexpected


def _matched(
    files: Iterable[SavedFile], known: Mapping[str, TensorSource], prefix: str
) -> dict[str, TensorSource | None]:
    """Return the destination of each tensor of the files."""
    return {entry.owner: _find(entry.owner, known, prefix) for file in files for entry in file.entries}


def _fingerprint(files: Iterable[SavedFile]) -> str:
    """Return a checksum of the files' names and tables, to compare between ranks."""
    whole = Checksum()
    for file in files:
        whole.update(f"{file.path.name} {file.start} {file.entries} {file.checksum}".encode())
    return whole.text


# The files' tensors.


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
            f"safetensors files found: {found}{name_checkpoint_below(path)}. Name one of them; pickled weights (.bin, "
            ".pt) are not read: save them anew as safetensors"
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
    outside = next((name for name in names if not stays_inside(name)), None)
    if outside is not None:
        raise damaged(path, f"its weight_map names {outside!r}, expected files of its own folder")
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


# The model's tensors.


def _targets(model: nn.Module) -> dict[str, TensorSource]:
    """Return the newest values of each name of ``state_dict``; tied parameters by all their names."""
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
                found[full] = tensor.detach()
    return found


def _find(name: str, known: Mapping[str, TensorSource], prefix: str) -> TensorSource | None:
    """Find a file's name in the model: Hugging Face's names have, or lack, the prefix of the model without its head."""
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
    """Raise `CheckpointMismatch` for missing or unexpected names that are not allowed, and for wrong shapes and
    types.
    """
    wrong = [f"{name!r}: in the model, not in the files" for name in missing]
    wrong += [f"{name!r}: in the files, not in the model" for name in unexpected]
    for file, entry in ((each, entry) for each in files for entry in each.entries):
        target = targets[entry.owner]
        if target is None:
            continue
        if isinstance(target, torch.Tensor) and (why := not_writable(target)):
            wrong.append(f"{entry.name!r}: in the model it is {why}")
            continue
        shape, dtype = (
            (target.shape, target.dtype) if isinstance(target, torch.Tensor) else (target[0].shape, target[0].dtype)
        )
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


_PIECE_NUMEL = 2**20


def keep_one_name_of_tied(
    path: Path,
    files: Sequence[SavedFile],
    targets: dict[str, TensorSource | None],
    ranks: CheckpointRanks,
    *,
    strict: bool,
) -> None:
    """Keep one of a tied parameter's names; raise `CheckpointMismatch` if values differ (warn unless ``strict``)."""
    names: dict[int, list[str]] = {}
    for name, target in targets.items():
        if target is not None:
            names.setdefault(owner(target), []).append(name)
    for tied in names.values():
        target = targets[tied[0]]
        own = target[0].name if isinstance(target, tuple) else ""
        kept = own if own in tied else tied[0]
        for other in tied:
            if other == kept or target is None:
                continue
            targets[other] = None
            if ranks.leads and not _alike(files, kept, other, target):
                _report_difference(path, kept, other, strict=strict)


def owner(target: TensorSource) -> int:
    """Return a number that is the same for all names of a tied parameter."""
    return id(target) if isinstance(target, torch.Tensor) else id(target[0].first)


def _alike(files: Sequence[SavedFile], one: str, other: str, target: TensorSource) -> bool:
    """Return True if two names have the same values, rounded to the type that they are stored in."""
    if isinstance(target, torch.Tensor):
        shape, stride, dtype = target.shape, target.stride(), target.dtype
    else:
        record, kind = target
        shape, stride, dtype = record.shape, record.stride, record.group.dtype_of(kind)
    first, second = (read_full_tensor(files, name, shape, stride) for name in (one, other))
    return all(
        torch.equal(a.to(dtype).view(torch.uint8), b.to(dtype).view(torch.uint8))
        for a, b in zip(torch.split(first, _PIECE_NUMEL), torch.split(second, _PIECE_NUMEL), strict=True)
    )


def _report_difference(path: Path, kept: str, other: str, *, strict: bool) -> None:
    what = f"{path}: {kept!r} and {other!r} are one parameter in the model, and have different values in the files"
    if strict:
        raise CheckpointMismatch(
            f"{what}; try: a model in which they are not tied (tie_word_embeddings=False), or strict=False, which "
            f"takes {kept!r}"
        )
    warnings.warn(f"{what}: {kept!r} is taken", stacklevel=5)
