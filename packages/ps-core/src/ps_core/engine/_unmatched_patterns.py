"""Report arguments of `chunked` without effect, and what it changes unasked: earlier gradients, mixed types.

These are no errors. One `Options`, or one optimizer, may serve several models, not all of which have such parameters.
Loops that begin by forgetting gradients lose nothing.
"""

from __future__ import annotations

import difflib
import fnmatch
import warnings
from collections.abc import Collection, Iterator

from torch import nn

from ps_core._options import Options
from ps_core.engine._optim.optimizer import ChunkedOptimizer
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._support.log import log_line

_LIKE = 0.75
_SHOWN = 3
"""Number of names that a log line shows."""


def log_unmatched_patterns(
    model: str, names: Collection[str], options: Options, optimizer: ChunkedOptimizer | None
) -> None:
    """Log a line for each pattern of ``keep_fp32``, and each `Group`, that no parameter matches."""
    for pattern in options.keep_fp32:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            nearest = "".join(f"; did you mean {near!r}?" for near in _nearest(pattern, names))
            log_line(f"{model}: keep_fp32 has {pattern!r}, which is the whole name of no parameter{nearest}")
    for index, group in enumerate([] if optimizer is None else optimizer.param_groups[1:]):
        if not group["params"]:
            before = " that no group before it has" if index else ""
            log_line(f"{model}: groups[{index}] has no parameter: its match is true for none{before}")


def log_lowered(model: str, records: Collection[ParamState], kept: tuple[str, ...]) -> None:
    """Log parameters in fp32 that are computed in 16 bits, where others came in 16 bits: they may be fp32 on purpose.

    ``kept``: the patterns of ``keep_fp32`` so far.
    """
    narrow = next((record.given[1] for record in records if record.given[1].itemsize == 2), None)
    lowered = {record.name: record.dtype for record in records if record.given[1].itemsize > record.dtype.itemsize}
    if narrow is None or not lowered:
        return
    names, computed = list(lowered), next(iter(lowered.values()))
    patterns = (*kept, *_patterns(names, [record.name for record in records if record.name not in lowered]))
    shown = ", ".join(map(repr, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} others" if names[_SHOWN:] else "")
    log_line(
        f"{model}: {shown} came as float32 beside parameters of {str(narrow).removeprefix('torch.')}, and are computed "
        f"in {str(computed).removeprefix('torch.')}; to compute them in fp32: Options(keep_fp32={patterns!r})"
    )


def _patterns(names: Collection[str], others: Collection[str]) -> list[str]:
    """Return patterns that match these names and no others, with stars for numbers where that is possible."""
    found: dict[str, None] = {}
    for name in names:
        wide = ".".join("*" if part.isdigit() else part for part in name.split("."))
        alone = not any(fnmatch.fnmatchcase(other, wide) for other in others)
        found[wide if alone and wide.strip("*.") else name] = None
    return list(found)


def warn_of_gradients(model: nn.Module) -> None:
    """Warn if a plain loop's first step would use gradients that parameters have already."""
    names = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is not None]
    if names:
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        warnings.warn(
            f"{names[0]!r}{others} have gradients from before chunked(...), which are forgotten: call it before "
            "backward, or model.zero_grad() before it",
            stacklevel=3,
        )


def _nearest(pattern: str, names: Collection[str]) -> Iterator[str]:
    """Yield the pattern that the user may have meant, if a name is similar: at most one."""
    words = pattern.strip("*.")
    if not words:
        return
    small = words.lower()
    for name in names:
        start = name.lower().find(small)  # other letters' case, or stars left out
        if start >= 0:
            yield f"*{name[start : start + len(small)]}*"
            return
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    runs = sorted({run for name in names for run in _runs(name, words.count(".") + 1)}) if "." in words else parts
    yield from (f"*{near}*" for near in difflib.get_close_matches(words, runs, n=1, cutoff=_LIKE))


def _runs(name: str, length: int) -> Iterator[str]:
    """Yield every run of ``length`` consecutive parts of a name."""
    parts = name.split(".")
    yield from (".".join(parts[first : first + length]) for first in range(len(parts) - length + 1))
