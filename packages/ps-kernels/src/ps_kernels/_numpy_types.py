"""Convert element types in NumPy, which has no bfloat16: it is stored as uint16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ps_kernels._arrays import Array

Singles = NDArray[np.float32]


def to_singles(x: Array) -> Singles:
    """Return a new float32 array of the same values."""
    if x.dtype == np.uint16:
        widened: Singles = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return widened
    singles: Singles = x.astype(np.float32)
    return singles


def round_into(out: Array, x: Singles) -> None:
    """Write float32 values to a 16-bit array, rounded to nearest even; a nan stays one."""
    if out.dtype != np.uint16:
        out[...] = x
        return
    bits = x.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = (bits + half) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    out[...] = np.where(np.isnan(x), quiet, rounded)
