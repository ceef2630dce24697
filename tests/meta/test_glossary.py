"""One word, one meaning: names in the sources, and the page that explains them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

# The page.

ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)`")
OF_TORCH = {"TCPStore"}
"""Names of PyTorch's that the page refers to."""

# Classes and functions.

VAGUE = {"settle", "take", "have", "let", "give", "leave"}
"""Words that do not say what a function does."""

# Words within names.

METAPHORS = {
    *("tide", "pilot", "beat", "roll", "lane", "bench", "wire", "talk", "talks", "turn", "turns", "riser", "risers"),
    *("journal", "farewell", "surgery", "bystander", "bystanders", "remedy", "remedies", "settle", "settled", "keeper"),
    *("payload", "stamp", "risen", "astray", "outlet", "inlet", "face", "front"),
}
"""Words that only those who wrote them understand; in engine, ps_dist and ps_models."""
NO_CLASS = {"Home", "Homes"}
"""A home is a slot; what it is the home of is a `Chunk`."""
ALLOWED = {
    **dict.fromkeys(("Tide", "tide", "tide_svg"), "public names of ps_core.report"),
    "remedies": "a public attribute of DoesNotFit",
    **dict.fromkeys(("wire_bytes", "WIRE", "WIRE_BYTES"), "public in ps_dist; a kind in a plan's format"),
    **dict.fromkeys(("HuggingFace", "HUGGING_FACE", "hugging_face"), "a proper name"),
    "_draw_in_turn": "in turn is plain English",
    "roll_back_chunked": "to roll back is what databases call it, too",
}
"""Names that have such a word and stay, with the reason."""


@cache
def modules(root: Path) -> dict[str, ast.Module]:
    """Every module of the packages, by its path within the sources."""
    found = {}
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        found[path.relative_to(root).as_posix().partition("/src/")[2]] = ast.parse(path.read_text("utf-8"))
    assert len(found) > 200
    return found


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every identifier that a module defines or uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
            if node.asname is not None:
                yield node.asname
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from node.module.split(".")


def words_of(name: str) -> set[str]:
    """The words of an identifier, by underscores and capitals."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def functions_in(tree: ast.AST) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def classes_in(tree: ast.AST) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def room_of(path: str) -> str:
    """A package, or a package of the engine."""
    parts = path.split("/")
    return "/".join(parts[: min(3, len(parts) - 1)] if path.startswith("ps_core/engine/") else parts[:1])


def metaphors_in(path: str, tree: ast.Module) -> set[str]:
    """The words of `METAPHORS` in a module's names, its own included."""
    names = {*names_in(tree), Path(path).stem} - ALLOWED.keys()
    return {word for name in names for word in words_of(name) & METAPHORS} | classes_in(tree) & NO_CLASS


def rows(root: Path) -> list[tuple[str, str, str]]:
    """The page's terms, what they mean, and where they are."""
    found = [
        row
        for row in ROW.findall((root / "docs/glossary.md").read_text("utf-8"))
        if not row[0].startswith(("-", "term"))
    ]
    assert len(found) > 40
    return found


def test_the_page_is_alphabetical_and_names_each_term_once(root: Path) -> None:
    terms = [term for term, _, _ in rows(root)]
    assert all(one.lower() < other.lower() for one, other in pairwise(terms)), [
        pair for pair in pairwise(terms) if pair[0].lower() >= pair[1].lower()
    ]


def test_what_the_page_names_is_in_the_sources(root: Path) -> None:
    known = {name for path, tree in modules(root).items() for name in (*names_in(tree), Path(path).stem)} | OF_TORCH
    for term, _, where in rows(root):
        named = NAME.findall(where)
        assert named, f"{term}: nothing to look for"
        for name in named:
            assert set(name.split(".")) <= known, f"{term}: {name} is not in the sources"


def test_no_two_classes_of_the_engine_have_one_name(root: Path) -> None:
    places = defaultdict(list)
    for path, tree in modules(root).items():
        if path.startswith("ps_core/engine/"):
            for name in classes_in(tree):
                places[name].append(path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not twice


def test_functions_say_what_they_do(root: Path) -> None:
    found = {path: functions_in(tree) & VAGUE for path, tree in modules(root).items()}
    assert not {path: names for path, names in found.items() if names}


def test_names_have_no_metaphors(root: Path) -> None:
    found = defaultdict(set)
    for path, tree in modules(root).items():
        if path.startswith(("ps_core/engine/", "ps_dist/", "ps_models/")):
            found[room_of(path)] |= metaphors_in(path, tree)
    assert not {room: words for room, words in found.items() if words}


def test_what_is_allowed_is_there(root: Path) -> None:
    used = {name for tree in modules(root).values() for name in names_in(tree)}
    assert used >= ALLOWED.keys(), ALLOWED.keys() - used


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class TideGauge: ...", {"tide"}),
        ("def f(old_beat): ...", {"beat"}),
        ("x.low_riser = WIREBench", {"riser", "wire", "bench"}),
        ("from a.pilot import b as talks", {"pilot", "talks"}),
        ("class Home: ...", {"Home"}),
        ("home = rolled = turned = tide_svg = 1", set()),
        ("'tide'  # beat", set()),
    ],
)
def test_the_guard_itself(source: str, words: set[str]) -> None:
    assert metaphors_in("ps_dist/it.py", ast.parse(source)) == words
    assert metaphors_in("ps_dist/talk.py", ast.parse("")) == {"talk"}
