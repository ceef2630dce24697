"""Objects of the engine are complete when their constructors return: nobody else writes their attributes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ALLOWED = {
    "what is known of a parameter besides its state, which `test_state_owners` keeps": (
        r"_?record|other",
        r"steps|update_count|compiled_block|counted_version|assigned|dropped|grad_proxy|norm_part|factor|staged_factor|tied|parameter"
        r"|bound|offset|group",
    ),
    "where a group is kept, and the moment that used it last": (
        r"group",
        r"fixed_tier|gathered|rank|ranks|last_read_moment|last_grad_moment",
    ),
    "a slot's memory belongs to the store, and its contents to the chunk": (
        r"slot",
        r"memory|offset|place|views|extent|version",
    ),
    "what a pass did, or would do, is written down moment by moment": (r"moment|recording", r"\w+"),
    "a fake tensor that a model's code stored somewhere is removed there, or what was there before put back": (
        r"holder|owner|cell|kind|each",
        r"cell_contents|name",
    ),
    "a parameter that is managed or fake keeps its identity: its class changes, and what goes with that": (
        r"parameter|tensor|each",
        r"__class__|_record|_owner|_recorder|_on_host",
    ),
    "a decorator marks the function that it is given": (
        r"function",
        r"_dynamo_marked_constant|_torchdynamo_disable(_msg)?",
    ),
    "PyTorch gives no other way to change its own objects": (
        r"parameter|ctx|made|module|real|held|counter|flags",
        r"data|grad|COMPILED_CALL_ATTRIBUTE|table|weight|padding|_flat_weight_refs|_backward_hooks|_post_accumulate_grad_hooks"
        r"|_whole|_write|writeable",
    ),
    "the way a weak reference is told not to run when Python ends": (r"weakref\.finalize\(.*\)", r"atexit"),
    "of this thread alone (threading.local)": (r"_buffers", r"memory"),
}
"""By the reason why: the names of objects, and which of their attributes may be written from outside."""


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to, or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        left = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor | ast.comprehension):
        left = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        left = [node.optional_vars]
    else:
        return
    while left:
        target = left.pop()
        if isinstance(target, ast.Tuple | ast.List):
            left += target.elts
        elif isinstance(target, ast.Starred):
            left.append(target.value)
        else:
            yield target


def written(tree: ast.AST) -> Iterator[tuple[int, ast.expr, str]]:
    """Line, object and attribute of every write to an attribute of something other than ``self``."""
    for node in ast.walk(tree):
        found = [(target.value, target.attr) for target in targets(node) if isinstance(target, ast.Attribute)]
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "object.__setattr__"):
            found.append((node.args[0], ast.unparse(node.args[1])))
        for owner, attribute in found:
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                yield owner.lineno, owner, attribute


def declared_privately(tree: ast.Module) -> set[str]:
    """Attributes of the private classes of a module, which are the module's own business."""
    names: set[str] = set()
    for node in tree.body:
        if not (isinstance(node, ast.ClassDef) and node.name.startswith("_")):
            continue
        for inner in ast.walk(node):
            for target in targets(inner):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    names.add(target.attr)
                elif isinstance(target, ast.Name) and inner in node.body:
                    names.add(target.id)
    return names


def reason(owner: ast.expr, attribute: str) -> str | None:
    """Why an attribute may be written from outside; None: it may not."""
    text = ast.unparse(owner)
    name = text if isinstance(owner, ast.Call) else text.rpartition(".")[2]
    for why, (objects, attributes) in ALLOWED.items():
        if re.fullmatch(objects, name) and re.fullmatch(attributes, attribute):
            return why
    return None


def faults(name: str, source: str, used: set[str]) -> Iterator[str]:
    """What a module writes into objects of others; the reasons for what it may write are added to ``used``."""
    tree = ast.parse(source)
    own = declared_privately(tree)
    for line, owner, attribute in written(tree):
        why = reason(owner, attribute)
        if why is not None:
            used.add(why)
        elif attribute not in own:
            yield f"{name}:{line}: {ast.unparse(owner)}.{attribute}"


def test_nothing_is_put_into_an_object_from_outside(root: Path) -> None:
    source = root / "packages" / "ps-core" / "src" / "ps_core" / "engine"
    modules, used = sorted(source.rglob("*.py")), set[str]()
    assert len(modules) > 100
    found = [
        fault for path in modules for fault in faults(str(path.relative_to(source)), path.read_text("utf-8"), used)
    ]
    assert not found, "make it an argument of the constructor, or a method of the owner:\n" + "\n".join(found)
    assert used == set(ALLOWED), "reasons that nothing needs any more"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("class A:\n    def f(self):\n        self.x = self.y[0] = 1", 0),
        ("engine.passes.guide = self", 1),
        ("class A:\n    def f(self):\n        self.x.y = 1", 1),
        ("a.b += 1", 1),
        ("del a.b", 1),
        ("(a.b, [c.d, *e.f]), g = h", 3),
        ("for a.b in c:\n    pass", 1),
        ("with a as b.c:\n    pass", 1),
        ("setattr(a, 'b', 1)", 1),
        ("x: Any\na.b: int = 1", 1),
        ("record.steps = 1", 0),
        ("self.record.steps = 1", 0),
        ("recorder.steps = 1", 1),
        ("record.gradient = 1", 1),
        ("class _A:\n    def __init__(self):\n        self.x = 1\na.x = 1", 0),
        ("class _A:\n    x: int\na.x = a.y = 1", 1),
        ("class A:\n    x: int\na.x = 1", 1),
    ],
)
def test_the_guard_itself(source: str, count: int) -> None:
    assert len(list(faults("it.py", source, set()))) == count
