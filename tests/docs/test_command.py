"""docs/command.md says what the parser does."""

from __future__ import annotations

import argparse
import re

import pytest

from _tables import PAGE, fill, parsers
from ps_core import cli
from ps_core._units import parse_bytes


def test_the_page_holds_the_tables_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert fill(page) == page, "python tests/pure/_tables.py writes them anew"


def told() -> list[tuple[str, argparse.Action, str]]:
    """Every option whose help names a default that is a value."""
    rows = []
    for command, parser in parsers().items():
        for action in parser._actions:
            found = re.search(r"default: ([\w.]+)\)?$", action.help or "")
            if found and action.default is not None:
                rows.append((command, action, found[1]))
    return rows


def test_every_default_the_help_names_is_the_parsers() -> None:
    rows = told()
    assert len(rows) > 20
    for command, action, text in rows:
        value = action.default
        if isinstance(value, bool):
            assert text == ("yes" if value else "no"), (command, action.option_strings)
        elif isinstance(value, int) and text not in ("none",):
            assert parse_bytes(text) == value, (command, action.option_strings)
        elif isinstance(value, float):
            assert float(text) == value, (command, action.option_strings)
        else:
            assert text == (value or "none"), (command, action.option_strings)


def test_every_option_has_help_and_every_status_is_told() -> None:
    for parser in parsers().values():
        assert all(action.help for action in parser._actions)
    page = PAGE.read_text(encoding="utf-8")
    status = re.search(r"Exit status: 0 done .*?, 3 .*?, 2 .*?,\s1 ", page, flags=re.S)
    assert status
    assert (cli.FITS, cli.DOES_NOT_FIT, cli.BAD_INPUT, cli.FAILED) == (0, 3, 2, 1)


@pytest.mark.parametrize(
    "sequence", [("plan", "gpt2", "--json"), ("scale",), ("doctor", "--json"), ("export", "a", "b", "--masters")]
)
def test_commands_shown_parse(sequence: tuple[str, ...]) -> None:
    cli.make_parser().parse_args(sequence)
