"""Write to a stream whose reader may have gone (``| head``), which is no error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


def tell(text: str, stream: TextIO | None, *, end: str = "\n") -> None:
    """Write a line (or text that ends in ``end``) to the stream; None: the process began with it closed."""
    if stream is None:
        return
    try:
        print(text, file=stream, end=end, flush=True)
    except BrokenPipeError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """Discard what is, or will be, written to the stream."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextmanager
def progress(stream: TextIO | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows one line in place of the one before; erase the last one.

    Nothing is shown if the stream is no terminal.
    """
    shown = stream is not None and stream.isatty()

    def show(line: str) -> None:
        if shown and stream is not None:
            print(f"\r\x1b[K{line}", end="", file=stream, flush=True)

    try:
        yield show
    finally:
        show("")
