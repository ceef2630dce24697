"""Write the options as the tables of docs/training.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

from ps_models.train._options import TrainOptions, flag_of, rule_for


def table() -> str:
    """Return every option as Markdown, a table for each section."""
    return "\n".join(_tables())


def _tables() -> Iterator[str]:
    sections = dict.fromkeys(row.metadata["section"] for row in fields(TrainOptions))
    for section in sections:
        yield f"### {section}\n"
        yield "| option | default | what it says |\n|---|---|---|"
        for row in fields(TrainOptions):
            if row.metadata["section"] == section:
                yield f"| `{usage(row)}` | {_default(row)} | {row.metadata['what']} |"
        yield ""


def usage(row: Field[Any]) -> str:
    """Return an option and what follows it on the command line."""
    rule, name = rule_for(row), flag_of(row)
    if isinstance(row.default, bool):
        return f"{name}`, `--no-{name[2:]}"
    return f"{name} {rule.metavar}" + ("..." if rule.several else "")


def _default(row: Field[Any]) -> str:
    if isinstance(row.default, bool):
        return "yes" if row.default else "no"
    if row.default is None or row.default == ():
        return ""
    shown = f"{row.default:g}" if isinstance(row.default, float) else str(row.default)
    return f"`{shown}`"
