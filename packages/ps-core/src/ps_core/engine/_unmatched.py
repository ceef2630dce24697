"""Choices of parameters that choose none: probably misspelled, and said in a line.

No error, for one `Options`, or one optimizer, may serve several models, not all of which have such parameters.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterator

from ps_core._options import Options
from ps_core.engine._messages import say
from ps_core.engine._optimizer import ChunkedOptimizer

_LIKE = 0.6


def say_unmatched(model: str, names: Collection[str], options: Options, front: ChunkedOptimizer | None) -> None:
    """A line for each pattern of ``keep_fp32``, and for each `Group`, that no parameter of the model is of."""
    for pattern in options.keep_fp32:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            nearest = "".join(f"; did you mean {near!r}?" for near in _nearest(pattern, names))
            say(f"{model}: keep_fp32 has {pattern!r}, which is the whole name of no parameter{nearest}")
    for index, group in enumerate([] if front is None else front.param_groups[1:]):
        if not group["params"]:
            before = " that no group before it has" if index else ""
            say(f"{model}: groups[{index}] has no parameter: its match is true for none{before}")


def _nearest(pattern: str, names: Collection[str]) -> Iterator[str]:
    """What may have been meant, if anything is near: a pattern around it, or a name; one at most."""
    words = pattern.strip("*.")
    inside = f"*{words}*"
    if words and any(fnmatch.fnmatchcase(name, inside) for name in names):
        yield inside
        return
    owners: dict[str, str] = {}
    for name in names:
        parts = name.split(".")
        for first in range(len(parts)):
            for last in range(first + 1, len(parts) + 1):
                owners.setdefault(".".join(parts[first:last]), name)
    yield from (owners[near] for near in difflib.get_close_matches(words, owners, n=1, cutoff=_LIKE))
