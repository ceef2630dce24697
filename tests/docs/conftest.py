"""What pages that run as a whole have in common."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tutorials() -> Any:
    """How blocks are run, and outputs compared."""
    spec = importlib.util.spec_from_file_location("tutorials", Path(__file__).with_name("test_tutorials.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
