"""Compute the costs of a token table on the host, and of a head in tiles.

[Note: the head in tiles]
With a loss in chunks, a tile has one chunk's logits at a time. A tile's chunks are summed in fp32. The table has the
bytes besides the head's input. ``R`` is a chunk's rows, ``W`` a tile's words, ``h`` the hidden size, ``e`` an element's
bytes. An fp32 logit has 4 bytes. In 16 bits there is also the logit that it was made of (``4 + e``):

    forward, one chunk    8RW                             logits, and the same less the largest
      several             + eRW in 16 bits                the last chunk's logits are there while the next are made
    backward, one chunk   max(4RW [(4 + e)RW],            logits,
                          eRW + 2eRh,                     what they give the hidden states, times the largest,
                          eRW + ehW)                      or the tile
      several             4hW + max(8RW,                  beside the tile's sum the last chunk's logits, too
                          eRW + 2eRh, eRW [+ ehW])
    of every tile, and    16T, in backward 20T            labels of its words, sums and right logits
      once more

Brackets are for 16 bits. In backward two gradients of the hidden states exist: the sum over tiles, and the newest.
Without a chunked loss all logits are made at once. Then tiles change the products, not the logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ps_core._errors import InvalidInput
from ps_core._workloads.shapes import Family, Placed, TransformerShape

_HEAD = "lm_head"


def check_apart(shape: TransformerShape, *, head_tiles: int, cpu_embedding: bool) -> None:
    """Raise `InvalidInput` if the head needs all of the table, or has fewer words than tiles."""
    if not cpu_embedding and head_tiles == 1:
        return
    if shape.tied_head or shape.family is Family.BERT:
        own = "" if shape.family is Family.BERT else ", as with --untied-head (tied_head=False)"
        raise InvalidInput(
            f"--cpu-embedding and --head-tiles (cpu_embedding, head_tiles): the head of {shape.name} is its token "
            f"table and needs all of it; allowed with GPTs and Llamas that have a head of their own{own}"
        )
    if head_tiles > shape.vocabulary:
        raise InvalidInput(
            f"--head-tiles (head_tiles): found {head_tiles}, allowed is at most {shape.vocabulary}, the tokens that "
            f"{shape.name} knows"
        )


def in_tiles(placed: Iterable[Placed], shape: TransformerShape, tiles: int) -> Iterator[Placed]:
    """Yield the tensors with the head's matrix cut as `ps_models` cuts it: the first tiles may have one more word."""
    for tensor in placed:
        if tiles == 1 or tensor.name != f"{_HEAD}.weight":
            yield tensor
            continue
        words, more = divmod(shape.vocabulary, tiles)
        for index in range(tiles):
            name = f"{_HEAD}.tiles.{index}.weight"
            yield tensor._replace(name=name, numel=shape.hidden * (words + (index < more)))


@dataclass(frozen=True, kw_only=True)
class TiledHead:
    """The bytes of a head in tiles whose loss is computed in chunks; see [Note: the head in tiles]."""

    shape: TransformerShape
    tiles: int
    tokens: int
    rows: int
    element_bytes: int
    gradient_buffers: bool

    @property
    def words(self) -> int:
        """Return the words of the largest tile."""
        return -(-self.shape.vocabulary // self.tiles)

    @property
    def forward(self) -> int:
        """Return the bytes of forward, besides what the head keeps."""
        last = self.element_bytes if self._several and self._narrow else 0
        return (8 + last) * self.rows * self.words + 16 * self.tokens * (self.tiles + 1)

    @property
    def backward(self) -> int:
        """Return the bytes of backward, besides what the head keeps and the gradient of its input."""
        each, logits, hidden = self.element_bytes, self.rows * self.words, self.shape.hidden
        weight = hidden * self.words if self.gradient_buffers else 0
        errors, states = each * logits, 2 * each * self.rows * hidden
        if self._several:
            most = 4 * weight + max(8 * logits, errors + max(states, each * weight * self._narrow))
        else:
            most = max((4 + each * self._narrow) * logits, errors + max(states, each * weight))
        newest = each * self.tokens * hidden
        return newest + most + 20 * self.tokens * (self.tiles + 1)

    @property
    def _several(self) -> bool:
        return self.rows < self.tokens

    @property
    def _narrow(self) -> bool:
        return self.element_bytes < 4
