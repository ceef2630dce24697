"""Refused inputs: cases that provoke each message of `InvalidInput`, and then do what the message says.

A table has the cases of one folder of sources. The sources are read as well: every message that names an action has a
case, and every function that raises has one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ps_core import InvalidInput

VERBS = (
    "allowed|assign|build|call|choose|convert|do|export|freeze|give|hand|hold|keep|leave|load|make|move|name|pass|read|"
    "register|release|return|run|save|scale|set|start|train|try|unfreeze|use|wait|work|write|goes|after the block"
)
BEFORE = r"(?:[;:,.(]|\bor|\band|\bfirst|\bcannot [a-z]+)\s+(?:[\w-]+ ){0,2}?"
REMEDY = re.compile(rf"{BEFORE}(?:{VERBS})\b", re.IGNORECASE)
"""What names an action: one of these words where a part of a sentence begins."""


@dataclass(frozen=True)
class Message:
    """The text that one call in the sources makes, with {} for what is filled in, and the function of that call."""

    where: str
    text: str


@dataclass
class Followed:
    """A table of cases, each by a part of its message that no other message has, with {} for what is filled in."""

    cases: dict[str, Callable[..., None]] = field(default_factory=dict)

    def case(self, *parts: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Add a function that provokes messages with `refused`, and follows each."""

        def add(function: Callable[..., None]) -> Callable[..., None]:
            for part in parts:
                assert part not in self.cases, part
                self.cases[part] = function
            return function

        return add

    def row(self, part: str, wrong: Callable[[], Any], *right: Callable[[], Any]) -> None:
        """Add an expression that is refused, and those that follow the message."""
        assert right, "what follows the message?"

        def follow() -> None:
            with refused(part):
                wrong()
            for each in right:
                each()

        self.case(part)(follow)

    def check(
        self,
        folder: Path,
        *,
        others: tuple[str, ...] = (),
        apart: tuple[str, ...] = (),
        elsewhere: Collection[str] = (),
    ) -> None:
        """Fail if a message has no case, or a case no message.

        ``others``: functions that are called with a message's text. ``apart``: folders with tables of their own.
        ``elsewhere``: parts of messages that other tests follow, or their functions.
        """
        known = [each for each in messages(folder, others) if not each.where.startswith((*apart, "/"))]
        gone = [part for part in elsewhere if not any(_has(each, part) for each in known)]
        assert not gone, gone
        found = [each for each in known if not any(_has(each, part) for part in elsewhere)]
        assert found
        assert not (unused := [part for part in self.cases if not any(_has(each, part) for each in found)]), unused
        followed = [each for each in found if any(_has(each, part) for part in self.cases)]
        told = [f"{each.where}: {each.text}" for each in found if REMEDY.search(each.text) and each not in followed]
        assert not told, "these name what to do, and no case does it:\n" + "\n".join(told)
        functions = {each.where for each in found} - {each.where for each in followed}
        assert not functions, "no message of these functions has a case:\n" + "\n".join(sorted(functions))


def _has(message: Message, part: str) -> bool:
    return part in message.text or part == message.where


@contextmanager
def refused(part: str) -> Iterator[Any]:
    """Expect `InvalidInput` with this part of a message; any message if the part is a function's place."""
    pattern = "" if ".py:" in part else ".*".join(re.escape(piece) for piece in part.split("{}"))
    with pytest.raises(InvalidInput) as caught:
        yield caught
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)


def messages(folder: Path, others: tuple[str, ...] = ()) -> Iterator[Message]:
    """Read the sources for every message of `InvalidInput`."""
    for path in sorted(folder.rglob("*.py")):
        module = path.relative_to(folder).as_posix()
        yield from _within(ast.parse(path.read_text("utf-8")), module, ("InvalidInput", *others))


def _within(node: ast.AST, where: str, makers: tuple[str, ...]) -> Iterator[Message]:
    for child in ast.iter_child_nodes(node):
        own = isinstance(child, ast.FunctionDef | ast.ClassDef)
        inner = f"{where.partition(':')[0]}:{child.name}" if isinstance(child, ast.FunctionDef) else where
        if isinstance(child, ast.Call) and ast.unparse(child.func).rpartition(".")[2] in makers:
            yield Message(where, " ".join(_text(each) for each in child.args))
        yield from _within(child, inner if own else where, makers)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each) for each in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "{}"
