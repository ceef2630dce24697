"""Tensors that share memory with parameters keep it in use: where that is why nothing fits, the error says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core import AdamW, Budget, DoesNotFit
from ps_core.engine import chunked, materialized, release

LAYERS, BUDGET = 10, Budget(device=256 * 2**10, host="16MiB")

READS: dict[str, Callable[[nn.Module], object]] = {
    "data": lambda model: [parameter.data for parameter in model.parameters()],
    "norms": lambda model: torch._foreach_norm([parameter.detach() for parameter in model.parameters()]),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
}
"""Reads that hold tensors of all parameters' memory at once: 372,480 bytes."""


def trained(budget: Budget) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(96, 96) for _ in range(LAYERS)])
    model, optimizer = chunked(model, AdamW(), precision="fp32", device="emulated", budget=budget)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(4, 96)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_of_all_parameters_are_told_what_is_in_use(read: Callable[[nn.Module], object]) -> None:
    model, optimizer = trained(BUDGET)
    with pytest.raises(DoesNotFit) as caught:
        read(model)
    assert str(caught.value) == (
        "does not fit: device needs 299,008 bytes at 'forward of 7.weight', more than the 262,144 bytes it has\n"
        '  try: Budget(device=299008, host="16MiB"): 36,864 bytes more, and what more tensors of parameters\' memory '
        "keep\n"
        "  try: materialized(model): read many parameters at once within it: tensors with the memory of '0.weight' "
        "and 13 other parameters, as of p.data or p.detach(), keep 0.2 MiB of device in use until they are freed"
    )
    assert not caught.value.depends_on_batch
    del caught
    train(model, optimizer)  # whose memory is free again
    with materialized(model):
        read(model)
    release(model)


def test_the_budget_that_is_told_is_enough_for_what_was_held() -> None:
    budget, seen = BUDGET, 0
    while True:
        model, _ = trained(budget)
        try:
            READS["data"](model)
            break
        except DoesNotFit as error:
            told = eval(error.remedies[0].partition(": ")[0])
        finally:
            release(model)
        assert replace(told, device=budget.device) == budget
        budget, seen = told, seen + 1
    assert seen == 3, "a layer more at a time"


class Keeps(nn.Module):
    """Calls layers, and keeps each of their weights until its call ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(LAYERS))
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        held = []
        for index, layer in enumerate(self.layers):
            x = layer(x)
            held += [layer.weight.detach()] if index < self.most else []
        return x + 0 * sum(each.sum() for each in held)


def test_also_within_a_pass() -> None:
    model = Keeps()
    model, optimizer = chunked(model, AdamW(), precision="fp32", device="emulated", budget=BUDGET)
    train(model, optimizer)
    model.most = LAYERS
    with pytest.raises(DoesNotFit, match=r"'layers\.0\.weight' and 5 other parameters, as of") as caught:
        model(torch.ones(4, 96))
    assert caught.value.depends_on_batch
    del caught
    model.most = 0
    train(model, optimizer)
    release(model)
