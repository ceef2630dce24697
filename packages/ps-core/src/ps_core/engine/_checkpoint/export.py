"""Write weights into one safetensors file: of a managed model, or of a checkpoint without a model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from ps_core._atomic_files import sync_folder
from ps_core._errors import InvalidInput
from ps_core._extents import Kind
from ps_core.engine._checkpoint.atomic_folder import (
    SUMS,
    AtomicFolder,
    as_tier_failure,
    checked_path,
    checkpoint_file_names,
    is_checkpoint,
    keep_permissions,
    locked,
)
from ps_core.engine._checkpoint.checkpoint_tensors import BUFFERS, MASTERS, WEIGHTS, largest_chunk_bytes, plain_tensors
from ps_core.engine._checkpoint.direct_io import (
    BUFFER_BYTES,
    PIECE_BYTES,
    DoubleBuffer,
    TensorReader,
    TensorWriter,
    buffers,
    open_new,
)
from ps_core.engine._checkpoint.manifest import SavedCheckpoint, read_manifest
from ps_core.engine._checkpoint.preconditions import check_outside, finish_pass_for
from ps_core.engine._checkpoint.rank_errors import CheckpointRanks
from ps_core.engine._checkpoint.reader import SavedFile, compare, read_full_tensor, readable, stored
from ps_core.engine._checkpoint.safetensors_format import TYPES, TensorEntry, bytes_of, table_of
from ps_core.engine._checkpoint.shard_ranges import plain_order
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._parameters.param_state import ParamState


def save_weights(
    file: str | os.PathLike[str], model: nn.Module, *, masters: bool = False, overwrite: bool = False
) -> bool:
    """Write a managed model's weights and buffers into one safetensors file, each tensor once, group by group.

    Weights are written in the type that the model computes with. With ``masters``, trained ones are in fp32, unrounded.
    Where several processes share the model, all call this, and rank 0 writes. Return True on the process that wrote.
    """
    hooks = hooks_of(model)
    engine = hooks.engine
    ranks = CheckpointRanks(engine.together)
    with ranks.all_or_none("save_weights"):
        path = checked_path(file)
        engine.check_usable()
        check_outside("saved")
    finish_pass_for(engine, "saved")
    hooks.manage_added()
    whole = hooks._model()
    rows = sorted(_rows(engine, whole, masters=masters), key=lambda row: (-row[0].dtype.itemsize, row[1].group.index))
    plain = dict(plain_tensors(model if whole is None else whole))
    entries = [row[0] for row in rows] + [
        TensorEntry(name, each.dtype, tuple(each.shape)) for name, each in plain.items()
    ]
    with ExitStack() as stack:
        writer = None
        with ranks.all_or_none("save_weights"), as_tier_failure(path):
            if ranks.leads:
                new = stack.enter_context(_replaced(path, overwrite=overwrite))
                pair = stack.enter_context(buffers(largest_chunk_bytes(engine)))
                writer = stack.enter_context(closing(TensorWriter(new, table_of(entries), pair)))
        failure = _put_all(engine, rows, writer)
        with ranks.all_or_none("save_weights"), as_tier_failure(path):
            if failure is not None:
                raise failure
            if writer is not None:
                for tensor in plain.values():
                    writer.write(tensor)
                writer.finish()
            stack.close()
    return ranks.leads


def _rows(engine: Engine, whole: nn.Module | None, *, masters: bool) -> Iterator[tuple[TensorEntry, ParamState, Kind]]:
    """Yield what is written of the parameters that the model still has; of all if the model is gone (None)."""
    present = None if whole is None else set(map(id, whole.parameters()))
    for record in engine.records:
        if present is not None and id(record.parameter) not in present:
            continue
        group = record.group
        kind = Kind.P32 if masters and record.trainable else group.weight
        yield TensorEntry(record.name, group.dtype_of(kind), tuple(record.shape)), record, kind


def _put_all(
    engine: Engine, rows: list[tuple[TensorEntry, ParamState, Kind]], writer: TensorWriter | None
) -> OSError | None:
    """Write one group after another; every rank gathers all of them, also after the writing has failed."""
    failure: OSError | None = None
    with ExitStack() as stack:
        now = None
        for _, record, kind in rows:
            if now is not record.group:
                stack.close()
                now = record.group
                flat = stack.enter_context(engine.updater.opened(now, kind, write=False))
            if writer is not None and failure is None:
                try:
                    writer.write(record.shaped(flat))
                except OSError as error:
                    failure = error
    return failure


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    masters: bool = False,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint's weights and buffers into one safetensors file, without a model.

    Weights are written in the type that the model computes with. With ``masters``, trained ones are in fp32, unrounded.
    However large the checkpoint is, this takes a few megabytes of memory. A tensor that is not stored row by row needs
    memory for all of it.
    """
    path, out_path = checked_path(checkpoint), checked_path(file)
    if not is_checkpoint(path):
        AtomicFolder(path).recover()
    saved = read_manifest(path)
    for name in (SUMS, *saved.sums):
        if out_path.exists() and out_path.samefile(path / name):
            raise _overwrites_checkpoint(out_path, path / name)
    with _replaced(out_path, overwrite=overwrite) as target:
        out = open_new(target)
        try:
            _export(saved, out, masters=masters)
            os.fsync(out)
        finally:
            os.close(out)


