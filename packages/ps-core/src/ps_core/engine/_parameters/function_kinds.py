"""Tell by a function of PyTorch's what a call of it needs of a managed parameter: nothing, its shape, its memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Function = Callable[..., Any]


def _descriptor(name: str) -> Any:
    """Return a tensor property itself (any: a C _descriptor, which PyTorch's stubs type as its value)."""
    return getattr(torch.Tensor, name)


def _getters(*names: str) -> set[Function]:
    return {_descriptor(name).__get__ for name in names}


def _methods(*names: str) -> set[Function]:
    return {getattr(torch.Tensor, name) for name in names}


PLAIN = frozenset(
    _getters(
        *("shape", "dtype", "device", "requires_grad", "grad_fn", "ndim", "layout", "_version", "output_nr"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps"),
        *("itemsize", "nbytes", "retains_grad", "grad_dtype", "_backward_hooks", "_post_accumulate_grad_hooks"),
    )
    | _methods(
        *("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed"),
        *("get_device", "__len__", "__hash__", "requires_grad_", "register_hook", "ndimension", "retain_grad"),
        *("register_post_accumulate_grad_hook", "is_same_size", "is_shared", "is_pinned"),
    )
    | {
        _descriptor("requires_grad").__set__,
        _descriptor("_backward_hooks").__set__,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch.is_same_size,
    }
)
"""Functions that need no memory: a parameter that is elsewhere has the right shape, type and device."""

AUTOGRAD = (torch.autograd.grad, torch.autograd.backward)
"""Functions that are given a parameter's edge in the graph in its place."""

STRIDED = frozenset(_methods("stride", "is_contiguous", "storage_offset"))
"""Functions that are answered for the memory that a parameter has on the compute tier."""

SHAPED: frozenset[Function] = frozenset(
    {
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *_methods("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
    }
)
"""Functions that make a tensor like a parameter, and do not read what is in it."""

OPENING = frozenset(
    {
        *_methods("detach", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"),
        *_methods("_typed_storage"),
        *_getters("__cuda_array_interface__"),
    }
)
"""Functions that return the memory itself: writes there may bypass PyTorch's version counter."""

GET_GRAD = _descriptor("grad").__get__
SET_GRAD = _descriptor("grad").__set__
DEL_GRAD = _descriptor("grad").__delete__
GET_DATA = _descriptor("data").__get__
SET_DATA = _descriptor("data").__set__
GET_IS_LEAF = _descriptor("is_leaf").__get__
"""Functions that have an answer of their own each."""


@cache
def changes_in_place(func: Function) -> bool:
    """Return True if a function, by its name, changes its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")) or name == "__setitem__"
    return name.endswith("_")
