"""Write a checkpoint: each rank writes its files, and rank 0 gives the folder its name.

[Note: one folder]
Rank 0 makes the new folder (see [Note: siblings]) and leaves a marker in it. All ranks open the folder with that
marker, and write to it even if it is renamed. So a rank that outlives rank 0 cannot write into the folder of a later
save. Between two stages all ranks learn whether all succeeded. The folder gets its name once every file is on the disk.
Before that rank 0 checks that all files are there, with their sizes and tables. A single process does the same as rank
0 of 1.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ps_core.engine._checkpoint.atomic_folder import AtomicFolder, as_tier_failure
from ps_core.engine._checkpoint.checkpoint_tensors import (
    BUFFERS,
    EXTRA,
    OpenChunks,
    Sections,
    TensorSource,
    elements_of,
    entries,
    largest_chunk_bytes,
)
from ps_core.engine._checkpoint.crc32 import Checksum, text_of
from ps_core.engine._checkpoint.dense_memory import plain_copy
from ps_core.engine._checkpoint.direct_io import PIECE_BYTES, DoubleBuffer, TensorWriter, buffers
from ps_core.engine._checkpoint.json_values import encode
from ps_core.engine._checkpoint.manifest import (
    ManifestFile,
    cut,
    marked,
    numbered,
    read_manifest,
    write_manifest,
    write_text,
)
from ps_core.engine._checkpoint.rank_errors import CheckpointRanks
from ps_core.engine._checkpoint.rng_state import random_state
from ps_core.engine._checkpoint.safetensors_format import by_rows, bytes_of
from ps_core.engine._checkpoint.shard_ranges import plain_order, same_order
from ps_core.engine._execution.engine import Engine

FILE_BYTES = 4 * 2**30
"""The most bytes of tensors in one file; a larger tensor has a file to itself."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """List what is saved, and this rank's part of it."""

    ranks: CheckpointRanks
    manifest: dict[str, Any]
    sections: Sections
    files: list[ManifestFile]
    """Files of all ranks."""
    small: dict[str, bytes]
    """This rank's small files."""
    marker: str


def agree(
    ranks: CheckpointRanks, manifest: Mapping[str, Any], kept: Mapping[str, TensorSource], *, overwrite: bool
) -> None:
    """Raise `RanksDiverged` unless all ranks have equal values of what is saved once."""
    ranks.agree("save_checkpoint(overwrite=...)", str(overwrite))
    optimizer = manifest["optimizer"] or {}
    ranks.agree("what the optimizer's param_groups hold", json.dumps(optimizer.get("groups")))
    ranks.agree("steps and loss scale", json.dumps([optimizer.get("steps"), optimizer.get("loss_scale")]))
    ranks.agree("what modules give for get_extra_state()", json.dumps(manifest["modules"]))
    extra = manifest["extra"]
    ranks.agree("what extra has", ", ".join(extra))
    for key, value in extra.items():
        ranks.agree(f"extra[{key!r}]", json.dumps(value))
    for name, tensor in kept.items():
        ranks.agree(f"tensor {name} of extra and param_groups", text_of(_checksum({name: tensor})))


def plan_save(ranks: CheckpointRanks, engine: Engine, manifest: dict[str, Any], sections: Sections) -> SavePlan:
    """Decide which rank writes what."""
    random = b""
    if manifest["optimizer"] is not None:
        random = (json.dumps(encode("the state of random numbers", random_state(), str)) + "\n").encode()
    whole = Checksum()
    whole.update(random)
    mine = [_checksum(sections[BUFFERS]), whole.value, secrets.randbits(32)]
    told = ranks.rows(mine, "what may differ", count=len(mine))
    names = numbered("random", len(told), "json") if random else []
    manifest = {**manifest, "ranks": len(told), "orders": _orders(engine), "random_files": names}
    differing = [rank for rank, row in enumerate(told) if not rank or row[0] != told[0][0]]
    files = marked(_files(sections, ranks.shards, differing), manifest, [value for row in told for value in row[:2]])
    small = {names[ranks.rank]: random} if random else {}
    return SavePlan(ranks, manifest, sections, files, small, f".ps-save-{told[0][2]:08x}")


