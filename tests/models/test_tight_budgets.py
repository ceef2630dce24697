"""Where a plan for tight memory is left half way, what it had lent out or summed up comes back whole."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from torch import Tensor, nn

from _reference import Loop, Make, Settings, differences, plain
from _runs import HOST, managed, stand_in
from ps_core import Budget, Options
from test_under_the_engine import loop


def reading_amid_backward(run: Loop) -> Loop:
    """The same, but every second step reads a parameter where no plan knows of it: half way through backward."""

    def train(make: Make) -> list[Tensor]:
        def made(model: nn.Module, spec: Any) -> tuple[nn.Module, Any]:
            model, optimizer = make(model, spec)
            times = count()

            def read(_: Tensor) -> None:
                if next(times) % 2:
                    model.model.layers[0].self_attn.q_proj.weight.sum()

            def watch(*call: Any) -> None:
                if call[2][0].requires_grad:
                    call[2][0].register_hook(read)

            model.model.layers[1].register_forward_hook(watch)
            return model, optimizer

        return run(made)

    return train


@pytest.mark.parametrize("size", [300_000, 320_000])
def test_a_plan_that_is_left_with_sums_in_borrowed_places(size: int) -> None:
    settings = Settings(precision="fp32", options=Options(poison=True, group_bytes=8192))
    found = managed(reading_amid_backward(loop("llama", "meta")), settings, stand_in, Budget(device=size, host=HOST))
    assert not differences(plain(loop("llama", "cpu"), settings), found)
    assert found.evictions > 0
    assert sum(each.divergences for each in found.statistics) > 0
