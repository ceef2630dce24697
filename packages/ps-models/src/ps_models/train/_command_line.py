"""Make the command line of ``pstar-train`` from `TrainOptions`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from ps_core._errors import InvalidInput
from ps_core._name_suggestions import did_you_mean
from ps_models._version import __version__
from ps_models.train._option_files import from_file, merged
from ps_models.train._options import COMMAND, TrainOptions, flag_of, read, rule_for

STATUS = (
    "Exit status: 0 trained, or stopped by a signal and saved; 3 the model does not fit; 2 input that cannot be used; "
    "1 a loss that is not finite, or anything else; 130 interrupted twice."
)


class _Parser(argparse.ArgumentParser):
    """Raise `InvalidInput` with one line that says what is wrong."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (-[\w-]+)", message)
        if unknown:
            word = unknown[1].replace("_", "-")
            otherwise = f"{COMMAND} --help lists the options"
            near = did_you_mean(word, self._option_string_actions, otherwise, most=1, alike=0.7)
            raise InvalidInput(f"{unknown[1]} is not an option; {near}")
        raise InvalidInput(f"{message.removeprefix('argument ')} ({COMMAND} --help lists the options)")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser, which collects texts only: `TrainOptions` checks values of files and of these."""
    parser = _Parser(
        prog=COMMAND,
        description="Train a transformer, larger than the accelerator's memory if need be. " + STATUS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{COMMAND} {__version__}")
    parser.add_argument(
        "--config", metavar="FILE", help="options from a TOML or YAML file; those given here come before it"
    )
    groups = {}
    for row in fields(TrainOptions):
        section = row.metadata["section"]
        if section not in groups:
            groups[section] = parser.add_argument_group(section.lower())
        rule, what = rule_for(row), row.metadata["what"].replace("`", "").replace("%", "%%")
        if isinstance(row.default, bool):
            said = f"{what} (default: {'yes' if row.default else 'no'})"
            flag = argparse.BooleanOptionalAction
            groups[section].add_argument(flag_of(row), action=flag, default=argparse.SUPPRESS, help=said)
            continue
        said = what if row.default in (None, ()) else f"{what} (default: {row.default})"
        groups[section].add_argument(
            flag_of(row),
            metavar=rule.metavar,
            nargs="+" if rule.several else None,
            default=argparse.SUPPRESS,
            help=said,
        )
    return parser


def parse(argv: Sequence[str] | None) -> TrainOptions:
    """Return the options that a command line gives, its ``--config`` file included."""
    words = vars(make_parser().parse_args(argv))
    config = words.pop("config")
    rows = {row.name: row for row in fields(TrainOptions)}
    line = {name: value if isinstance(value, bool) else read(rows[name], value) for name, value in words.items()}
    return merged({} if config is None else from_file(Path(config)), line)
