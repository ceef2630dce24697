"""docs/command.md says what the parser does."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import pytest

from _tables import PAGE, fill, parsers
from ps_core import cli
from ps_core._simulate.machine import NUMBERS, machine
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


def keys_on_the_page(command: str) -> list[dict[str, str]]:
    """Read the page's tables of a command's JSON document: each key with its description."""
    page = PAGE.read_text(encoding="utf-8").partition("\n## JSON\n")[2].partition("\n## ")[0]
    section = page.partition(f"### `{command}`\n")[2].partition("\n### ")[0]
    return [
        {key: says for keys, says in re.findall(r"^\| (`[^|]+) \| (.+) \|$", table, re.M) for key in names(keys)}
        for table in section.split("| key | what it says |\n|---|---|\n")[1:]
    ]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def document(capsys: pytest.CaptureFixture[str], words: str, status: int = 0) -> dict[str, Any]:
    assert cli.main([*words.split(), "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def nested(document: dict[str, Any], key: str) -> set[str]:
    """Return the keys of the inner document; for ``tiers``, those of all tiers together."""
    inner = document[key]
    return set().union(*inner.values()) if key == "tiers" else set(inner)


def test_the_page_has_every_key_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    always, fits, not_fits = keys_on_the_page("plan")
    place = "--gpus 4 --nodes 2 --device-memory 8GiB --host-memory 64GiB --disk 1TiB"
    found = document(capsys, f"plan gpt-2x32 --seq 64 {place}")
    assert set(found) == always.keys() | fits.keys()
    refused = document(capsys, "plan gpt-2x32 --device-memory 1GiB --host-memory 0", cli.DOES_NOT_FIT)
    assert set(refused) == always.keys() | not_fits.keys()
    said = {**always, **fits}
    assert nested(found, "tiers") == {"budget_bytes", "peak_bytes"} == set(names(said["tiers"]))
    assert nested(found, "moved_bytes") == set(names(said["moved_bytes"]))
    assert nested(found, "phases_s") == set(names(said["phases_s"]))
    links = nested(found, "moved_bytes") - {"wire", "network"}
    assert nested(found, "busy_s") == set(names(said["busy_s"])) - {"moved_bytes"} | links


def test_the_page_has_every_key_of_the_largest_model(capsys: pytest.CaptureFixture[str]) -> None:
    (keys,) = keys_on_the_page("scale")
    always, _, _ = keys_on_the_page("plan")
    place = "--gpus 1 --device-memory 2GiB --host-memory 7GiB --seq 64 --min-tflops 0"
    found = document(capsys, f"scale {place}")
    assert set(found) == keys.keys()
    assert always.keys() < set(found["plan"])
    nothing = document(capsys, f"scale {place} --device-memory 700MiB --host-memory 0", cli.DOES_NOT_FIT)
    assert set(nothing) == keys.keys() - {"limit"}


def test_the_page_has_every_key_of_the_doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, measured = keys_on_the_page("doctor")
    monkeypatch.setattr(cli, "warm", lambda: ("compiled C: scalar",))
    assert set(document(capsys, "doctor")) == looked.keys() - {"kernels"}
    assert set(document(capsys, "doctor --warm")) == looked.keys()
    monkeypatch.setattr(cli, "calibrate", lambda: f"# spread: 1 %\n{machine('t4').to_toml()}")
    found = document(capsys, "doctor --calibrate")
    assert set(found) == measured.keys()
    assert set(found["machine"]) == {"name", *NUMBERS}
