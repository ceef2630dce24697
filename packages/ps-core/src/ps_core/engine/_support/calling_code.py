"""Find the code that called a function of PyTorch, from within the `__torch_function__` of a tensor class."""

from __future__ import annotations

import sys
from types import CodeType, FrameType


def calling_code() -> CodeType | None:
    """Return the code that called the function, behind modes that saw the call first.

    Such a mode is on for a whole process that called `torch.set_default_device`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _answers(frame):
        frame = frame.f_back
    while frame is not None and _answers(frame):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _answers(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__torch_function__"
