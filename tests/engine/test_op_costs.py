"""Operations and elements counted for operators: the same in each release of PyTorch, and no model is refused."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ps_core._trace import Amounts
from ps_core.engine._tracing.op_costs import amounts_of

ROWS, HEADS, QUERIES, KEYS, WIDTH = 2, 6, 5, 7, 8


class Counted(TorchDispatchMode):
    """Add up the amounts of all operators that run."""

    amounts = Amounts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.amounts = self.amounts.plus(amounts_of(func, args, kwargs or {}, result))
        return result


def attention(heads_of_keys: int) -> tuple[Amounts, Amounts]:
    """Run attention; return the amounts counted in forward, and those counted in backward."""
    query, key, value = (
        torch.randn(ROWS, heads, rows, WIDTH, requires_grad=True)
        for heads, rows in ((HEADS, QUERIES), (heads_of_keys, KEYS), (heads_of_keys, KEYS))
    )
    with Counted() as forward:
        result = functional.scaled_dot_product_attention(query, key, value, enable_gqa=heads_of_keys != HEADS)
    with Counted() as backward:
        result.sum().backward()
    return forward.amounts, backward.amounts


@pytest.mark.parametrize("heads_of_keys", [1, 2, 3, HEADS])
def test_attention_with_fewer_heads_of_keys(heads_of_keys: int) -> None:
    """Grouped queries multiply as many numbers as queries with keys of their own."""
    product, queries = 2.0 * ROWS * HEADS * QUERIES * KEYS * WIDTH, ROWS * HEADS * QUERIES
    forward, backward = attention(heads_of_keys)
    assert (forward.flops, forward.attention_flops, forward.queries) == (2 * product, 2 * product, queries)
    assert (backward.flops, backward.attention_flops, backward.queries_backward) == (5 * product, 5 * product, queries)


def test_a_formula_that_refuses_shapes_refuses_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is then counted by the elements that it reads and writes."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, refuse)
    left, right = torch.ones(3, 4), torch.ones(4, 5)
    with Counted() as counted:
        made = left @ right
    assert counted.amounts == Amounts(elements=left.numel() + right.numel() + made.numel(), launches=1)


def test_only_work_is_launched() -> None:
    left = torch.ones(3, 4)
    with Counted() as counted:
        for view in (left.t(), left.view(-1), left.detach(), torch.empty(3)):
            assert counted.amounts == Amounts(), view.shape
        (left.t() @ left).sum()
    assert counted.amounts.launches == 2