def _files(sections: Sections, shards: int, with_buffers: list[int]) -> list[ManifestFile]:
    found = []
    for name, section in sections.items():
        shares = [(shard, entries(section, shard)) for shard in range(1 if name == EXTRA else shards)]
        if name == BUFFERS:
            shares = [(rank, entries(section)) for rank in with_buffers]
        found += cut(name, shares, FILE_BYTES)
    return found


def _orders(engine: Engine) -> dict[str, list[int]]:
    """Return the strides of parameters that are cut and are not contiguous."""
    return {
        record.name: list(record.stride)
        for record in engine.records
        if len(elements_of(record, record.offset // record.group.shard_numel)) < record.numel
        and not same_order(record.shape, plain_order(record.shape), record.stride)
    }


def _checksum(section: Mapping[str, TensorSource]) -> int:
    """Return the checksum of tensors that are in no chunk."""
    whole = Checksum()
    for name, tensor in section.items():
        assert isinstance(tensor, torch.Tensor), "what is in chunks has its own"
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for piece in by_rows(tensor, PIECE_BYTES):
            plain = plain_copy(piece)
            whole.update(bytes_of(plain))
    return whole.value


def save(folder: AtomicFolder, engine: Engine, plan: SavePlan, *, overwrite: bool) -> None:
    """Write the checkpoint; see [Note: one folder]."""
    ranks = plan.ranks
    with ExitStack() as stack:
        new = Path()
        with ranks.all_or_none("save_checkpoint"):
            if ranks.leads:
                new = stack.enter_context(folder.replaced(overwrite=overwrite))
                write_text(new / plan.marker, b"")
        with ranks.all_or_none("save_checkpoint"):
            at = folder.find(plan.marker)
            stack.callback(os.close, at)
        with ranks.all_or_none("save_checkpoint"), as_tier_failure(folder.path):
            mine = _write(new, at, engine, plan)
        sums = _exchange(plan, mine)
        with ranks.all_or_none("save_checkpoint"):
            if ranks.leads:
                _finalize(new, plan, sums)
        with ranks.all_or_none("save_checkpoint"):
            stack.close()


def _write(new: Path, at: int, engine: Engine, plan: SavePlan) -> dict[str, int]:
    """Write this rank's files; return their checksums."""
    with buffers(largest_chunk_bytes(engine)) as pair, OpenChunks(engine, write=False) as chunks:
        sums = {
            file.name: _write_file(new / file.name, at, file, plan.sections[file.section], chunks, pair)
            for file in plan.files
            if file.writer == plan.ranks.rank
        }
    return sums | {name: write_text(new / name, text, at) for name, text in plan.small.items()}


def _write_file(
    path: Path,
    at: int,
    file: ManifestFile,
    section: Mapping[str, TensorSource],
    chunks: OpenChunks,
    pair: DoubleBuffer,
) -> int:
    with closing(TensorWriter(path, file.table, pair, at)) as writer:
        for entry in file.entries:
            source = section[entry.owner]
            if isinstance(source, tuple) and entry.tensor:
                writer.write(chunks.elements(source, entry.first, entry.numel))
            else:
                writer.write(chunks.tensor(source))
        return writer.finish()


def _exchange(plan: SavePlan, mine: Mapping[str, int]) -> dict[str, str]:
    """Return every file's checksum, from all ranks."""
    writers = {file.name: file.writer for file in plan.files}
    writers |= {name: rank for rank, name in enumerate(plan.manifest["random_files"])}
    most = max(Counter(writers.values()).values(), default=0)
    ordered = [mine[name] for name, writer in writers.items() if writer == plan.ranks.rank]
    found = [iter(row) for row in plan.ranks.rows(ordered, "checksums of what was written", count=most)]
    return {name: text_of(next(found[writer])) for name, writer in writers.items()}


def _finalize(new: Path, plan: SavePlan, sums: dict[str, str]) -> None:
    """Write the manifest, and check that every file is there with its size and table."""
    os.unlink(new / plan.marker)
    write_manifest(new, plan.manifest, plan.files, sums)
    read_manifest(new)
