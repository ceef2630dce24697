"""Make batches of samples; the loss is the mean over the trained tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ps_models._loss import IGNORED
from ps_models.train._data import Corpus, generator_of
from ps_models.train._objectives import Batch, unit_of
from ps_models.train._options import TrainOptions
from ps_models.train._training_samples import Samples, packed


class SampleRows:
    """Samples in rows of one length; see [Note: rows] of `_training_samples`."""

    def __init__(self, samples: Samples, options: TrainOptions, end: int) -> None:
        """Fill the rows; ``end``: the token that the end of a row is filled with."""
        self._samples, self._length, self._end = samples, options.seq, end
        self._seed, self._packs = options.seed, options.pack
        lengths = [samples.length(index) for index in range(len(samples))]
        self._rows = packed(lengths, options.seq) if options.pack else [[index] for index in range(len(samples))]
        trained = [samples.trained_of(index) for index in range(len(samples))]
        self._counts = [sum(trained[index] for index in row) for row in self._rows]
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, position: int, count: int) -> Batch:
        """Return the rows from that position on; they repeat without end."""
        return self.rows([self._index(at) for at in range(position, position + count)])

    def counted(self, position: int, count: int) -> int:
        """Return the number of trained tokens in these rows."""
        return sum(self._counts[self._index(at)] for at in range(position, position + count))

    def rows(self, indices: Sequence[int]) -> Batch:
        """Return rows by their numbers, unshuffled."""
        made = [self._row(index) for index in indices]
        return {name: torch.stack([row[name] for row in made]) for name in made[0]}

    def _index(self, position: int) -> int:
        epoch, index = divmod(position, len(self._rows))
        if self._order[0] != epoch:
            generator = generator_of(self._seed, epoch)
            self._order = epoch, torch.randperm(len(self._rows), generator=generator).tolist()
        return self._order[1][index]

    def _row(self, index: int) -> dict[str, Tensor]:
        ids = torch.full((self._length,), self._end)
        labels = torch.full((self._length,), IGNORED)
        positions, at = torch.zeros(self._length, dtype=torch.int64), 0
        for sample in self._rows[index]:
            part = slice(at, at + self._samples.length(sample))
            ids[part], labels[part] = self._samples[sample]
            positions[part] = torch.arange(part.stop - at)
            at = part.stop
        positions[at:] = torch.arange(self._length - at)
        return {"input_ids": ids, "labels": labels} | ({"position_ids": positions} if self._packs else {})


class SampleObjective:
    """Train a model to predict the trained tokens of each sample, each with the same weight in a step."""

    def __init__(self, options: TrainOptions, data: Corpus) -> None:
        assert data.samples is not None, "the data are samples"
        assert data.tokenizer is not None, "samples have a tokenizer"
        train, held = data.samples
        self._train = SampleRows(train, options, data.tokenizer.end)
        rows = SampleRows(held, options, data.tokenizer.end)
        count = min(options.batch * options.eval_batches, len(rows))
        chosen = [index * len(rows) // count for index in range(count)]
        self.validation: Sequence[Batch] = [
            rows.rows(chosen[at : at + options.batch]) for at in range(0, count, options.batch)
        ]
        self.measured_in = f"nats a {unit_of(data)}"

    def batch(self, position: int, count: int) -> Batch:
        """Return the rows; see `Objective`."""
        return self._train.batch(position, count)

    def counted(self, position: int, count: int) -> int:
        """Return the weight; see `Objective`."""
        return self._train.counted(position, count)

    def counted_in(self, batch: Batch) -> int:
        """Return the weight; see `Objective`."""
        return int((batch["labels"] != IGNORED).sum())
