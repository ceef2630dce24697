"""The tables of docs/command.md, from the code. ``python tests/pure/_tables.py`` writes them into the page."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from ps_core._command.arguments import make_parser
from ps_core._simulate.machine import MACHINES, NUMBERS

PAGE = Path(__file__).parents[2] / "docs" / "command.md"


def options(command: str) -> str:
    """Every option of a command."""
    rows = ["| option | what it says |", "|---|---|"]
    for action in parsers()[command]._actions:
        if "--help" not in action.option_strings:
            rows.append(f"| {_name(action)} | {action.help} |")
    return "\n".join(rows)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


def _name(action: argparse.Action) -> str:
    metavar = str(action.metavar or "").replace("|", " or ")
    if not action.option_strings:
        return f"`{metavar}`"
    value = f" {metavar}" if metavar else ""
    if action.choices:
        value = " {" + ", ".join(map(str, action.choices)) + "}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def machines() -> str:
    """Every built-in machine's figures, and the names of those that are 0 in all."""
    given = [key for key in NUMBERS if any(getattr(entry, key) for entry in MACHINES.values())]
    rows = ["| machine | " + " | ".join(f"`{key}`" for key in given) + " |", "|---|" + "--:|" * len(given)]
    for name, entry in MACHINES.items():
        rows.append(f"| `{name}` | " + " | ".join(f"{getattr(entry, key):.3g}" for key in given) + " |")
    others = [f"`{key}`" for key in NUMBERS if key not in given]
    lines, line = [], "0 in all of them, for only calibration measures these:"
    for each in others:
        word = f" {each}" + ("." if each == others[-1] else ",")
        if len(line + word) > 128:
            lines, line, word = [*lines, line], "", word[1:]
        line += word
    return "\n".join([*rows, "", *lines, line])


def sections() -> Iterator[tuple[str, str]]:
    """The marker that begins each table, and the table."""
    for command in parsers():
        yield f"<!-- options of {command} -->", options(command)
    yield "<!-- machines -->", machines()


def fill(page: str) -> str:
    """The page with its tables written anew."""
    for marker, table in sections():
        pattern = re.escape(marker) + r"\n(.*?)<!-- end -->"
        page, count = re.subn(pattern, lambda _, m=marker, t=table: f"{m}\n\n{t}\n\n<!-- end -->", page, flags=re.S)
        assert count == 1, marker
    return page


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
