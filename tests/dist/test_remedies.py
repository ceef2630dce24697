"""Several processes of one computer share its memory: what a refusal tells is enough for all of them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from _threads import Together, going_by, run
from ps_core import AdamW, Budget, DoesNotFit
from ps_core.engine import chunked, release
from ps_core.engine._sharding.following_driver import FollowingDriver


def made() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    for parameter in model.parameters():
        nn.init.ones_(parameter)  # the ranks are threads, and would share the usual generator
    return model


def refused(each: Together, budget: Budget) -> str:
    with pytest.raises(DoesNotFit) as caught:
        chunked(made(), AdamW(), device="emulated", budget=budget, collectives=each)
    return caught.value.remedies[0]


def joined(each: Together, budget: Budget) -> bool:
    release(chunked(made(), AdamW(), device="emulated", budget=budget, collectives=each)[0])
    return True


@pytest.mark.parametrize("disk", [False, True])
def test_a_larger_host_or_disk_is_enough_for_all(disk: bool, tmp_path: Path) -> None:
    below = {"disk": "256KiB", "disk_dir": str(tmp_path)} if disk else {}
    (said, other), _ = run(2, refused, Budget(device="512KiB", host="256KiB", **below))
    assert said == other
    assert "for the 2 processes that share it" in said
    assert run(2, joined, eval(said.partition(": ")[0]))[0] == [True, True]


def finds_no_place(each: Together) -> DoesNotFit:
    budget = Budget(device="2MiB", host="8MiB")
    model, _ = chunked(made(), AdamW(), device="emulated", budget=budget, collectives=each)
    with pytest.raises(DoesNotFit) as caught:
        model(torch.ones(2, 128))
    return caught.value


def test_a_remedy_for_memory_in_pieces_asks_for_more_than_there_is() -> None:
    no_place = mock.patch.object(FollowingDriver, "_fits", return_value=False)
    with going_by(plan=False), no_place:  # enough memory is free, but not side by side
        found, _ = run(2, finds_no_place)
    for error in found:
        assert error.needed_bytes > error.available_bytes == 2**21
        assert not error.proven
        assert eval(error.remedies[0].partition(": ")[0]).device_bytes > 2**21
