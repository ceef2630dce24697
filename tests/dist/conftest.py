"""Processes are slow to start, so each number of them is started once for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from _crew import Crew, crew


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where workers of pytest-xdist run tests side by side, let one worker alone make each of the shared processes."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if isinstance(item, pytest.Function) and (group := shared_by(item)):
            item.add_marker(pytest.mark.xdist_group(group))


def shared_by(test: pytest.Function) -> str:
    """Return the name of the processes that this test shares with others, or nothing."""
    fixtures = set(test.fixturenames)
    if "each_crew" in fixtures:
        return "two" if test.callspec.params["each_crew"] == 2 else "four"
    return next((name for name in ("four", "two", "ends") if name in fixtures), "")


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
