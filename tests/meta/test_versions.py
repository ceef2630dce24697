"""Four packages, one version."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("ps-core", "ps-kernels", "ps-dist", "ps-models")


def settings(root: Path, package: str) -> dict[str, Any]:
    text = (root / "packages" / package / "pyproject.toml").read_text("utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def test_the_folders_are_these(root: Path) -> None:
    found = sorted(path.parent.name for path in root.glob("packages/*/pyproject.toml"))
    assert found == sorted(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_one_version(root: Path, package: str) -> None:
    own = importlib.import_module(package.replace("-", "_")).__version__
    assert own == importlib.import_module("ps_core").__version__
    assert own == importlib.metadata.version(package)
    assert f"## {own}" in (root / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_pinned_to_it(root: Path, package: str) -> None:
    version = importlib.import_module("ps_core").__version__
    project = settings(root, package)
    wanted = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    for line in chain.from_iterable(wanted):
        name = re.match(r"[\w-]+", line)
        assert name is not None
        if name[0] in PACKAGES:
            assert re.fullmatch(rf"[\w-]+(\[\w+\])?=={re.escape(version)}", line), line


@pytest.mark.parametrize("package", PACKAGES)
def test_what_each_package_has(root: Path, package: str) -> None:
    folder = root / "packages" / package
    assert (folder / "README.md").read_text("utf-8").startswith(f"# {package}\n")
    assert (folder / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()
    assert (folder / "src" / package.replace("-", "_") / "py.typed").is_file()
    assert settings(root, package)["requires-python"] == ">=3.11"
