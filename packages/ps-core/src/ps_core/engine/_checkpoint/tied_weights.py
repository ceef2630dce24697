"""One parameter under two names in files of weights: there is one place for both, so they have to be alike."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from ps_core._errors import CheckpointMismatch
from ps_core.engine._checkpoint.ranks import CheckpointRanks
from ps_core.engine._checkpoint.reader import SavedFile, read_full_tensor
from ps_core.engine._checkpoint.sections import TensorSource

_PIECE_NUMEL = 2**20


def settle_ties(
    path: Path,
    files: Sequence[SavedFile],
    targets: dict[str, TensorSource | None],
    ranks: CheckpointRanks,
    *,
    strict: bool,
) -> None:
    """Of a parameter's names keep one; if the values differ, `CheckpointMismatch` (a warning unless ``strict``)."""
    names: dict[int, list[str]] = {}
    for name, held in targets.items():
        if held is not None:
            names.setdefault(owner(held), []).append(name)
    for tied in names.values():
        held = targets[tied[0]]
        own = held[0].name if isinstance(held, tuple) else ""
        kept = own if own in tied else tied[0]
        for other in tied:
            if other == kept or held is None:
                continue
            targets[other] = None
            if ranks.leads and not _alike(files, kept, other, held):
                _tell(path, kept, other, strict=strict)


def owner(held: TensorSource) -> int:
    """The same for the names of tied ones."""
    return id(held) if isinstance(held, torch.Tensor) else id(held[0].first)


def _alike(files: Sequence[SavedFile], one: str, other: str, held: TensorSource) -> bool:
    """Whether two names have the same values, once they are rounded to the type that they are kept in."""
    if isinstance(held, torch.Tensor):
        shape, stride, dtype = held.shape, held.stride(), held.dtype
    else:
        record, kind = held
        shape, stride, dtype = record.shape, record.stride, record.group.dtype_of(kind)
    first, second = (read_full_tensor(files, name, shape, stride) for name in (one, other))
    return all(
        torch.equal(a.to(dtype).view(torch.uint8), b.to(dtype).view(torch.uint8))
        for a, b in zip(torch.split(first, _PIECE_NUMEL), torch.split(second, _PIECE_NUMEL), strict=True)
    )


def _tell(path: Path, kept: str, other: str, *, strict: bool) -> None:
    what = f"{path}: {kept!r} and {other!r} are one parameter in the model, and have different values in the files"
    if strict:
        raise CheckpointMismatch(
            f"{what}; try: a model in which they are not tied (tie_word_embeddings=False), or strict=False, which "
            f"takes {kept!r}"
        )
    warnings.warn(f"{what}: {kept!r} is taken", stacklevel=5)
