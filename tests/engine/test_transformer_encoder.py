"""``nn.TransformerEncoder``: PyTorch's own evaluation takes another way than its training, and ours does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ps_core import SGD, Budget
from ps_core.engine import chunked, release, statistics

X = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(1))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


@pytest.fixture(params=[True, False])
def fast(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(request.param)
    yield request.param
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_evaluation_has_the_bits_of_training(device: str, fast: bool) -> None:
    """PyTorch's fused operator for evaluation rounds otherwise; it does not take parameters of another class."""
    plain = encoder()
    twin = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
    budget = Budget(host="8MiB", device="192KiB" if device == "emulated" else None)
    model, optimizer = chunked(encoder(), SGD(lr=0.1), device=device, precision="fp32", budget=budget)
    for _ in range(3):
        losses = []
        for each, stepper in ((plain, twin), (model, optimizer)):
            loss = each(X).square().mean()
            loss.backward()
            stepper.step()
            stepper.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    slow = plain.eval()(X).detach()
    with torch.no_grad():
        found, expected = model.eval()(X), plain(X)
    assert torch.equal(found, slow)
    assert torch.equal(found, expected) is not fast, "where they are equal, the page should not say that they differ"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (statistics(model).evictions > 0) is (device == "emulated")
    release(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padded_positions_in_evaluation(fast: bool) -> None:
    """PyTorch's fused operator returns zeros there, and we what training computes; other positions do not see it."""
    padding = torch.tensor([[False] * 8, [False] * 6 + [True] * 2, [False] * 3 + [True] * 5])
    plain = encoder().eval()
    with torch.no_grad():
        expected = plain(X, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(False)
        slow = plain(X, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(fast)
        model, _ = chunked(encoder().eval(), None, precision="fp32")
        found = model(X, src_key_padding_mask=padding)
    assert torch.equal(found, slow)
    torch.testing.assert_close(found[~padding], expected[~padding], rtol=0, atol=1e-5)
    assert bool(expected[padding].eq(0).all()) is fast
    assert found[padding].abs().min() > 0
    release(model)
