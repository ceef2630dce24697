"""Count what an operator computes: products and attention by arithmetic, others by elements read and written."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ps_core._trace import Amounts

_aten = torch.ops.aten
_ATTENTION = {
    getattr(_aten, f"_scaled_dot_product_{kind}_attention{suffix}")
    for kind in ("flash", "efficient", "cudnn")
    for suffix in ("", "_backward")
} | {
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
}
_NO_WORK = ("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.detach", "aten._unsafe_view")
"""Operators that neither read nor write anything."""
_MAY_BE_TANH = (_aten.gelu, _aten.gelu_backward)


def amounts_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> Amounts:
    """Count what one call of an operator computes."""
    packet = getattr(func, "overloadpacket", func)
    if packet in _ATTENTION:
        return _attention(*args[:4], backward=str(packet).endswith("_backward"))
    formula = flop_registry.get(packet)
    if formula is not None:
        with suppress(AssertionError):  # a formula that refuses these shapes: a forecast is no reason to refuse a model
            return Amounts(float(formula(*args, **kwargs, out_val=result)), launches=1.0)
    made = _tensors(result)
    if getattr(func, "is_view", False) or str(packet) in _NO_WORK or not made:
        return Amounts()
    tanh = packet is _aten.tanh or (packet in _MAY_BE_TANH and kwargs.get("approximate") == "tanh")
    return Amounts(
        elements=float(sum(tensor.numel() for tensor in (*_tensors((args, kwargs)), *made))),
        tanhs=float(made[0].numel()) if tanh else 0.0,
        launches=1.0,
    )


def _attention(*tensors: Any, backward: bool) -> Amounts:
    """Count attention: two products forward; five backward, whose first tensor is the output's gradient.

    Not by PyTorch's own formula: that of 2.11 refuses queries with more heads than keys have.
    """
    query, key, value = (each.shape for each in (tensors[1:] if backward else tensors[:3]))
    of_keys, of_values = (3, 2) if backward else (1, 1)
    rows = float(math.prod(query[:-1]))
    flops = 2.0 * rows * key[-2] * (of_keys * query[-1] + of_values * value[-1])
    queries, queries_backward = (0.0, rows) if backward else (rows, 0.0)
    return Amounts(flops, 0.0, flops, queries, queries_backward, launches=1.0)


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
