"""Make state dicts that have values on rank 0 only."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.find_hooks import hooks_of


def rank0_only(model: nn.Module) -> AbstractContextManager[None]:
    """Make state dicts of the model and its optimizer have values on rank 0 only, inside this block.

    All ranks must call ``state_dict()``. On other ranks managed parameters and optimizer states are tensors on device
    ``meta``; buffers are not changed. With one process this changes nothing.
    """
    return _Rank0Only(hooks_of(model).engine)


class _Rank0Only(AbstractContextManager[None]):
    """Implement `rank0_only` as a class: an interrupt may come between a generator and its caller."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = False

    def __enter__(self) -> None:
        together = self._engine.together
        self._before = self._engine.state_dicts.put_on_meta(on=together is not None and together.process != 0)

    def __exit__(self, *_: object) -> None:
        self._engine.state_dicts.put_on_meta(on=self._before)
