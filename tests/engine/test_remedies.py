"""The Budget that a refusal tells: all of what was given, with as much more as is needed by all processes."""

from __future__ import annotations

from typing import Any

import pytest

from ps_core import Budget, Options
from ps_core._plan import Tier
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._memory.budget_suggestions import TierBudget, UserLimits, options_as, suggest_budget

DISK = {"disk": "1GiB", "disk_dir": "/var/my disk"}


class Card(CpuDevice):
    """An accelerator that knows its memory."""

    def memory_bytes(self) -> Any:
        return 2**20, 2**21


def limits_of(given: UserLimits, *, device: type[CpuDevice] = CpuDevice) -> TierBudget:
    sizes = {"device": given.budget.device_bytes, "host": given.budget.host_bytes or 2**22}
    tiers = tuple(Tier(name, size // (given.sharers if name == "host" else 1)) for name, size in sizes.items() if size)
    return TierBudget(tiers, given, device(name="emulated").memory_bytes())


@pytest.mark.parametrize(
    ("budget", "tier", "needed", "told"),
    [
        (Budget(device="1MiB", host=2**22), 0, 2**20 + 1, 'Budget(device="2MiB", host=4194304): 1.0 MiB more'),
        (Budget(device=2**19), 0, 2**19 + 1, "Budget(device=525312): 1,024 bytes more"),
        (Budget(device=2**19, **DISK), 0, 2**19 + 1, 'Budget(device=525312, disk="1GiB", disk_dir="/var/my disk"): '),
        (Budget(device=2**19), 1, 2**23, 'Budget(device=524288, host="8MiB"): 4.0 MiB more than is free here, less a '),
    ],
)
def test_all_that_was_given_is_told_again(budget: Budget, tier: int, needed: int, told: str) -> None:
    said = suggest_budget(limits_of(UserLimits(budget)), tier, needed)
    assert said.startswith(told)
    assert getattr(eval(said.partition(": ")[0]), ("device_bytes", "host_bytes")[tier]) >= needed


@pytest.mark.parametrize("tier", [0, 1])
@pytest.mark.parametrize("needed", [2**19 + 5, 2**22 - 5])
def test_everybody_has_enough_of_it(tier: int, needed: int) -> None:
    """Three processes share a host."""
    given = UserLimits(Budget(device=2**19, host=3 * 2**19), sharers=3)
    said = suggest_budget(limits_of(given), tier, needed)
    budget = eval(said.partition(": ")[0])
    again = limits_of(UserLimits(budget, sharers=3))
    assert needed <= again.tiers[tier].capacity_bytes & -128 < needed + 2**20
    assert ("for the 3 processes that share it" in said) is (tier == 1)


def test_a_card_does_not_grow() -> None:
    limits = limits_of(UserLimits(Budget(device=2**20)), device=Card)
    assert suggest_budget(limits, 0, 2**21) == 'Budget(device="2MiB"): 1.0 MiB more'
    assert suggest_budget(limits, 0, 2**21 + 1) == "an accelerator with 3.0 MiB: this one has 2.0 MiB"


def test_other_options_stay() -> None:
    given = UserLimits(Budget(device=2**20), Options(keep_fp32=("*norm*",), policy="lru"))
    said = options_as(given, group_bytes=128)
    assert said == "Options(group_bytes=128, policy=\"lru\", keep_fp32=('*norm*',))"
    assert eval(said) == Options(group_bytes=128, keep_fp32=("*norm*",), policy="lru")
