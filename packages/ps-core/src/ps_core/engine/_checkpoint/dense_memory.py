"""Tell whether a tensor's elements are in dense memory, which a file can be written from and read into."""

from __future__ import annotations

import torch


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's values are its memory on the CPU, row by row: a file can hold those bytes."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with these values for which `is_plain` is true; the same one if it is plain already."""
    return tensor.to("cpu").resolve_conj().resolve_neg().contiguous()


def not_dense(tensor: torch.Tensor) -> str:
    """Return why a tensor has no dense memory, to be refused; empty: it has."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return f"a tensor of layout {'nested' if tensor.is_nested else tensor.layout} on {tensor.device}"
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.numel() and not _address(tensor):
            kind = "tensor of zeros" if tensor._is_zerotensor() else type(tensor).__name__
            return f"a {kind} without memory of its own"
    return ""


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # it has no storage
        return 0


def not_writable(tensor: torch.Tensor) -> str:
    """Return why a file cannot be read into a tensor, to be refused; empty: it can."""
    if why := not_dense(tensor):
        return f"{why}, expected a dense one"
    if torch._debug_has_internal_overlap(tensor) == 1:
        return "an expanded tensor, whose elements share memory: register its .clone()"
    return ""
