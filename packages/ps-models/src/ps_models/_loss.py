"""Compute the cross entropy of a language model's head, without all logits at once.

[Note: the chunked loss]
The logits of ``rows`` tokens exist at a time, in forward only. Their part of the gradients of hidden states and head is
computed at once. So nothing is computed twice, and backward only multiplies by the loss's own gradient. Each sum over
chunks is in fp32 and rounded once, as a single product over all tokens would be. The mean is taken in backward: the
gradient of a single token has magnitudes that 16-bit types hold.

With compiled kernels, ``ps_kernels.cross_entropy`` overwrites the logits with their gradient, in their own type.
Elsewhere they are first converted to fp32. So are tensors of a compiler, which cannot look into kernels, and fake
tensors of the CPU: most fake passes foresee an accelerator.

The price is memory: the head's gradient exists from forward on. With several chunks and a 16-bit head, its fp32 sum
exists beside it until the last chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.nn import functional

import ps_kernels
from ps_core import InvalidInput
from ps_models._config import DecoderConfig
from ps_models._tiled_loss import add_product, check_labels, tiled_loss

IGNORED = -100
"""The label of a token that does not count in the loss."""


def next_labels(labels_bl: Tensor) -> Tensor:
    """Return labels shifted by one, so that each token has the label of the next; the last has none."""
    return functional.pad(labels_bl[..., 1:], (0, 1), value=IGNORED)


def head_loss(
    x_nh: Tensor,
    tables: Tensor | Sequence[Tensor],
    labels_n: Tensor,
    *,
    bias_v: Tensor | None = None,
    rows: int | None,
    mean: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the cross entropy in fp32, and the logits if they were made whole (``rows`` is None).

    ``tables``: the head's matrix, or its tiles, which have no bias. ``mean`` False: the sum over tokens, in chunks.
    """
    if len(labels_n) != len(x_nh):
        raise InvalidInput(f"labels: expected one for each of {len(x_nh)} tokens, found {len(labels_n)}")
    table_vh, *more = [tables] if isinstance(tables, Tensor) else tables
    if more and rows is not None:
        return tiled_loss(x_nh, [table_vh, *more], labels_n, ignored=IGNORED, rows=rows), None
    if rows is None:
        logits_nv = all_logits(x_nh, [table_vh, *more]) if more else functional.linear(x_nh, table_vh, bias_v)
        return functional.cross_entropy(logits_nv.float(), labels_n, ignore_index=IGNORED), logits_nv
    apply: Any = _ChunkedLoss.apply  # torch does not type it
    return apply(x_nh, table_vh, bias_v, labels_n, rows, torch.is_grad_enabled(), mean), None


