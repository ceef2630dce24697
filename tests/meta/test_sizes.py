"""One concept a module, one thought a function."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULE_LINES, FUNCTION_LINES, PARAMETERS = 500, 80, 7
"""Parameters are not counted in tests, where fixtures are parameters."""
EXCUSE = re.compile(r"noqa: PLR0913(, PLR0917)? - \w")
"""A function may have more parameters if its first line says why, in these words."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(function: Function) -> int:
    """How many there are, not counting self, cls and the stars."""
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def faults(name: str, source: str) -> Iterator[str]:
    """What is too large in a module."""
    lines = source.splitlines()
    if len(lines) > MODULE_LINES:
        yield f"{name}: {len(lines)} lines, at most {MODULE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Function):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES:
            yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"
        excused = name.startswith("tests/") or EXCUSE.search(lines[node.lineno - 1])
        if parameters(node) > PARAMETERS and not excused:
            yield f"{name}:{node.lineno}: {node.name} has {parameters(node)} parameters, at most {PARAMETERS}"


def test_nothing_is_too_large(root: Path, tracked: list[Path]) -> None:
    modules = [path for path in tracked if path.suffix == ".py"]
    assert modules
    found = [fault for path in modules for fault in faults(str(path.relative_to(root)), path.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x = 1\n" * 500, 0),
        ("x = 1\n" * 501, 1),
        ("def f():\n" + "    x = 1\n" * 79, 0),
        ("def f():\n" + "    x = 1\n" * 80, 1),
        ("class A:\n    async def f(self, a, b, c, d, *, e, f, g): ...", 0),
        ("def f(a, b, c, d, *e, f, g, h, i, **j): ...", 1),
        ("def f(  # noqa: PLR0913 - a name for each\n    a, b, c, d, e, f, g, h): ...", 0),
        ("def f(  # noqa: PLR0913, PLR0917 - a name for each\n    a, b, c, d, e, f, g, h): ...", 0),
        ("def f(  # noqa: PLR0913\n    a, b, c, d, e, f, g, h): ...", 1),
    ],
)
def test_the_guard_itself(source: str, count: int) -> None:
    assert len(list(faults("it.py", source))) == count


def test_tests_may_take_many_fixtures() -> None:
    assert not list(faults("tests/it.py", "def f(a, b, c, d, e, f, g, h): ..."))
