"""Where the search for the tightest budget of a test begins: where it ended once, as far as that was kept.

What a test finds does not depend on these numbers, only how long it looks. They may be found anew, with `RECORD`:
``TIGHTEST=found.txt python -m pytest tests/engine``, and ``sort found.txt > tests/engine/tightest.txt``.
"""

from __future__ import annotations

import os
from pathlib import Path

RECORD = os.environ.get("TIGHTEST", "")
"""A file to which every budget is added that was found, without a look at those found before."""
_FOUND = Path(__file__).with_name("tightest.txt")
_KEPT = {} if RECORD else dict(reversed(line.split(" ", 1)) for line in _FOUND.read_text("utf-8").splitlines())


def this_test() -> str:
    """Its file and name, from what pytest tells."""
    file, _, name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0].partition("::")
    return f"{Path(file).name}::{name}"


def near(name: str) -> int:
    """Where to begin; 0: nothing is known."""
    return int(_KEPT.get(name, 0))


def record(name: str, size: int) -> None:
    """Keep what was found, if that is wanted."""
    if RECORD:
        with open(RECORD, "a", encoding="utf-8") as file:
            file.write(f"{size} {name}\n")
