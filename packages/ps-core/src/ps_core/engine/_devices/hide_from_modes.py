"""Hide the engine's own operations from the modes of PyTorch that the user entered.

[Note: what a user's mode may see]
A mode sees each operation on this thread, and may change it, keep its result, or count it. Selective activation
checkpointing is such a mode: it stores the results of operators in forward, and returns them in backward, in order. A
group is fetched in forward, and perhaps not in backward. So a fetch that a mode sees would shift that order. What the
engine does by itself is none of the model's operations. What the user calls, such as a step, modes may see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from ps_core.engine._devices.tensor_bytes import TensorBytesTracker, push_modes, replace_modes

P = ParamSpec("P")
R = TypeVar("R")
dispatch_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
"""Return how many modes of a kind are on; none: nothing has to be hidden."""
modes_are_off = torch._C._is_torch_function_all_disabled
"""Return True within `modes_off`."""


@contextmanager
def modes_off() -> Iterator[None]:
    """Switch off all modes but those that count the engine's non-model bytes."""
    modes = replace_modes(lambda found: [mode for mode in found if isinstance(mode, TensorBytesTracker)])
    others = [mode for mode in modes if not isinstance(mode, TensorBytesTracker)]
    del modes  # or a counter that is taken off meanwhile would stay alive
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        push_modes(others)


def hidden_from_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the engine's whose operations modes of the user's must not see."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (dispatch_modes() or function_modes()):
            return function(*args, **kwargs)
        with modes_off():
            return function(*args, **kwargs)

    return call
