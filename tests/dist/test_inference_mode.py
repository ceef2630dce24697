"""Evaluations in inference mode with real processes, whose transports write what the engine made there."""

from __future__ import annotations

from pathlib import Path

import pytest

import _inference_cases as cases
from _crew import Crew


@pytest.mark.parametrize("moment", ["before", "between", "after"])
@pytest.mark.parametrize("where", cases.BUDGETS)
def test_evaluations_in_inference_mode(two: Crew, where: str, moment: str, tmp_path: Path) -> None:
    two.run(cases.trains_and_evaluates, where, moment, str(tmp_path))


def test_over_sockets(two: Crew, tmp_path: Path) -> None:
    two.run(cases.trains_and_evaluates, "tight", "between", str(tmp_path), shared_memory=False)


@pytest.mark.parametrize("built", ["cpu", "meta"])
@pytest.mark.parametrize("where", cases.BUDGETS)
def test_management_begins_in_inference_mode(two: Crew, where: str, built: str, tmp_path: Path) -> None:
    two.run(cases.begins_in_inference_mode, where, built, str(tmp_path))
