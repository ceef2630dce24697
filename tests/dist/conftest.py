"""Processes are slow to start, so each number of them is started once for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from _crew import Crew, crew


@pytest.fixture(scope="session")
def two() -> Iterator[Crew]:
    """Two ranks."""
    with crew(2) as made:
        yield made


@pytest.fixture(scope="session")
def four() -> Iterator[Crew]:
    """Four ranks."""
    with crew(4) as made:
        yield made


@pytest.fixture(params=[2, 4])
def each_crew(request: pytest.FixtureRequest) -> Crew:
    """Two ranks, then four."""
    found: Crew = request.getfixturevalue("two" if request.param == 2 else "four")
    return found
