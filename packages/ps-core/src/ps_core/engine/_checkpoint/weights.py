"""``load_weights``: published weights, or a checkpoint's, into a model under management, file by file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ps_core._errors import CheckpointMismatch, InvalidInput
from ps_core._program import Kind
from ps_core.engine._checkpoint.access import changing, check_alone, settle
from ps_core.engine._checkpoint.contents import BUFFERS, MASTERS, WEIGHTS, Chunks, Held, largest_chunk_bytes
from ps_core.engine._checkpoint.direct import Buffers, buffers
from ps_core.engine._checkpoint.files import Source
from ps_core.engine._checkpoint.folder import Folder
from ps_core.engine._checkpoint.manifest import is_checkpoint, read_manifest
from ps_core.engine._checkpoint.safetensors import Entry, damaged, read_table
from ps_core.engine._management import management_of
from ps_core.engine._parameter import ManagedParameter

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Weights:
    """A file, where its tensors begin, what they are, and its checksum if there is one."""

    path: Path
    start: int
    entries: tuple[Entry, ...]
    checksum: str | None = None


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Read safetensors into a managed model's chunks: a file, a folder as on the Hugging Face hub, or a checkpoint.

    fp32 masters start from what the file holds, unrounded; what is computed with follows from them. Optimizer states
    stay as they are. Gives the names that are missing in the files, and those of the files that the model does not
    have; with ``strict`` such names raise `CheckpointMismatch`, before anything is changed.
    """
    engine = management_of(model).engine
    check_alone(engine)
    engine.check_usable(loading=engine.half_loaded.startswith("load_weights("))
    settle(engine, "loaded")
    path = Path(path).absolute()
    files, known = list(_files(path)), _targets(model)
    prefix = getattr(model, "base_model_prefix", "")
    targets: dict[str, Held | None] = {
        entry.name: _find(entry.name, known, prefix) for file in files for entry in file.entries
    }
    present = {_owner(held) for held in targets.values() if held is not None}
    missing = list(
        {_owner(held): name for name, held in reversed(known.items()) if _owner(held) not in present}.values()
    )
    unexpected = [name for name, held in targets.items() if held is None]
    names = (missing, unexpected) if strict else ([], [])
    _check(path, [entry for file in files for entry in file.entries], targets, *names)
    with (
        changing(engine, f"load_weights(model, {str(path)!r})"),
        buffers(largest_chunk_bytes(engine)) as pair,
        Chunks(engine, write=True) as chunks,
        torch.no_grad(),
    ):
        for file in files:
            _load(file, targets, chunks, pair)
    return missing, unexpected


def _load(file: _Weights, targets: Mapping[str, Held | None], chunks: Chunks, pair: Buffers) -> None:
    try:
        with closing(Source(file.path, file.start, pair)) as source:
            for entry in file.entries:
                held = targets[entry.name]
                if held is None:
                    source.skip(entry)
                else:
                    source.take(entry, chunks.tensor(held))
            if file.checksum is not None:
                source.check(file.checksum)
    except OSError as error:
        raise damaged(file.path, f"it cannot be read ({error.strerror})") from error


# What there is to load.


def _files(path: Path) -> Iterator[_Weights]:
    if path.is_file():
        yield from _indexed(path) if path.name.endswith(".index.json") else _single(path)
        return
    if not is_checkpoint(path):
        Folder(path).recover()  # it may be one whose overwriting was cut short
    if is_checkpoint(path):
        saved = read_manifest(path)
        for file in saved.files:
            if file.section in (MASTERS, WEIGHTS, BUFFERS):
                yield _Weights(path / file.name, len(file.table), file.entries, saved.sums[file.name])
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


def _single(path: Path) -> Iterator[_Weights]:
    start, entries = read_table(path)
    yield _Weights(path, start, tuple(entries))


def _indexed(path: Path) -> Iterator[_Weights]:
    try:
        places: dict[str, str] = dict(json.loads(path.read_bytes())["weight_map"])
        names = dict.fromkeys(places.values())
        paths = [path.parent / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"it is not an index of a model's files ({error})") from None
    files = [file for each in paths for file in _single(each)]
    present = {entry.name for file in files for entry in file.entries}
    for name, place in places.items():
        if name not in present:
            raise damaged(path.parent / place, f"it has no {name!r}, which {path.name} says it has")
    yield from files


# What is known of the model.


def _targets(model: nn.Module) -> dict[str, Held]:
    """Where each name of ``state_dict`` has its newest values; tied ones by all their names."""
    found: dict[str, Held] = {}
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


def _find(name: str, known: Mapping[str, Held], prefix: str) -> Held | None:
    """What a name of the files means here: Hugging Face's have, or lack, the prefix of the model without its head."""
    for each in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if each in known:
            return known[each]
    return None


def _owner(held: Held) -> int:
    """The same for the names of tied ones."""
    return id(held if isinstance(held, torch.Tensor) else held[0])


def _check(
    path: Path,
    entries: Iterable[Entry],
    targets: Mapping[str, Held | None],
    missing: Iterable[str],
    unexpected: Iterable[str],
) -> None:
    """`CheckpointMismatch` if there is something that cannot be, or may not."""
    wrong = [f"{name!r}: in the model, not in the files" for name in missing]
    wrong += [f"{name!r}: in the files, not in the model" for name in unexpected]
    for entry in entries:
        held = targets[entry.name]
        if held is None:
            continue
        shape, dtype = (held.shape, held.dtype) if isinstance(held, torch.Tensor) else (held[0].shape, held[0].dtype)
        if tuple(shape) != entry.shape:
            wrong.append(f"{entry.name!r}: shape {entry.shape} in the files, {tuple(shape)} in the model")
        elif dtype.is_floating_point != entry.dtype.is_floating_point:
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
