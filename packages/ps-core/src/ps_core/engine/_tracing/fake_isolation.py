"""Isolate a pass on fake tensors from the rest of the process.

[Note: what a fake pass leaves alone]
The pass runs the model's Python code once more, on a copy (`fake_copy`). Random states of Python, NumPy and PyTorch
(CUDA's too) are restored afterwards. So are grad mode, warning filters and modes. Some features are off meanwhile: the
user's modes (but a default device stays), warnings, PyTorch's log lines about fake tensors, and compilation. Autocast's
cache is emptied. Python objects that the code reaches outside of the copy are restored (`fake_snapshot`). A fake tensor
that was stored elsewhere is removed there (`fake_leftovers`); the next pass would compute with it. Effects outside of
Python's objects happen once more.

Much of this state belongs to the whole process. So random numbers that another thread draws during the pass come again
after it. And one fake pass runs at a time, until its fake tensors are removed: another one would find them in caches.
Two threads could also leave their modes in the order in which they entered. Then PyTorch's flag for "a dispatch mode is
on" would stay set, and nothing would be compiled any more.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import RLock
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from ps_core.engine._devices.tensor_bytes import TensorBytesTracker, pop_user_modes, push_modes

WAIT_S = 60.0
"""Seconds to wait for another thread's fake pass: a model whose code waits for that thread would wait for ever."""
_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")
"""PyTorch's logger of operators that refuse fake tensors, which writes tracebacks even if the caller handles the
error.
"""


def _say_nothing(_: logging.LogRecord) -> bool:
    return False


class Isolation:
    """Save and restore state around a fake pass; see [Note: what a fake pass leaves alone]."""

    _one_at_a_time = RLock()

    def __init__(self) -> None:
        self._exits = ExitStack()

    @classmethod
    def forget_other_threads(cls) -> None:
        """Replace the lock in a forked process, where the thread that held the old one does not exist."""
        cls._one_at_a_time = RLock()

    @classmethod
    @contextmanager
    def alone(cls) -> Iterator[None]:
        """Wait for other threads' fake passes; theirs then wait until the block ends."""
        lock = cls._one_at_a_time
        if not lock.acquire(timeout=WAIT_S):
            raise TimeoutError(f"a fake pass of another thread did not end within {WAIT_S} s; it may wait for this one")
        try:
            yield
        finally:
            lock.release()

    def enter(self, *contexts: AbstractContextManager[Any]) -> None:
        """Save this thread's state, then enter the contexts in this order; call this within `alone`."""
        self._exits.callback(_forget_casts)
        for restore in _random_states():
            self._exits.callback(restore)
        self._exits.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self._exits.callback(_LOGGER.removeFilter, _say_nothing)
        _LOGGER.addFilter(_say_nothing)
        self._exits.callback(push_modes, pop_user_modes())
        self._exits.enter_context(_no_function_modes())
        if "torch._dynamo" in sys.modules:  # not imported: nothing is compiled, and the import takes seconds
            stance: Any = torch.compiler.set_stance("force_eager")  # no compilation for fake tensors
            self._exits.enter_context(stance)
        self.add(*contexts)

    def add(self, *contexts: AbstractContextManager[Any]) -> None:
        """Enter more contexts, in this order."""
        for context in contexts:
            self._exits.enter_context(context)

    def track(self, tracker: TensorBytesTracker) -> None:
        """Start a tracker, which is stopped before anything else is restored."""
        self._exits.callback(tracker.stop)
        tracker.start()

    def restore(self) -> None:
        """Restore everything; do nothing if `enter` was not called."""
        self._exits.close()


os.register_at_fork(after_in_child=Isolation.forget_other_threads)


@contextmanager
def _no_function_modes() -> Iterator[None]:
    """Switch off this thread's function modes, except the default device, which PyTorch keeps lowest."""
    above: list[TorchFunctionMode] = []
    while torch._C._len_torch_function_stack():
        mode = torch._C._pop_torch_function_stack()
        above.insert(0, mode)
        if isinstance(mode, DeviceContext):
            torch._C._push_on_torch_function_stack(above.pop(0))
            break
    try:
        yield
    finally:
        for mode in above:
            torch._C._push_on_torch_function_stack(mode)


def _random_states() -> list[Callable[[], None]]:
    """Return calls that restore the states of all global generators."""
    before = random.getstate()
    calls: list[Callable[[], None]] = [lambda: random.setstate(before)]
    numpy: Any = sys.modules.get("numpy")  # if not imported, nothing draws from it
    if numpy is not None:
        state = numpy.random.get_state()
        calls.append(lambda: numpy.random.set_state(state))
    for generator in (torch.default_generator, *torch.cuda.default_generators):  # CUDA's are none until it has begun
        calls.append(_restoring(generator))
    return calls


def _restoring(generator: torch.Generator) -> Callable[[], None]:
    state = generator.get_state()
    return lambda: (generator.set_state(state), None)[1]


def _forget_casts() -> None:
    """Clear autocast's casts of fake parameters, which it would keep until the user's autocast region ends."""
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()
