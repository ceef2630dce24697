"""Count what an operator computes: products and attention by arithmetic, others by elements read and written."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ps_core._trace import Amounts

_aten = torch.ops.aten
_FLASH, _FLASH_BACKWARD = (
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_backward,
)
_FLOPS = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_FLASH],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[_FLASH_BACKWARD],
}
_NO_WORK = ("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.detach", "aten._unsafe_view")
"""Operators that neither read nor write anything."""
_MAY_BE_TANH = (_aten.gelu, _aten.gelu_backward)


def amounts_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> Amounts:
    """Count what one call of an operator computes."""
    packet = getattr(func, "overloadpacket", func)
    formula = _FLOPS.get(packet)
    if formula is not None:
        flops = float(formula(*args, **kwargs, out_val=result))
        name = str(packet)
        if "_scaled_dot_product" not in name:
            return Amounts(flops)
        rows = float(math.prod(args[0].shape[:-1]))  # rows of the queries, or of the output's gradient
        backward = name.endswith("_backward")
        return Amounts(flops, 0.0, flops, *((0.0, rows) if backward else (rows, 0.0)))
    made = _tensors(result)
    if getattr(func, "is_view", False) or str(packet) in _NO_WORK or not made:
        return Amounts()
    tanh = packet is _aten.tanh or (packet in _MAY_BE_TANH and kwargs.get("approximate") == "tanh")
    return Amounts(
        elements=float(sum(tensor.numel() for tensor in (*_tensors((args, kwargs)), *made))),
        tanhs=float(made[0].numel()) if tanh else 0.0,
    )


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
