"""Sentences of docstrings are short: about 20 words, never more than `MOST_WORDS`. What functions do comes first."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MOST_WORDS = 24
CODE = re.compile(r"``[^`]*``|`[^`]*`")
"""Counts as one word."""
HEADING = re.compile(r"^\[Note: [^\]]*\]$", re.MULTILINE)
TABLE = re.compile(r"^(?: {4}.*|.*\S {2,}\S.*)$", re.MULTILINE)
"""Lines of a table or a formula: indented, or with columns."""
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*[-*] )")
END = re.compile(r"(?<=[.!?;:])\s+(?=[A-Z`X(\[])")
"""Between two sentences; a colon or a semicolon ends one only before a capital."""
NO_VERBS = {
    *("the", "a", "an", "its", "all", "every", "which", "what", "whether", "how", "where", "that", "true", "false"),
    *("bytes", "seconds", "most", "no", "have", "let"),
}
"""What the docstring of a function may not begin with: words that are no verbs, and two that say nothing."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, its classes, functions and attributes, with their lines."""
    for node in ast.walk(tree):
        if not isinstance(node, Documented):
            continue
        for index, statement in enumerate(node.body):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            text = statement.value.value
            if isinstance(text, str) and (index == 0 or isinstance(node.body[index - 1], ast.Assign | ast.AnnAssign)):
                yield statement.lineno, inspect.cleandoc(text)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring, without headings, tables and formulas."""
    for paragraph in PARAGRAPH.split(TABLE.sub("\n", HEADING.sub("\n", text))):
        yield from END.split(CODE.sub("X", " ".join(paragraph.split())))


def words(sentence: str) -> int:
    """How many words there are."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def faults(name: str, source: str) -> Iterator[str]:
    """Sentences that are too long in a module."""
    for line, text in docstrings(ast.parse(source)):
        for sentence in sentences(text):
            if words(sentence) > MOST_WORDS:
                yield f"{name}:{line}: {words(sentence)} words, at most {MOST_WORDS}: {sentence}"


def test_sentences_are_short(root: Path) -> None:
    paths = {path.as_posix().partition("/src/")[2]: path for path in sorted(root.glob("packages/*/src/**/*.py"))}
    assert len(paths) > 300
    found = [fault for name, path in paths.items() for fault in faults(name, path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def openings(name: str, source: str) -> Iterator[str]:
    """Functions of a module whose docstrings do not begin with what the function does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if re.split(r"\W", text, maxsplit=1)[0].lower() in NO_VERBS:
                yield f"{name}:{node.lineno}: {node.name}: {text.splitlines()[0]}"


def test_docstrings_of_functions_begin_with_a_verb(root: Path) -> None:
    paths = {path.as_posix().partition("/src/")[2]: path for path in sorted(root.glob("packages/*/src/**/*.py"))}
    rows = [row for name, path in paths.items() for row in openings(name, path.read_text("utf-8"))]
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('def f():\n    """Return the bytes."""', 0),
        ('def f():\n    """The bytes."""', 1),
        ('async def f():\n    """True: it is over."""', 1),
        ('class A:\n    """The bytes."""\n    def f(self):\n        """Whether there is room."""', 1),
        ("def f(): ...", 0),
    ],
)
def test_the_guard_of_openings(source: str, count: int) -> None:
    assert len(list(openings("it.py", source))) == count


LONG, SHORT = " ".join(["word"] * 25), " ".join(["word"] * 24)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        (f'"""{SHORT}."""', 0),
        (f'"""{LONG}."""', 1),
        (f'"""{SHORT}. Then {SHORT}."""', 1),
        (f'"""{SHORT}: {SHORT}."""', 1),
        (f'"""{SHORT}: `name` {SHORT}."""', 1),
        (f'"""{SHORT}: `several words are one`."""', 0),
        (f'"""Head.\n\n[Note: of three words]\n{SHORT}.\n"""', 0),
        (f'"""Head.\n\n    {LONG}\n\nname    {LONG}\n"""', 0),
        (f'"""Head:\n\n- {SHORT}\n- {SHORT}\n"""', 0),
        (f'class A:\n    """Head."""\n    a: int\n    """{LONG}."""\n    def f(self):\n        """{LONG}."""', 2),
        (f'async def f():\n    """Head.\n\n    {LONG}.\n    """', 1),
        (f'def f():\n    g()\n    """{LONG}."""', 0),
    ],
)
def test_the_guard_itself(source: str, count: int) -> None:
    assert len(list(faults("it.py", source))) == count
