"""Compute the cross entropy of a head in tiles of the vocabulary, each fetched and evicted by itself.

[Note: the loss in tiles]
For each token, a tile gives the logarithm of the sum of its words' powers. It also gives the right word's logit, if it
has that word. These few numbers make the loss, by operators that autograd knows. Backward goes from tile to tile. It
computes the tile's logits again, ``rows`` tokens at a time, then the gradients of tile and hidden states. So the whole
matrix, its gradient, and all logits never exist at once. The price is four products where a whole head takes three.

Gradients of single tokens are made relative to the largest, whose magnitude 16-bit types hold. A tile's chunks are
summed in fp32, as in [Note: the chunked loss]. Autograd adds the tiles' gradients of the hidden states, each rounded.
Only that, and the order of sums, differs from a whole head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from ps_core import InvalidInput

_ELSEWHERE = -1
"""The label of a token whose word is in another tile, or that does not count."""


def tiled_loss(x_nh: Tensor, tables: Sequence[Tensor], labels_n: Tensor, *, ignored: int, rows: int) -> Tensor:
    """Return the mean cross entropy in fp32 of logits over the words of all ``tables``, in order."""
    labels_n = labels_n.long()
    check_labels(labels_n, sum(len(table_vh) for table_vh in tables), ignored)
    counts_n = labels_n != ignored
    sums, rights, first = [], [], 0
    apply: Any = _Tile.apply  # torch does not type it
    for table_vh in tables:
        mine_n = counts_n & (labels_n >= first) & (labels_n < first + len(table_vh))
        sums_n, right_n = apply(x_nh, table_vh, (labels_n - first).where(mine_n, _ELSEWHERE), rows)
        sums.append(sums_n)
        rights.append(right_n)
        first += len(table_vh)
    losses_n = torch.stack(sums).logsumexp(0) - torch.stack(rights).sum(0)
    return losses_n.where(counts_n, 0.0).sum() / counts_n.sum()


def check_labels(labels_n: Tensor, vocabulary: int, ignored: int) -> None:
    """Raise PyTorch's error for a label that is no word; neither a kernel nor any tile notices one."""
    if type(labels_n) is not Tensor:
        return  # a fake pass has no values
    wrong_n = (labels_n != ignored) & ((labels_n < 0) | (labels_n >= vocabulary))
    if labels_n.device.type != "cpu":  # on a device the host must not wait for the check
        torch._assert_async(~wrong_n.any(), f"a label is out of bounds: expected 0 to {vocabulary - 1}")
    elif wrong_n.any():
        raise IndexError(
            f"Target {int(labels_n[wrong_n][0])} is out of bounds: expected 0 to {vocabulary - 1}, or {ignored} for a "
            "token that does not count"
        )


class _Tile(Function):
    """Compute one tile's part; see [Note: the loss in tiles]. (Any: what PyTorch passes to and takes from a
    `Function`.)
    """

    @staticmethod
    def forward(ctx: Any, x_nh: Tensor, table_vh: Tensor, labels_n: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        sums_n = torch.empty(len(x_nh), dtype=torch.float32, device=x_nh.device)
        right_n = torch.zeros_like(sums_n)
        for piece in _pieces(len(x_nh), rows):
            logits_rv = _logits(x_nh[piece], table_vh)
            sums_n[piece] = logits_rv.logsumexp(1)
            labels_r = labels_n[piece]
            found_r = logits_rv.gather(1, labels_r.clamp(min=0)[:, None])[:, 0]
            right_n[piece] = found_r.where(labels_r != _ELSEWHERE, 0.0)
        ctx.rows = rows
        ctx.save_for_backward(x_nh, table_vh, labels_n, sums_n)
        return sums_n, right_n

    @staticmethod
    def backward(ctx: Any, of_sums_n: Tensor, of_right_n: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InvalidInput(
                "create_graph=True through a loss in tiles, which makes its gradients by itself: expected a loss over "
                "whole logits; set loss_chunk_tokens=None"
            )
        x_nh, table_vh, labels_n, sums_n = ctx.saved_tensors
        largest = of_right_n.abs().amax() if len(x_nh) else of_right_n.new_ones(())
        largest = largest.where(largest > 0, 1.0)
        of_x, of_table = ctx.needs_input_grad[:2]
        x_grad_nh = torch.empty_like(x_nh) if of_x else None
        table_grad_vh: Tensor | None = None
        for piece in _pieces(len(x_nh), ctx.rows):
            errors_rv = _logits(x_nh[piece], table_vh).sub_(sums_n[piece, None]).exp_()
            errors_rv *= (of_sums_n[piece] / largest)[:, None]
            labels_r = labels_n[piece]
            mine_r = (of_right_n[piece] / largest).where(labels_r != _ELSEWHERE, 0.0)
            errors_rv.scatter_add_(1, labels_r.clamp(min=0)[:, None], mine_r[:, None])
            errors_rv = errors_rv.to(table_vh.dtype)
            if x_grad_nh is not None:
                x_grad_nh[piece] = (errors_rv @ table_vh) * largest
            if of_table:
                x_rh = x_nh[piece].to(table_vh.dtype)
                table_grad_vh = add_product(table_grad_vh, errors_rv, x_rh, alone=len(x_rh) == len(x_nh))
        if of_table and table_grad_vh is None:
            table_grad_vh = torch.zeros_like(table_vh)
        if table_grad_vh is not None:
            table_grad_vh = table_grad_vh.mul_(largest).to(table_vh.dtype)
        return x_grad_nh, table_grad_vh, None, None


def add_product(total_vh: Tensor | None, errors_rv: Tensor, x_rh: Tensor, *, alone: bool) -> Tensor:
    """Return what these tokens add to a matrix's gradient; in fp32, unless there are no others."""
    if total_vh is None:
        product_vh = errors_rv.t() @ x_rh
        return product_vh if alone else product_vh.float()
    if errors_rv.dtype is torch.float32:
        return total_vh.addmm_(errors_rv.t(), x_rh)
    return total_vh.add_(errors_rv.t() @ x_rh)


def _pieces(tokens: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def _logits(x_rh: Tensor, table_vh: Tensor) -> Tensor:
    with torch.autocast(x_rh.device.type, enabled=False):
        return functional.linear(x_rh.to(table_vh.dtype), table_vh).float()
