"""``backward(inputs=...)``: gradients for some parameters only, of a table on the host too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ps_core import SGD, Budget
from ps_core.engine import HostEmbedding, chunked, release


class Net(nn.Module):
    """One lookup, and little else."""

    def __init__(self, kind: type[nn.Embedding]) -> None:
        super().__init__()
        self.table, self.out = kind(16, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids)).square().mean()


@pytest.mark.parametrize("chosen", [("table.weight",), ("table.weight", "out.weight"), ("out.weight",)])
@pytest.mark.parametrize("kind", [nn.Embedding, HostEmbedding])
def test_backward_may_be_for_some_parameters_only(kind: type[nn.Embedding], chosen: tuple[str, ...]) -> None:
    """They have PyTorch's gradients to the bit, as a step shows; the others have none, and are left as they were."""
    torch.manual_seed(0)
    net, ids = Net(kind), torch.tensor([[1, 2, 3, 1]])
    plain = copy.deepcopy(net)
    wanted = torch.optim.SGD(plain.parameters(), lr=0.5, fused=True)
    plain(ids).backward(inputs=[plain.get_parameter(name) for name in chosen])
    budget = Budget(device="64KiB", host="1MiB")
    model, optimizer = chunked(net, SGD(lr=0.5), device="emulated", budget=budget, precision="fp32")
    assert optimizer is not None
    try:
        few = [model.get_parameter(name) for name in chosen]
        model(ids).backward(inputs=few if len(few) > 1 else few[0])
        assert {name for name, each in model.named_parameters() if each.grad is not None} == set(chosen)
        optimizer.step()
        wanted.step()
        expected, found = plain.state_dict(), model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    finally:
        release(model)
