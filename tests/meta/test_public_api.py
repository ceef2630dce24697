"""The public names, as a list that a change has to change too."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).resolve().parents[2] / "packages"
HOW = "write the new list with: python tests/meta/test_public_api.py"


def modules() -> Iterator[str]:
    """Every package, and every module whose name has no underscore in front."""
    for package in sorted(SOURCES.glob("*/src/*/__init__.py")):
        folder = package.parent
        yield folder.name
        yield from (
            f"{folder.name}.{path.stem}"
            for path in sorted(folder.iterdir())
            if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").is_file())
        )


def offered(module: ModuleType) -> list[str]:
    """What a module offers: ``__all__``, or without one what it defines under a public name."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        assert len(set(listed)) == len(listed), f"{module.__name__}.__all__ names something twice"
        return list(listed)
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return [name for name in own if not name.startswith("_")]


def names() -> list[str]:
    """``module.name`` for everything that a public module offers."""
    found = []
    for name in modules():
        module = importlib.import_module(name)
        assert "." in name or hasattr(module, "__all__"), f"{name} has no __all__"
        for each in offered(module):
            assert hasattr(module, each), f"{name}.__all__ names {each}, which is not there"
            found.append(f"{name}.{each}")
    found += integrations()
    return sorted(found)


def integrations() -> Iterator[str]:
    """The same of the integrations, whose libraries need not be installed: read, not imported."""
    for path in sorted(SOURCES.glob("*/src/*/integrations/[a-z]*.py")):
        (listed,) = (
            node.value
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        yield from (f"ps_core.integrations.{path.stem}.{name}" for name in ast.literal_eval(listed))


def test_public_api() -> None:
    written = Path(__file__).with_name("public_api.txt").read_text("utf-8").splitlines()
    assert written == names(), HOW


if __name__ == "__main__":
    Path(__file__).with_name("public_api.txt").write_text("\n".join(names()) + "\n", "utf-8")
