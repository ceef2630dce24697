"""The page names the architectures that the script tries, and the script tells the same from the different."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text("utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script."""
    spec = importlib.util.spec_from_file_location("architectures", ROOT / "benchmarks" / "architectures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_page_names_them_all(script: Any) -> None:
    section = PAGE.partition("## Models of transformers")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`([\w-]+)`", section.partition("The architectures:")[2])) == sorted(script.ARCHITECTURES)
    assert f"{len(script.ARCHITECTURES)} architectures" in section


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize(("name", "precision", "checkpoint"), [("mixtral", "bf16", False), ("electra", "fp32", True)])
def test_it_compares(script: Any, name: str, precision: str, checkpoint: bool) -> None:
    same, told = script.compared(name, precision, checkpoint=checkpoint)
    assert same, told
    assert re.fullmatch(
        r"the same with [\d.]+ of its weights and 40000 bytes; [1-9]\d* evictions, \d+ plans left", told
    )


def test_it_sees_what_differs(script: Any) -> None:
    build, batch = script.ARCHITECTURES["opt"]
    one = script.plain(script.made(build, checkpoint=False), batch)
    other = script.plain(script.made(build, checkpoint=False), batch)
    assert script.unlike(one, other) == ""
    later = replace(other, losses=[*other.losses[:-1], other.losses[-1] + 1e-6])
    assert script.unlike(one, later).startswith("loss 3")
    with torch.no_grad():
        next(iter(other.weights.values()))[0, 0] += 1e-6
    assert script.unlike(one, other) == next(iter(one.weights))
