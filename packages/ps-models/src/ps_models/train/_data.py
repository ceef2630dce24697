"""From documents to batches.

[Note: split] Which side a document is on depends on its own bytes only: it stays there when others come or go, and
nothing of it is on both sides. Where there are few documents, or all would be on one side, the end of each is held
back for validation instead. Of a token file, whose documents cannot be told apart, the end is.

[Note: packing] The tokens of one side are one run, each document followed by the end token. An epoch cuts it into
sequences from an offset of its own and goes through them in an order of its own, both drawn from the seed and the
epoch's number. So the position in the data is one number, the sequences taken so far, and says everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ps_core._errors import InvalidInput
from ps_models.train._options import TrainOptions
from ps_models.train._text_sources import TOKENS, documents, standard_library
from ps_models.train._token_files import digest_of, open_token_file
from ps_models.train._tokenizers import Bytes, Tokenizer, tokenizer

FEW = 20
"""Fewer documents than this are split each, not among them."""


class TokenRun(Protocol):
    """Tokens in order: a tensor, or a part of a file."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        ...

    def __getitem__(self, which: slice) -> Tensor:
        """Return some of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All data of a run."""

    train: tuple[TokenRun, ...]
    """Runs of tokens; a sequence lies within one."""
    validation: tuple[TokenRun, ...]
    tokenizer: Tokenizer | None
    """None: the data are token numbers already."""
    digest: str
    """Equal for equal data, split and tokenizer."""
    told: str
    """The data in words, for people."""


def corpus(options: TrainOptions, say: Callable[[str], None] = lambda _: None) -> Corpus:
    """Read, encode and split what the options name; ``say`` is told before that begins."""
    paths = [Path(name) for name in options.data]
    for path in paths:
        if not path.exists():
            raise InvalidInput(f"--data: found {str(path)!r}, which does not exist; allowed are files and folders")
    files = [path for path in paths if path.suffix in TOKENS]
    if files and len(files) < len(paths):
        other = next(path for path in paths if path not in files)
        raise InvalidInput(f"--data: found {str(other)!r} beside token files; allowed is one kind or the other")
    chosen = None if files else tokenizer(options.tokenizer)
    say(f"reading {source_of(options)}")
    found = _of_tokens(files, options) if chosen is None else _of_text(paths, options, chosen)
    for side, runs in (("train", found.train), ("validation", found.validation)):
        if not any(map(len, runs)) or PackedTokens(runs, options.seq).sequences < 1:
            raise InvalidInput(
                f"--data: {sum(map(len, runs)):,} tokens for {side} are no sequence of {options.seq}; allowed is more "
                f"data, a smaller --seq, or {'a larger' if side == 'validation' else 'another'} --validation"
            )
    return found


def source_of(options: TrainOptions) -> str:
    """Return what the data are read from, in words."""
    return ", ".join(options.data) or "the standard library's source"


def _of_text(paths: Sequence[Path], options: TrainOptions, chosen: Tokenizer) -> Corpus:
    every = [document for path in paths for document in documents(path)] if paths else list(standard_library())
    train, held = split(every, options.validation)
    digest = hashlib.sha256(f"{chosen.digest} {options.validation}".encode())
    for document in every:
        digest.update(hashlib.sha256(document).digest())
    runs = pack(train, chosen), pack(held, chosen)
    counted = f"{len(every):,} documents, {len(runs[0]):,} tokens to train on, {len(runs[1]):,} held back"
    return Corpus(
        train=(runs[0],),
        validation=(runs[1],),
        tokenizer=chosen,
        digest=digest.hexdigest(),
        told=f"{source_of(options)}: {counted}",
    )


def _of_tokens(files: Sequence[Path], options: TrainOptions) -> Corpus:
    if options.tokenizer != "bytes":
        raise InvalidInput(f"--tokenizer: found {options.tokenizer!r} with token files; allowed is to leave it out")
    runs = [open_token_file(path) for path in files]
    cuts = [len(run) - int(len(run) * options.validation) for run in runs]
    digest = hashlib.sha256(b"".join(digest_of(path) for path in files) + str(options.validation).encode())
    told = f"{sum(cuts):,} tokens to train on, {sum(map(len, runs)) - sum(cuts):,} held back"
    return Corpus(
        train=tuple(run.part(0, cut) for run, cut in zip(runs, cuts, strict=True)),
        validation=tuple(run.part(cut, len(run)) for run, cut in zip(runs, cuts, strict=True)),
        tokenizer=None,
        digest=digest.hexdigest(),
        told=f"{', '.join(map(str, files))}: {told}",
    )


