"""Make batches: of sequences whose next tokens are predicted, or of sequences with hidden tokens.

[Note: hidden tokens]
As in the publication of BERT, 15 per cent of a sequence's tokens are to be guessed. Of these eight in ten are hidden by
the mask, one is any token, and one stays as it is. Some models can tell whether one sentence follows another. Then a
sequence is two parts: in half of the cases both are of one sequence of the data. Otherwise the second is of another
sequence, elsewhere in the same epoch. All of this is drawn from the seed and the sequence's position. So neither
earlier sequences nor the division among processes changes it. Held-back sequences are drawn once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ps_core._errors import InvalidInput
from ps_core._workloads.shapes import TransformerShape
from ps_models._loss import IGNORED
from ps_models.train._data import Corpus, PackedTokens, generator_of
from ps_models.train._model_facts import ModelFacts
from ps_models.train._options import TrainOptions
from ps_models.train._tokenizers import Bytes

Batch: TypeAlias = dict[str, Tensor]
"""A model's inputs by name, the first dimension of each counts sequences."""
HIDDEN, MASKED, EXCHANGED = 0.15, 0.8, 0.1
_LEAST = 8
"""The least tokens of a sequence that is made of two parts."""


class Objective(Protocol):
    """Protocol of what makes batches for training and validation."""

    validation: Sequence[Batch]
    """Batches that are never trained on."""
    measured_in: str
    """The unit of a validation loss."""

    def batch(self, position: int, count: int) -> Batch:
        """Return the sequences from that position on; the data repeat without end."""

    def counted(self, position: int, count: int) -> int:
        """Return the weight of these sequences' loss, relative to others of the same step."""

    def counted_in(self, batch: Batch) -> int:
        """Return the weight of the loss of a batch of ``validation``, or of a part of it."""


class _EachSequence:
    """Give each sequence the same weight."""

    def counted(self, position: int, count: int) -> int:
        """Return the weight; see `Objective`."""
        return count

    def counted_in(self, batch: Batch) -> int:
        """Return the weight; see `Objective`."""
        return len(batch["input_ids"])


def unit_of(data: Corpus) -> str:
    """Return what a token of the data is, in a word."""
    return "byte" if isinstance(data.tokenizer, Bytes) else "token"


class NextTokenObjective(_EachSequence):
    """Train a model to predict the token after each one."""

    def __init__(self, options: TrainOptions, data: Corpus, shape: ModelFacts) -> None:
        self._train = PackedTokens(data.train, options.seq, seed=options.seed, vocabulary=shape.vocabulary)
        held = PackedTokens(data.validation, options.seq, vocabulary=shape.vocabulary)
        rows = torch.split(held.spread(options.batch * options.eval_batches), options.batch)
        self.validation: Sequence[Batch] = [{"input_ids": ids, "labels": ids} for ids in rows]
        self.measured_in = f"nats a {unit_of(data)}"

    def batch(self, position: int, count: int) -> Batch:
        """Return the sequences; see `Objective`."""
        ids = self._train.batch(position, count)
        return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Tokens with a special meaning; None: the data have no such token."""

    mask: int
    first: int | None
    end: int | None

    @property
    def count(self) -> int:
        """Return the number of special tokens in a sequence of two parts."""
        return (self.first is not None) + 2 * (self.end is not None)


def special_tokens(options: TrainOptions, data: Corpus, vocabulary: int) -> SpecialTokens:
    """Return the tokenizer's special tokens, or the one that ``--mask-token`` gives."""
    chosen, mask = data.tokenizer, options.mask_token
    if mask is None and chosen is not None:
        mask = chosen.mask
    if mask is None:
        raise InvalidInput(
            f"--mask-token: found none, and {'token files name' if chosen is None else 'the tokenizer names'} no mask; "
            f"allowed for {options.model} is 0 to {vocabulary - 1}"
        )
    if mask >= vocabulary:
        raise InvalidInput(f"--mask-token: found {mask}, allowed is 0 to {vocabulary - 1} (see --vocab)")
    if chosen is None:
        return SpecialTokens(mask=mask, first=None, end=None)
    return SpecialTokens(mask=mask, first=chosen.first, end=chosen.end)


