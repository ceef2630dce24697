"""Every tensor that the packages make says its type and its device: PyTorch's defaults are the user's to set."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MAKERS = re.compile(
    r"arange|as_tensor|asarray|empty|empty_strided|eye|full|linspace|ones|rand|randint|randn|randperm|scalar_tensor"
    r"|tensor|zeros"
)
PACKAGES = ("ps-core", "ps-kernels", "ps-dist")
"""What runs in the process of a user's training. Modules of `ps_models` follow the defaults, as PyTorch's do."""


def faults(name: str, source: str) -> Iterator[str]:
    """Yield the calls that make a tensor and leave its type or its device to PyTorch."""
    for node in ast.walk(ast.parse(source)):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and MAKERS.fullmatch(node.func.attr)
        ):
            continue
        if ast.unparse(node.func.value) == "torch" and not {"dtype", "device"} <= {each.arg for each in node.keywords}:
            yield f"{name}:{node.lineno}: {ast.unparse(node)}"


def test_every_tensor_says_its_type_and_its_device(root: Path) -> None:
    found, makes = [], 0
    for package in PACKAGES:
        for path in sorted((root / "packages" / package / "src").rglob("*.py")):
            source = path.read_text("utf-8")
            makes += "torch.empty(" in source
            found += faults(path.name, source)
    assert makes > 10, "modules of these packages make tensors"
    assert not found, "give dtype= and device=:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.zeros(2)", 1),
        ("torch.zeros(2, device=x.device)", 1),
        ("torch.empty(0, dtype=torch.uint8)", 1),
        ("torch.zeros(2, dtype=x.dtype, device='cpu')", 0),
        ("x.new_zeros(2) + torch.zeros_like(x) + numpy.zeros(2)", 0),
    ],
)
def test_the_guard_itself(source: str, count: int) -> None:
    assert len(list(faults("it.py", source))) == count
