"""Writing to whoever reads; that nobody does any more (``| head``) is no error."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO


def tell(text: str, stream: TextIO | None) -> None:
    """A line for whoever reads the stream; None: the process began with it closed."""
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """Let what is written there from now on, and what waits to be, go nowhere."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
