"""Encode samples: documents that are learned one by one, each from its own start.

[Note: rows]
A row is a sequence of ``--seq`` tokens with one sample; with ``--pack``, with as many as fit. Rows are filled once. The
longest samples are first, each in the fullest row that has room. An epoch goes through the rows in an order that is
drawn from the seed and the epoch's number. So the position in the data is the number of rows taken so far.

The end of a row is filled with the token that ends a document. No loss counts it, and in a causal model no sample
attends to it. Positions of ``--pack`` begin at 0 with each sample: that is how attention in transformers separates
samples.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ps_core._errors import InvalidInput
from ps_models._loss import IGNORED
from ps_models.train._examples import Document
from ps_models.train._tokenizers import Tokenizer


class Samples:
    """Tokens of samples, one after the other, and for each whether its prediction is trained."""

    def __init__(self, every: Iterable[Document], chosen: Tokenizer, length: int) -> None:
        """Encode documents; none gets longer than ``length`` tokens."""
        self.cut = 0
        """The number of samples that were too long and cut."""
        self.left_out = 0
        """The number of documents in whose first ``length`` tokens nothing is trained."""
        tokens, trained, ends = array("i"), bytearray(), array("q", [0])
        for document in every:
            ids, answers = encoded(document, chosen)
            answers[:1] = [False] * len(answers[:1])  # nothing comes before it that it could be predicted from
            if not any(answers[:length]):
                self.left_out += 1
                continue
            self.cut += len(ids) > length
            tokens.extend(ids[:length])
            trained.extend(answers[:length])
            ends.append(len(tokens))
        self._tokens = torch.frombuffer(tokens, dtype=torch.int32) if tokens else torch.empty(0, dtype=torch.int32)
        self._trained = torch.frombuffer(trained, dtype=torch.bool) if trained else torch.empty(0, dtype=torch.bool)
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all samples."""
        return self._ends[-1]

    @property
    def trained(self) -> int:
        """Return the number of tokens whose prediction is trained."""
        return int(self._trained.sum())

    def length(self, index: int) -> int:
        """Return the number of tokens of a sample."""
        return self._ends[index + 1] - self._ends[index]

    def trained_of(self, index: int) -> int:
        """Return the number of tokens of a sample whose prediction is trained."""
        return int(self._trained[self._ends[index] : self._ends[index + 1]].sum())

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a sample's tokens and their labels."""
        part = slice(self._ends[index], self._ends[index + 1])
        ids = self._tokens[part].to(torch.int64)
        return ids, ids.masked_fill(~self._trained[part], IGNORED)


def encoded(document: Document, chosen: Tokenizer) -> tuple[list[int], list[bool]]:
    """Return a document's tokens, and for each whether it is trained; of examples, only answers are."""
    if isinstance(document, bytes):
        ids = [*chosen.start, *chosen.encode(document).tolist(), chosen.end]
        return ids, [True] * len(ids)
    if document.messages:
        try:
            return chosen.encode_messages(document.messages, document.asked, document.template)
        except ValueError as error:
            raise InvalidInput(f"{document.place}: {error}") from None
    asked = [*chosen.start, *chosen.encode(document.prompt.encode("utf-8", "surrogatepass")).tolist()]
    answer = [*chosen.encode(document.completion.encode("utf-8", "surrogatepass")).tolist(), chosen.end]
    return asked + answer, [False] * len(asked) + [True] * len(answer)


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return which samples share a row; see [Note: rows]. Equal lengths give equal rows."""
    rows: list[list[int]] = []
    spaces: list[int] = []
    """Free tokens of rows, each number once, ascending."""
    with_space: dict[int, list[int]] = defaultdict(list)
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect_left(spaces, lengths[index])
        if place == len(spaces):
            row, left = len(rows), room
            rows.append([])
        else:
            left = spaces[place]
            row = with_space[left].pop()
            if not with_space[left]:
                spaces.pop(place)
        rows[row].append(index)
        left -= lengths[index]
        if left and not with_space[left]:
            insort(spaces, left)
        if left:
            with_space[left].append(row)
    return rows
