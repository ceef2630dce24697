"""States of parameters and chunks change in one module each: everybody else calls the methods that check a change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

OWNED = {
    "_parameters/param_state.py": {"contents", "gradient", "own_gradient", "overwrite_pending"},
    "_memory/chunk.py": {"home", "copies", "version", "extent"},
    "_support/counters.py": {"used_bytes", "peak_bytes", "highest_nonmodel_bytes"},
}
"""By the module that may write them: attributes of `ParamState`, of `Chunk` and `Slot`, and of `ByteLedger`."""
CHANGES = {"pop", "popitem", "clear", "update", "setdefault"}
"""Methods that change a dictionary."""


def stored(target: ast.expr) -> Iterator[ast.Attribute]:
    """Attributes that an assignment to this target, or a deletion of it, changes."""
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from stored(each)
    elif isinstance(target, ast.Starred | ast.Subscript):
        yield from stored(target.value)
    elif isinstance(target, ast.Attribute):
        yield target


def changed(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Every attribute that some statement assigns to, deletes, or changes an item of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            for target in node.targets:
                yield from stored(target)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor | ast.comprehension):
            yield from stored(node.target)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield from stored(node.optional_vars)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            yield from stored(node.func.value)


def faults(name: str, source: str) -> list[str]:
    """Changes of owned attributes of other objects, outside of the module that owns them."""
    owned = {attribute for owner, names in OWNED.items() if owner != name for attribute in names}
    return [
        f"{name}:{each.lineno}: {ast.unparse(each)}"
        for each in changed(ast.parse(source))
        if each.attr in owned and not (isinstance(each.value, ast.Name) and each.value.id == "self")
    ]


def test_states_change_in_their_own_modules_only(root: Path) -> None:
    engine = root / "packages" / "ps-core" / "src" / "ps_core" / "engine"
    for owner, names in OWNED.items():
        written = {each.attr for each in changed(ast.parse((engine / owner).read_text("utf-8")))}
        assert names <= written, f"{owner} does not write {names - written}"
    modules = [*engine.rglob("*.py"), *(root / "packages" / "ps-models" / "src").rglob("*.py")]
    assert len(modules) > 100
    found = [
        fault
        for path in sorted(modules)
        for fault in faults(path.relative_to(engine if engine in path.parents else root).as_posix(), path.read_text())
    ]
    assert not found, "call a method of ParamState, Chunk, Slot or ByteLedger:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("record.gradient = 1", 1),
        ("a.b.contents, c.d = 1, 2", 1),
        ("chunk.copies[0] = slot", 1),
        ("del chunk.copies[0]", 1),
        ("chunk.copies.pop(0)", 1),
        ("store.ledger.used_bytes[0] += 1", 1),
        ("group.chunks[kind].version += 1", 1),
        ("for record.gradient in x:\n    pass", 1),
        ("with a as chunk.home:\n    pass", 1),
        ("x = chunk.copies.get(0)", 0),
        ("class A:\n    def f(self):\n        self.version = 1", 0),
        ("record.norm_part = 1", 0),
    ],
)
def test_the_guard_itself(source: str, count: int) -> None:
    assert len(faults("it.py", source)) == count
    in_slots = any(f".{attribute}" in source for attribute in OWNED["_memory/chunk.py"])
    assert len(faults("_memory/chunk.py", source)) == (0 if in_slots else count)