def all_logits(x_blh: Tensor, tables: Sequence[Tensor], last: int = 0) -> Tensor:
    """Return the logits of every token, or of the ``last`` tokens of each row; shape blv."""
    if last < 0:
        raise InvalidInput(f"logits_to_keep must be at least 0 (of all tokens), found {last}")
    x_blh = x_blh[:, -last:] if last else x_blh
    parts = [functional.linear(x_blh, table_vh) for table_vh in tables]
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def language_loss(
    x_blh: Tensor,
    tables: Sequence[Tensor],
    labels_bl: Tensor,
    config: DecoderConfig,
    *,
    balance: Tensor | None,
    return_logits: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of the next token plus the experts' balance, and the logits if they were made whole."""
    rows = None if return_logits else config.loss_chunk_tokens
    loss, logits_nv = head_loss(x_blh.flatten(0, 1), tables, next_labels(labels_bl).flatten(), rows=rows)
    logits_blv = None if logits_nv is None else logits_nv.view(*labels_bl.shape, -1)
    return add_balance(loss, balance, config), logits_blv


def add_balance(loss: Tensor, balance: Tensor | None, config: DecoderConfig) -> Tensor:
    """Return the loss plus the weighted balance of experts, if there are any."""
    return loss if balance is None else loss + config.balance_weight * balance


@cache
def _has_kernel(device_type: str) -> bool:
    """Return True if there is a compiled kernel for tensors on a type of device."""
    found = [name for name, state in ps_kernels.backends().items() if state == "available"]
    return {"cuda": "cuda" in found, "cpu": not {"cuda", "torch", "numpy"}.issuperset(found)}.get(device_type, False)


def _by_kernel(x_nh: Tensor, table_vh: Tensor, labels_n: Tensor) -> bool:
    """Return True if a compiled kernel computes the loss; see [Note: the chunked loss]."""
    kind = x_nh.device.type
    classes = (Tensor, FakeTensor) if kind == "cuda" else (Tensor,)
    return (
        type(x_nh) in classes
        and type(labels_n) in classes
        and table_vh.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
        and _has_kernel(kind)
    )


class _ChunkedLoss(Function):
    """Compute the chunked loss; see [Note: the chunked loss]. (Any: what PyTorch passes to and takes from a
    `Function`.)
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - a `Function` takes no keywords
        ctx: Any,
        x_nh: Tensor,
        table_vh: Tensor,
        bias_v: Tensor | None,
        labels_n: Tensor,
        rows: int,
        training: bool,
        mean: bool,
    ) -> Tensor:
        wanted = tuple(training and need for need in ctx.needs_input_grad[:3])
        by_kernel = _by_kernel(x_nh, table_vh, labels_n)
        if by_kernel:
            labels_n = labels_n.long().contiguous()
            check_labels(labels_n, len(table_vh), IGNORED)
        with torch.autocast(x_nh.device.type, enabled=False):
            sums = _Sums(x_nh.to(table_vh.dtype), table_vh, bias_v, wanted)
            for start in range(0, len(labels_n), rows):
                sums.add(start, labels_n[start : start + rows], by_kernel=by_kernel)
        count = (labels_n != IGNORED).sum() if mean else torch.ones_like(sums.loss)
        if any(wanted):
            # In fp16, the sum of so many tokens could overflow, whatever the loss scale is: it is kept divided.
            halvings = (-(-len(labels_n) // rows) - 1).bit_length() if table_vh.dtype is torch.float16 else 0
            found = sums.gradients(x_nh.dtype, halvings)
            ctx.wanted, ctx.halvings = wanted, halvings
            ctx.save_for_backward(count, *(each for each in found if each is not None))
        return sums.loss / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InvalidInput(
                "create_graph=True through a loss in chunks, whose gradients know nothing of what they were made from: "
                "expected a loss over whole logits; set loss_chunk_tokens=None, or leave use_chunked_loss out"
            )
        count, *found = ctx.saved_tensors
        scale = gradient / count.clamp(min=1)  # without a token that counts the loss is nan, but gradients are zero
        scale_of_sums = scale * 2**ctx.halvings if ctx.halvings else scale
        scales, left = (scale, scale_of_sums, scale_of_sums), iter(found)
        gradients = (next(left) * each if wanted else None for wanted, each in zip(ctx.wanted, scales, strict=True))
        return (*gradients, None, None, None, None)


class _Sums:
    """The sums over chunks: the loss, and the requested gradients, for the sum over all tokens."""

    def __init__(self, x_nh: Tensor, table_vh: Tensor, bias_v: Tensor | None, wanted: tuple[bool, ...]) -> None:
        self.x_nh, self.table_vh, self.bias_v = x_nh, table_vh, bias_v
        self.loss = torch.zeros((), dtype=torch.float32, device=x_nh.device)
        self.of_x, self.of_table, self.of_bias = wanted
        self.x_grad_nh = torch.empty_like(x_nh) if self.of_x else None
        self.table_grad_vh: Tensor | None = None
        self.bias_grad_v: Tensor | None = None

    def add(self, start: int, labels_r: Tensor, *, by_kernel: bool) -> None:
        """Add the chunk of tokens from ``start`` on."""
        x_rh = self.x_nh[start : start + len(labels_r)]
        errors = self._errors_by_kernel if by_kernel else self._errors
        # No name for the logits here: they go as soon as they are fp32.
        errors_rv = errors(functional.linear(x_rh, self.table_vh, self.bias_v), labels_r)
        if errors_rv is None:
            return
        if self.of_bias:
            part_v = errors_rv.sum(0)
            self.bias_grad_v = part_v if self.bias_grad_v is None else self.bias_grad_v.add_(part_v)
        errors_rv = errors_rv.to(x_rh.dtype)
        if self.x_grad_nh is not None:
            torch.mm(errors_rv, self.table_vh, out=self.x_grad_nh[start : start + len(labels_r)])
        if self.of_table:
            alone = len(x_rh) == len(self.x_nh)
            self.table_grad_vh = add_product(self.table_grad_vh, errors_rv, x_rh, alone=alone)

    @property
    def _wanted(self) -> bool:
        return self.of_x or self.of_table or self.of_bias

    def _errors(self, logits_rv: Tensor, labels_r: Tensor) -> Tensor | None:
        """Add the loss; return probabilities, less one for the right token; zero for tokens that do not count."""
        logits_rv = logits_rv.float()
        counts_r1 = (labels_r != IGNORED)[:, None]
        labels_r1 = labels_r[:, None].where(counts_r1, 0)
        logits_rv -= logits_rv.amax(1, keepdim=True)
        right_r1 = logits_rv.gather(1, labels_r1)
        powers_rv = logits_rv.exp_()
        sums_r1 = powers_rv.sum(1, keepdim=True)
        self.loss += (sums_r1.log() - right_r1).where(counts_r1, 0.0).sum()
        if not self._wanted:
            return None
        return powers_rv.mul_(counts_r1 / sums_r1).scatter_add_(1, labels_r1, -counts_r1.float())

    def _errors_by_kernel(self, logits_rv: Tensor, labels_r: Tensor) -> Tensor | None:
        """Compute the loss and errors as `_errors` does, over the logits; in fp32 if they are summed for a bias."""
        if self.of_bias:
            logits_rv = logits_rv.float()
        losses_r = torch.empty(len(labels_r), dtype=torch.float32, device=logits_rv.device)
        if type(logits_rv) is Tensor:  # a fake one has no values, and takes the same bytes
            ps_kernels.cross_entropy(logits_rv, labels_r, losses_r, ignored=IGNORED, gradient=self._wanted)
        self.loss += losses_r.sum()
        return logits_rv if self._wanted else None

    def gradients(self, x_dtype: torch.dtype, halvings: int = 0) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, table and bias; None for those not requested.

        Those of table and bias are halved ``halvings`` times.
        """
        dtype = self.table_vh.dtype
        for sum_of_chunks in (self.table_grad_vh, self.bias_grad_v) if halvings else ():
            if sum_of_chunks is not None:
                sum_of_chunks.mul_(2.0**-halvings)
        if not len(self.x_nh):
            self.table_grad_vh = torch.zeros_like(self.table_vh) if self.of_table else None
            self.bias_grad_v = None if self.bias_v is None or not self.of_bias else torch.zeros_like(self.bias_v)
        return (
            None if self.x_grad_nh is None else self.x_grad_nh.to(x_dtype),
            None if self.table_grad_vh is None else self.table_grad_vh.to(dtype),
            None if self.bias_grad_v is None else self.bias_grad_v.to(dtype),
        )
