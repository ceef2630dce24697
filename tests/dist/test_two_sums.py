"""A schedule with two sums of one group, and a gradient that comes between them: it waits until both are over.

Nothing here is left to who is faster: what has to be behind something else waits for it.
"""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _threads import Together, run
from ps_core import SGD, Budget, Options
from ps_core.engine import chunked, release
from ps_core.engine._execution.hooks import hooks_of
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._sharding.collective_order import CollectiveOp
from ps_core.engine._sharding.collective_schedule import Collective, ProposalKind

pytestmark = pytest.mark.usefixtures("unplanned")

WIDTH, STEPS = 16, 3
PATIENCE_S = 30.0
FIRST = Collective(ProposalKind.SUM, 0)
"""Of the group that ``late`` and ``early`` are in."""


class Net(nn.Module):
    """In backward the gradient of ``early`` comes before that of ``late``, which only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early, self.head = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, x: Tensor, uses_late: bool) -> Tensor:
        x = self.late(x) if uses_late else x
        return self.head(self.early(x)).square().mean()


class Order:
    """What of the last pass waits for what, over both ranks."""

    def __init__(self) -> None:
        self.first_sum, self.late_gradient = Event(), Event()
        self.waited: list[bool] = []
        """For each sum of the group that rank 0's driver waited for: whether it is the second."""

    def impose(self, driver: Any, rank: int) -> None:
        """Rank 1 says nothing of the second sum before the first is done; rank 0 does the second at its gradient."""
        order, sums = driver._order, list[CollectiveOp]()
        make, carry_out, wait, stage = driver._make_sum, order._carry_out, driver._negotiator.wait, order.stage

        def make_in_order(group: ParamGroup, position: int | None) -> CollectiveOp:
            if group.index == 0 and sums and rank == 1:
                assert self.first_sum.wait(PATIENCE_S)
            step: CollectiveOp = make(group, position)
            sums.extend([step] if group.index == 0 else [])
            return step

        def carry_out_in_order(step: CollectiveOp, number: int, session: Any) -> None:
            if rank == 0 and len(sums) > 1 and step is sums[1]:
                assert self.late_gradient.wait(PATIENCE_S)
            carry_out(step, number, session)
            if rank == 1 and step.collective == FIRST and step.done:
                self.first_sum.set()

        def wait_in_order(step: CollectiveOp) -> None:
            if rank == 0 and step in sums:
                self.waited.append(len(sums) > 1 and step is sums[1])
                if self.waited[-1]:
                    self.late_gradient.set()
            wait(step)

        def stage_in_order(record: ParamState) -> None:
            stage(record)
            if rank == 0 and record.name == "late.weight":
                self.late_gradient.set()  # too early, if that sum was not waited for

        driver._make_sum, order._carry_out, order.stage = make_in_order, carry_out_in_order, stage_in_order
        driver._negotiator.wait = wait_in_order


def trained(each: Together, order: Order | None) -> tuple[list[float], dict[str, Tensor]]:
    """Only in the last step does rank 0 use all; with an order, that has every sum in its schedule twice."""
    model, optimizer = chunked(
        Net(),
        SGD(lr=0.1),
        device="cpu",
        precision="fp32",
        budget=Budget(host="64MiB"),
        collectives=each,
        options=Options(group_bytes=2 * WIDTH * WIDTH * 4),
    )
    assert optimizer is not None
    losses = []
    for index in range(STEPS):
        last = index == STEPS - 1
        if order is not None and last:
            driver: Any = hooks_of(model).engine.passes.demand
            driver._schedules = {
                kind: [entry for entry in entries for _ in range(1 + (entry.collective.kind is ProposalKind.SUM))]
                for kind, entries in driver._schedules.items()
            }
            order.impose(driver, each.rank)
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * index + each.rank))
        loss = model(x, last and each.rank == 0)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    found = losses, {name: value.clone() for name, value in model.state_dict().items()}
    release(model)
    return found


def test_a_gradient_waits_for_both_sums_of_its_group() -> None:
    order = Order()
    found, _ = run(2, trained, order)
    wanted, _ = run(2, trained, None)
    assert True in order.waited, "the second was waited for"
    for (losses, state), (theirs, other) in zip(found, wanted, strict=True):
        assert losses == theirs
        torch.testing.assert_close(state, other, rtol=0, atol=1e-7)
