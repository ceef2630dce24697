"""Models that people train: the same losses and weights as in plain PyTorch, where hardly anything fits."""

from __future__ import annotations

import pytest

from _cases import Case
from _reference import Settings
from _runs import check_under_the_tightest_budget
from _zoo import ZOO


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ZOO, ids=[each.name for each in ZOO])
def test_the_same_losses_under_the_tightest_budget(model: Case, precision: str) -> None:
    check_under_the_tightest_budget(model.run, Settings(precision=precision, options=model.options))
