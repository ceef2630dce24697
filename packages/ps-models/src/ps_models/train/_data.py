"""Turn documents into batches.

[Note: split]
A document's own bytes decide whether it is for training or for validation. So it stays there when others come or go,
and nothing of it is on both sides. Of few documents, or if all would be on one side, each one's end is held back for
validation instead. Of a token file the end is held back, because its documents cannot be told apart. Examples are held
back as a whole, even if there are few. With ``--eval-data`` nothing of ``--data`` is held back.

[Note: packing]
The tokens of one side are one run, each document followed by the end token. An epoch has an offset of its own for
cutting it into sequences, and an order of its own. Both are drawn from the seed and the epoch's number. So the position
in the data is one number, the sequences taken so far.
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
from ps_models.train._examples import Document, key_of
from ps_models.train._options import TrainOptions
from ps_models.train._text_sources import TOKENS, documents, standard_library, told_of_unread
from ps_models.train._token_files import digest_of, open_token_file
from ps_models.train._tokenizers import Bytes, Tokenizer, tokenizer
from ps_models.train._training_samples import Samples

FEW = 20
"""If there are fewer documents than this, each is split."""


class TokenRun(Protocol):
    """Protocol of tokens in order: a tensor, or a part of a file."""

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
    samples: tuple[Samples, Samples] | None = None
    """Samples to train on and to validate with, in place of runs."""
    tokenizer: Tokenizer | None
    """The tokenizer; None: the data are token numbers already."""
    digest: str
    """A text that is equal for equal data, split and tokenizer."""
    told: str
    """The data in words, for people."""


def corpus(options: TrainOptions, say: Callable[[str], None] = lambda _: None) -> Corpus:
    """Read, encode and split what the options name; ``say`` is told before that begins."""
    paths, held = _paths("--data", options.data), _paths("--eval-data", options.eval_data)
    files = [path for path in (*paths, *held) if path.suffix in TOKENS]
    others = [path for path in (*paths, *held) if path not in files]
    if files and others:
        option = "--data" if others[0] in paths else "--eval-data"
        raise InvalidInput(f"{option}: found {str(others[0])!r} beside token files; allowed is one kind or the other")
    if files and options.pack:
        raise InvalidInput("--pack: found with token files, whose samples cannot be told apart; allowed with text")
    chosen = None if files else tokenizer(options.tokenizer, options.hf)
    say(f"reading {source_of(options)}")
    found = _of_tokens(paths, held, options) if chosen is None else _of_text(paths, held, options, chosen)
    _check_enough(found, options)
    return found


def _paths(option: str, names: Sequence[str]) -> list[Path]:
    paths = [Path(name) for name in names]
    for path in paths:
        if not path.exists():
            raise InvalidInput(f"{option}: found {str(path)!r}, which does not exist; allowed are files and folders")
    return paths


def _check_enough(found: Corpus, options: TrainOptions) -> None:
    """Raise `InvalidInput` if there is no sequence to train on, or none to validate with."""
    for number, side in enumerate(("train", "validation")):
        own = bool(number and options.eval_data)
        option, names = ("--eval-data", options.eval_data) if own else ("--data", options.data)
        if found.samples is not None:
            samples = found.samples[number]
            if not len(samples) and not samples.left_out:
                raise InvalidInput(
                    f"{option}: found no document for {side}; allowed are two or more, or --eval-data for validation"
                    f"{told_of_unread(names)}"
                )
            if not len(samples):
                raise InvalidInput(
                    f"{option}: no samples for {side} with an answer in their first {options.seq} tokens; allowed is "
                    "more data, or a larger --seq"
                )
            continue
        runs = found.validation if number else found.train
        if not any(map(len, runs)) or PackedTokens(runs, options.seq).sequences < 1:
            raise InvalidInput(
                f"{option}: {sum(map(len, runs)):,} tokens for {side} are no sequence of {options.seq}; allowed is "
                f"more data, a smaller --seq, or {'a larger' if number else 'another'} --validation"
                f"{told_of_unread(names)}"
            )


def source_of(options: TrainOptions) -> str:
    """Return the source of the data, in words."""
    return ", ".join((*options.data, *options.eval_data)) or "the standard library's source"


def _of_text(paths: Sequence[Path], held_paths: Sequence[Path], options: TrainOptions, chosen: Tokenizer) -> Corpus:
    every = [document for path in paths for document in documents(path)] if paths else list(standard_library())
    apart = [document for path in held_paths for document in documents(path, "--eval-data")]
    texts = [document for document in (*every, *apart) if isinstance(document, bytes)]
    source, unread = source_of(options), told_of_unread((*paths, *held_paths))
    digest = hashlib.sha256(f"{chosen.digest} {options.validation}".encode())
    for document in (*every, *([b"--eval-data"] if held_paths else []), *apart):
        digest.update(hashlib.sha256(key_of(document)).digest())
    if options.pack or len(texts) < len(every) + len(apart):
        sides = (every, apart) if held_paths else split_whole(every, options.validation)
        samples = Samples(sides[0], chosen, options.seq), Samples(sides[1], chosen, options.seq)
        return Corpus(
            train=(),
            validation=(),
            samples=samples,
            tokenizer=chosen,
            digest=digest.hexdigest(),
            told=f"{source}: {_told_of_samples(*samples, options.seq)}{unread}",
        )
    cut = len(every)
    train, held = (texts[:cut], texts[cut:]) if held_paths else split(texts, options.validation)
    runs = pack(train, chosen), pack(held, chosen)
    counted = f"{len(texts):,} documents, {len(runs[0]):,} tokens to train on, {len(runs[1]):,} held back"
    return Corpus(
        train=(runs[0],),
        validation=(runs[1],),
        tokenizer=chosen,
        digest=digest.hexdigest(),
        told=f"{source}: {counted}{unread}",
    )


def _told_of_samples(train: Samples, held: Samples, length: int) -> str:
    told = (
        f"{len(train):,} samples of {train.tokens:,} tokens, {train.trained:,} of which are trained; {len(held):,} "
        "samples to validate with"
    )
    cut, left_out = train.cut + held.cut, train.left_out + held.left_out
    told += f"; {cut:,} longer than {length} tokens were cut" if cut else ""
    return told + (f"; {left_out:,} left out, with no answer in their first {length} tokens" if left_out else "")


def _of_tokens(paths: Sequence[Path], held_paths: Sequence[Path], options: TrainOptions) -> Corpus:
    if options.tokenizer != "bytes":
        raise InvalidInput(f"--tokenizer: found {options.tokenizer!r} with token files; allowed is to leave it out")
    runs, apart = [open_token_file(path) for path in paths], [open_token_file(path) for path in held_paths]
    cuts = [len(run) - (0 if apart else int(len(run) * options.validation)) for run in runs]
    train = tuple(run.part(0, cut) for run, cut in zip(runs, cuts, strict=True))
    held = tuple(apart) or tuple(run.part(cut, len(run)) for run, cut in zip(runs, cuts, strict=True))
    told = b"".join(digest_of(path) for path in paths) + str(options.validation).encode()
    digest = hashlib.sha256(told + b"".join(digest_of(path) for path in held_paths))
    counted = f"{sum(map(len, train)):,} tokens to train on, {sum(map(len, held)):,} held back"
    return Corpus(
        train=train,
        validation=held,
        tokenizer=None,
        digest=digest.hexdigest(),
        told=f"{', '.join(map(str, (*paths, *held_paths)))}: {counted}",
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


def split_whole(every: Sequence[Document], part: float) -> tuple[list[Document], list[Document]]:
    """Return the documents to train on and those held back; of few documents at least the last is held back."""
    held = [document for document in every if _draw(key_of(document)) < part]
    train = [document for document in every if not _draw(key_of(document)) < part]
    if len(every) >= FEW and train and held:
        return train, held
    cut = len(every) - max(1, int(len(every) * part))
    return list(every[:cut]), list(every[cut:])


def _draw(document: bytes) -> float:
    """Return a number from 0 to 1 that looks random and depends on the document alone."""
    return int.from_bytes(hashlib.sha256(document).digest()[:6], "big") / 2**48


def pack(every: Iterable[bytes], chosen: Tokenizer) -> Tensor:
    """Return all documents that are not empty as one run, with the end token after each."""
    coded = [chosen.encode(document) for document in every if document]
    if not coded:
        return Bytes().encode(b"")
    start, end = (torch.tensor(each, dtype=coded[0].dtype) for each in (chosen.start, [chosen.end]))
    return torch.cat([piece for document in coded for piece in (start, document, end)])


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

        Token files are too large to be checked before they are used.
        """
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
    """Return a generator seeded by a hash of ``key``: a generator uses only 32 bits of its seed."""
    drawn = hashlib.sha256(" ".join(map(str, key)).encode()).digest()[:4]
    return torch.Generator().manual_seed(int.from_bytes(drawn, "big"))