def split(every: Sequence[bytes], part: float) -> tuple[list[bytes], list[bytes]]:
    """Return the documents to train on and those held back, each in the order given; see [Note: split]."""
    held = [document for document in every if _draw(document) < part]
    train = [document for document in every if not _draw(document) < part]
    if len(every) >= FEW and any(train) and any(held):
        return train, held
    cuts = [len(document) - int(len(document) * part) for document in every]
    return (
        [document[:cut] for document, cut in zip(every, cuts, strict=True)],
        [document[cut:] for document, cut in zip(every, cuts, strict=True)],
    )


def _draw(document: bytes) -> float:
    """Return a number from 0 to 1 that looks random and follows from the document alone."""
    return int.from_bytes(hashlib.sha256(document).digest()[:6], "big") / 2**48


def pack(every: Iterable[bytes], chosen: Tokenizer) -> Tensor:
    """Return all documents that are not empty as one run, with the end token after each."""
    pieces = [piece for document in every if document for piece in (chosen.encode(document), None)]
    if not pieces:
        return Bytes().encode(b"")
    first = next(piece for piece in pieces if piece is not None)
    end = torch.tensor([chosen.end], dtype=first.dtype)
    return torch.cat([end if piece is None else piece for piece in pieces])


class PackedTokens:
    """Runs of tokens, cut into sequences; see [Note: packing]."""

    def __init__(self, runs: Sequence[TokenRun], length: int, *, seed: int = 0, vocabulary: int | None = None) -> None:
        self.runs, self.length, self.seed, self.vocabulary = runs, length, seed, vocabulary
        # Often a sequence less than there might be, so that any offset below the length is possible.
        self.counts = [max(int(len(run) >= length), (len(run) - length + 1) // length) for run in runs]
        self.sequences = sum(self.counts)
        self._epoch: tuple[int, int, Tensor] | None = None

    def batch(self, position: int, count: int) -> Tensor:
        """Return the sequences from that position on, (count, length), as int64; the data repeat without end."""
        return self.checked(torch.stack([self.sequence(at) for at in range(position, position + count)]))

    def spread(self, count: int) -> Tensor:
        """Return ``count`` sequences, or all if there are fewer, evenly spread and unshuffled, (count, length)."""
        return self.checked(torch.stack([self.unshuffled(index) for index in self.evenly(count)]))

    def evenly(self, count: int) -> list[int]:
        """Return the indices of ``count`` evenly spread sequences, or of all if there are fewer."""
        count = min(count, self.sequences)
        return [index * self.sequences // count for index in range(count)]

    def unshuffled(self, index: int) -> Tensor:
        """Return a sequence by its index in the data, unshuffled."""
        return self._at(index, 0)

    def checked(self, taken: Tensor) -> Tensor:
        """Return ``taken``; raise `InvalidInput` if a token is not in the vocabulary.

        Token files are too large to be checked before they are used."""
        low, high = (int(each) for each in taken.aminmax())
        if self.vocabulary is not None and not 0 <= low <= high < self.vocabulary:
            found = low if low < 0 else high
            raise InvalidInput(f"--data: found token {found}, allowed is 0 to {self.vocabulary - 1} (see --vocab)")
        return taken

    def sequence(self, position: int, further: int = 0) -> Tensor:
        """Return the sequence at a position, or the one ``further`` on in the same epoch, cyclically."""
        epoch, index = divmod(position, self.sequences)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = generator_of(self.seed, epoch)
            offset = int(torch.randint(self.length, (), generator=generator))
            self._epoch = epoch, offset, torch.randperm(self.sequences, generator=generator)
        _, offset, order = self._epoch
        return self._at(int(order[(index + further) % self.sequences]), offset)

    def _at(self, index: int, offset: int) -> Tensor:
        for run, count in zip(self.runs, self.counts, strict=True):
            if index < count:
                start = offset % (len(run) - count * self.length + 1) + index * self.length
                return run[start : start + self.length].to(torch.int64)
            index -= count
        raise IndexError(index)


def generator_of(*key: object) -> torch.Generator:
    """Return a generator seeded by a hash of ``key``; hashed, because a generator uses 32 bits of its seed only."""
    drawn = hashlib.sha256(" ".join(map(str, key)).encode()).digest()[:4]
    return torch.Generator().manual_seed(int.from_bytes(drawn, "big"))
