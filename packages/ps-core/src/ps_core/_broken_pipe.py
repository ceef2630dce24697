"""Writing to whoever reads; that nobody does any more (``| head``) is no error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


def tell(text: str, stream: TextIO | None, *, end: str = "\n") -> None:
    """Write a line (or what ``end`` makes of it) to the stream; None: the process began with it closed."""
    if stream is None:
        return
    try:
        print(text, file=stream, end=end, flush=True)
    except BrokenPipeError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """Let what is written there from now on, and what waits to be, go nowhere."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextmanager
def progress(stream: TextIO | None) -> Iterator[Callable[[str], None]]:
    """Give a function that shows one line in place of the line before; at the end the line goes.

    Where the stream is no terminal nothing is shown.
    """
    shown = stream is not None and stream.isatty()

    def show(line: str) -> None:
        if shown and stream is not None:
            print(f"\r\x1b[K{line}", end="", file=stream, flush=True)

    try:
        yield show
    finally:
        show("")
