"""A tracker that counts while a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ps_core.engine._devices.tensor_bytes import TensorBytesTracker


@contextmanager
def counting(tracker: TensorBytesTracker) -> Iterator[TensorBytesTracker]:
    tracker.start()
    try:
        yield tracker
    finally:
        tracker.stop()
