"""Define ``check_checkpoint``, which reads every byte of a checkpoint and loads nothing."""

from __future__ import annotations

import os
from contextlib import closing

from ps_core.engine._checkpoint.atomic_folder import checked_path
from ps_core.engine._checkpoint.direct_io import BUFFER_BYTES, TensorReader, buffers
from ps_core.engine._checkpoint.manifest import read_manifest
from ps_core.engine._checkpoint.reader import compare, readable, stored


def check_checkpoint(path: str | os.PathLike[str]) -> None:
    """Raise `CheckpointDamaged` unless every file of a checkpoint has the bytes that `save_checkpoint` wrote.

    No model is needed. The check takes a few megabytes of memory. Where several processes use the checkpoint, one may
    call it alone.
    """
    saved = read_manifest(checked_path(path))
    with buffers(4 * BUFFER_BYTES) as pair:
        for file in stored(saved, {file.section: {} for file in saved.files}, None):
            whole = [(file.start, file.start + file.nbytes)] if file.nbytes else []
            with readable(file.path), closing(TensorReader(file.path, whole, pair)) as reader:
                reader.skip(file.nbytes)
                compare(file, [(each, file.nbytes) for each in reader.sums()])