def _overwrites_checkpoint(path: Path, file: Path) -> InvalidInput:
    """Return the error for a target ``path`` that is a checkpoint's ``file``, maybe by another name."""
    return InvalidInput(
        f"{path} is {file.name!r} of the checkpoint {file.parent}, which would be lost: name another file"
    )


def _export(saved: SavedCheckpoint, out: int, *, masters: bool) -> None:
    files = stored(saved, {section: {} for section in (MASTERS, WEIGHTS, BUFFERS)}, 0)
    entries = sorted(_wholes(saved, files, masters=masters), key=lambda entry: -entry.dtype.itemsize)
    table = table_of(entries)
    os.pwrite(out, table, 0)
    places, at = {}, len(table)
    for entry in entries:
        places[entry.name] = (entry.dtype, at)
        at += entry.nbytes
    with buffers(4 * BUFFER_BYTES) as pair:
        for file in files:
            _copy(file, out, places, saved, pair)
    for name in saved.orders:
        dtype, at = places[name]
        shape = torch.Size(saved.manifest["parameters"][name]["shape"])
        _put(out, at, read_full_tensor(files, name, shape, plain_order(shape)).to(dtype))


def _wholes(saved: SavedCheckpoint, files: list[SavedFile], *, masters: bool) -> Iterator[TensorEntry]:
    """Yield the tensors of the new file, in the model's order."""
    source = {entry.owner: (file, entry) for file in files for entry in file.entries}
    rows = saved.manifest["parameters"]
    for name in [*rows, *(name for name in source if name not in rows)]:
        file, entry = source[name]
        computed = TYPES[rows[name]["dtype"]] if name in rows and not masters else entry.dtype
        yield TensorEntry(name, computed, file.shape_of(entry))


def _copy(
    file: SavedFile, out: int, places: dict[str, tuple[torch.dtype, int]], saved: SavedCheckpoint, pair: DoubleBuffer
) -> None:
    """Copy a file's tensors to their places; raise `CheckpointDamaged` if its bytes have changed."""
    whole = [(file.start, file.start + file.nbytes)] if file.nbytes else []
    with ExitStack() as stack:
        with readable(file.path):
            reader = stack.enter_context(closing(TensorReader(file.path, whole, pair)))
        for entry in file.entries:
            if entry.tensor in saved.orders:
                reader.skip(entry.nbytes)
                continue
            dtype, at = places[entry.owner]
            step = PIECE_BYTES // entry.dtype.itemsize
            for first in range(0, entry.numel, step):
                staged = torch.empty(min(step, entry.numel - first), dtype=entry.dtype, device="cpu")
                with readable(file.path):
                    reader.read(entry.dtype, staged)
                _put(out, at + (entry.first + first) * dtype.itemsize, staged.to(dtype))
        sums = reader.sums()
    compare(file, [(each, file.nbytes) for each in sums])


def _put(out: int, at: int, tensor: torch.Tensor) -> None:
    data = bytes_of(tensor)
    while data:
        count = os.pwrite(out, data, at)
        data, at = data[count:], at + count


@contextmanager
def _replaced(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield the path of a new file, which replaces ``path`` if the block raises nothing."""
    path = path.resolve()
    with as_tier_failure(path):
        if path.is_dir():
            raise InvalidInput(f"{path} is a folder: name a file, as in {path / 'model.safetensors'}")
        if path.exists() and not path.is_file():
            raise InvalidInput(f"{path} is a device, a pipe or a socket, which a file would replace: name another file")
        partial = path.with_name(f".{path.name}.ps-partial")  # a folder, so that it can be locked before it is filled
        if path.name in checkpoint_file_names(path.parent):
            raise _overwrites_checkpoint(path, path)
        if path.exists() and not overwrite:
            raise InvalidInput(f"{path} exists already: choose another name, or give overwrite=True (--overwrite)")
        os.makedirs(path.parent, exist_ok=True)
        with suppress(OSError):
            os.unlink(partial)  # a killed one's, of an older version
        with suppress(OSError), locked(partial):
            shutil.rmtree(partial)  # a killed one's
        try:
            os.mkdir(partial)
        except FileExistsError:
            raise InvalidInput(f"{path} is being saved to by another process: wait for it") from None
        try:
            with locked(partial, wait=True):
                yield partial / path.name
                keep_permissions(path, partial / path.name)
                os.rename(partial / path.name, path)
                sync_folder(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
