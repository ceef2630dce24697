"""Hypothesis: the same examples on every run, unless HYPOTHESIS_PROFILE=explore asks for new ones.

``--soak`` runs the long forms too: tests marked ``soak``, and ten times as many examples of every property.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

LONGER = 10
"""How many times as many examples ``--soak`` tries."""

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long forms of tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the long forms; with ``--soak``, keep them and try more examples."""
    if config.getoption("--soak"):
        lengthen(items)
    elif long := [item for item in items if item.get_closest_marker("soak")]:
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)


def lengthen(items: list[pytest.Item]) -> None:
    """Raise the number of examples of every property, which is written beside it, and so is not the profile's."""
    for test in {item.obj: item for item in items if isinstance(item, pytest.Function)}.values():
        if not is_hypothesis_test(test.obj):
            continue
        # A state machine's class has its settings, and a function has them as Hypothesis's own plugin sets them.
        owner: Any = test.cls or test.obj
        name = "settings" if test.cls else "_hypothesis_internal_use_settings"
        usual = getattr(owner, name)
        setattr(owner, name, settings(usual, max_examples=LONGER * usual.max_examples))
