"""Make state dicts whose values rank 0 alone keeps."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.hooks import hooks_of


def rank0_only(model: nn.Module) -> AbstractContextManager[None]:
    """Make state dicts of the model and its optimizer in this block, with values on rank 0 alone.

    All ranks call ``state_dict()``. Rank 0 gets what it always gets. The others get tensors on device ``meta``, which
    take no memory. One process keeps all values.
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