class MaskedTokenObjective(_EachSequence):
    """Train a model to predict hidden tokens, and whether one part follows another; see [Note: hidden tokens]."""

    def __init__(self, options: TrainOptions, data: Corpus, shape: TransformerShape) -> None:
        self.marks = special_tokens(options, data, shape.vocabulary)
        self._pairs, self._seed = shape.next_sentence, options.seed
        if self._pairs and options.seq < _LEAST:
            raise InvalidInput(f"--seq: found {options.seq}, allowed with {options.model} is at least {_LEAST}")
        self._vocabulary = shape.vocabulary
        self._train = PackedTokens(data.train, options.seq, seed=options.seed, vocabulary=shape.vocabulary)
        self._held = held = PackedTokens(data.validation, options.seq, vocabulary=shape.vocabulary)
        rows = [self._held_back(index) for index in held.evenly(options.batch * options.eval_batches)]
        self.validation: Sequence[Batch] = [
            self._stacked(rows[at : at + options.batch]) for at in range(0, len(rows), options.batch)
        ]
        self.measured_in = f"nats a masked {unit_of(data)}" + (" and next sentence" if self._pairs else "")

    def batch(self, position: int, count: int) -> Batch:
        """Return the sequences; see `Objective`."""
        return self._stacked([self._trained(at) for at in range(position, position + count)])

    def example(self, length: int) -> tuple[Tensor, Tensor]:
        """Return a held-back sequence's first tokens, and the indices of those that are hidden."""
        ids = self._held.checked(self._held.unshuffled(0)[:length])
        return ids, self._chosen(ids, generator_of(self._seed, "example"))

    def _trained(self, position: int) -> Batch:
        def another(further: int) -> Tensor:
            return self._train.sequence(position, further)

        return self._asked(another, self._train.sequences, generator_of(self._seed, "mask", position))

    def _held_back(self, index: int) -> Batch:
        def another(further: int) -> Tensor:
            return self._held.unshuffled((index + further) % self._held.sequences)

        return self._asked(another, self._held.sequences, generator_of("held back", index))

    def _asked(self, another: Callable[[int], Tensor], sequences: int, generator: torch.Generator) -> Batch:
        """Return one sequence with its labels; ``another(n)`` gives the sequence ``n`` further on."""
        if not self._pairs:
            return self._hidden(another(0), generator)
        marks, own = self.marks, another(0)
        elsewhere = sequences > 1 and bool(torch.rand((), generator=generator) < 0.5)
        other = another(1 + int(torch.randint(sequences - 1, (), generator=generator))) if elsewhere else own
        room = len(own) - marks.count
        first, end = (
            torch.tensor([] if each is None else [each], dtype=own.dtype) for each in (marks.first, marks.end)
        )
        one = torch.cat([first, own[: room // 2], end])
        two = torch.cat([other[room // 2 : room], end])
        found = self._hidden(torch.cat([one, two]), generator)
        found["token_type_ids"] = (torch.arange(len(own)) >= len(one)).long()
        found["next_sentence_label"] = torch.tensor(int(elsewhere))
        return found

    def _hidden(self, ids: Tensor, generator: torch.Generator) -> Batch:
        chosen = self._chosen(ids, generator)
        fate = torch.rand(len(chosen), generator=generator)
        drawn = torch.randint(self._vocabulary, (len(chosen),), generator=generator)
        drawn = torch.where(fate < MASKED + EXCHANGED, drawn, ids[chosen])
        labels = torch.full_like(ids, IGNORED)
        labels[chosen] = ids[chosen]
        seen = ids.clone()
        seen[chosen] = torch.where(fate < MASKED, self.marks.mask, drawn)
        return {"input_ids": seen, "labels": labels}

    def _chosen(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the indices of tokens to hide: at least one if there is any that is not special."""
        marks = [each for each in (self.marks.mask, self.marks.first, self.marks.end) if each is not None]
        words = (~torch.isin(ids, torch.tensor(marks))).nonzero()[:, 0]
        count = min(len(words), max(1, round(HIDDEN * len(words))))
        return words[torch.randperm(len(words), generator=generator)[:count]]

    def _stacked(self, rows: Sequence[Mapping[str, Tensor]]) -> Batch:
        found = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        self._train.checked(found["input_ids"])
        self._train.checked(found["labels"].clamp(min=0))
        return found
