"""Add what a precision of 16 bits has to do with an error of PyTorch's about types."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ps_core._errors import PatrickStarError

_SPELLINGS = {torch.bfloat16: ("bf16", "BFloat16"), torch.float16: ("fp16", "Half")}
"""For each type of 16 bits: the precision that computes in it, and the type's name in PyTorch's messages."""


def note_precision(error: BaseException, dtypes: Iterable[torch.dtype]) -> None:
    """Add a note to an error that names one of the 16-bit types that parameters have under management.

    Called on the way out of a failed call, so that calls that succeed do nothing for it.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, PatrickStarError):
        return
    text = str(error)
    for dtype in dtypes:
        precision, spelling = _SPELLINGS.get(dtype, ("", ""))
        if not precision or not (spelling in text or "mixed dtype" in text):
            continue
        note = (
            f"ps_core: chunked(..., precision={precision!r}) made parameters {dtype}, and casts inputs of the model's "
            "own call to it; inputs of other methods, buffers, and tensors that forward makes keep their types. Pass "
            "options=Options(keep_fp32=('module.*',)) for parameters that must be fp32, convert the other tensor by "
            ".to(weight.dtype), leave inputs as they are by Options(cast_inputs=False), or pass precision='fp32'"
        )
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return
