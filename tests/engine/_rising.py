"""A tide that counts while a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ps_core.engine._devices.tensor_bytes import TensorBytesTracker


@contextmanager
def rising(tide: TensorBytesTracker) -> Iterator[TensorBytesTracker]:
    tide.start()
    try:
        yield tide
    finally:
        tide.stop()
