"""What of a model need not be on the accelerator as a whole: a token table on the host, a head in tiles.

[Note: the head in tiles]
With a loss in chunks of rows a tile's logits exist for one chunk at a time, and what a tile's chunks add up to is in
fp32. Bytes besides the head's input, ``R`` rows of a chunk, ``W`` words of a tile, ``h`` hidden size, ``e`` bytes of an
element; fp32 logits are 4 bytes each, in 16 bits there are those they were made of, too (``4 + e``):

    forward, one chunk    8RW                             logits, and the same less the largest
      several             + eRW in 16 bits                the last chunk's logits are there while the next are made
    backward, one chunk   max(4RW [(4 + e)RW],            logits,
                          eRW + 2eRh,                     what they give the hidden states, times the largest,
                          eRW + ehW)                      or the tile
      several             4hW + max(8RW,                  beside the tile's sum the last chunk's logits, too
                          eRW + 2eRh, eRW [+ ehW])
    of every tile, and    16T, in backward 20T            labels of its words, sums and right logits
      once more

(Brackets: in 16 bits.) In backward two gradients of the hidden states are there: the one that tiles add to, and the
newest. Where all logits are made at once (no chunked loss) tiles change the products, not the logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ps_core._errors import InvalidInput
from ps_core._workloads.shapes import Family, Placed, TransformerShape

_HEAD = "lm_head"


def check_apart(shape: TransformerShape, *, head_tiles: int, cpu_embedding: bool) -> None:
    """`InvalidInput` where the head needs all of the table, or has fewer words than tiles."""
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
    """The same tensors, the head's matrix cut as `ps_models` cuts it: the first tiles have a word more."""
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
    """Bytes of a head in tiles whose loss is computed in chunks; see [Note: the head in tiles]."""

    shape: TransformerShape
    tiles: int
    tokens: int
    rows: int
    element_bytes: int
    gradient_buffers: bool

    @property
    def words(self) -> int:
        """Of the largest tile."""
        return -(-self.shape.vocabulary // self.tiles)

    @property
    def forward(self) -> int:
        """Besides what the head keeps."""
        last = self.element_bytes if self._several and self._narrow else 0
        return (8 + last) * self.rows * self.words + 16 * self.tokens * (self.tiles + 1)

    @property
    def backward(self) -> int:
        """Besides what the head keeps, and the gradient that comes out of it."""
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
