"""Errors in one line, as ranks tell each other."""

from __future__ import annotations

from collections.abc import Sequence

FAILED_ELSEWHERE = "it had failed on another rank"
"""The error of a rank that failed only because another one had."""
_MOST_CHARACTERS = 300


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type where there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def describe_exception(error: BaseException | None) -> str:
    """Return an exception's name and first line; empty for None and for an exit that is no failure.

    NCCL's own words are last, where PyTorch has any.
    """
    if error is None or isinstance(error, GeneratorExit):
        return ""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return ""
    first, _, last = str(error).partition("Last error:")
    lines = [(part.strip().splitlines() or [""])[0][:_MOST_CHARACTERS] for part in (first, last)]
    return ": ".join([type(error).__name__, *filter(None, lines)])


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as a message names them."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def failed_ranks(reports: Sequence[str]) -> str:
    """Name the ranks that failed, with their error; ``reports``: each rank's, empty where nothing went wrong."""
    failed = [(rank, report) for rank, report in enumerate(reports) if report]
    _, first = next((each for each in failed if each[1] != FAILED_ELSEWHERE), failed[0])
    return f"{name_ranks([rank for rank, report in failed if report == first])}: {first}"
