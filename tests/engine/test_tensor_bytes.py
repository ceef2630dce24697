"""The tracker counts exactly the bytes that live."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from _counting import counting
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker

FP32 = 4
INT64 = 8


# ---- what is counted


def test_a_storage_counts_once_however_many_tensors_view_it() -> None:
    with counting(TensorBytesTracker()) as tracker:
        base = torch.empty(1000)
        views = [base[10:], base.view(10, 100).t(), base.detach(), base.expand(7, 1000), base.unbind()[3]]
        assert tracker.current_bytes == 1000 * FP32
        del base
        assert tracker.current_bytes == 1000 * FP32
        views.clear()
        assert tracker.current_bytes == 0
    assert tracker.take_peak() == 1000 * FP32


def test_a_storage_made_before_or_while_paused_never_counts_nor_do_its_views() -> None:
    before = torch.ones(100)
    with counting(TensorBytesTracker()) as tracker:
        with tracker.paused(), tracker.paused():
            within = torch.ones(100)
        kept = [before.view(10, 10), within.t(), before.add_(1), within.chunk(2), within.mul_(before)]
        assert (tracker.current_bytes, tracker.take_peak()) == (0, 0)
        sums = before + within
        assert tracker.current_bytes == 100 * FP32
    del kept, sums


def test_the_death_of_the_storage_counts_not_that_of_a_python_object() -> None:
    weight = torch.ones(100, requires_grad=True)
    with counting(TensorBytesTracker()) as tracker:
        result = weight.exp()  # autograd saves it
        total = result.sum()
        wrapper = result.untyped_storage()
        del result, wrapper
        assert tracker.current_bytes == 100 * FP32 + FP32  # only the graph holds it
        total.backward()
        weight.grad = None
        assert tracker.current_bytes == FP32
    del total
    assert tracker.current_bytes == 0


def test_deaths_after_stop_are_noticed() -> None:
    with counting(TensorBytesTracker()) as tracker:
        kept = torch.ones(100)
    assert tracker.current_bytes == 100 * FP32
    later = torch.ones(100)
    assert tracker.current_bytes == 100 * FP32
    del kept, later
    assert tracker.current_bytes == 0


def test_in_place_out_and_resized() -> None:
    with counting(TensorBytesTracker()) as tracker:
        a = torch.ones(100)
        a.add_(1).relu_()
        torch.add(a, a, out=a)
        assert tracker.take_peak() == 100 * FP32
        target = torch.empty(0)
        torch.add(a, a, out=target)
        assert tracker.current_bytes == 200 * FP32
        target.resize_(300)
        assert tracker.current_bytes == 400 * FP32
        a.set_(target)
        assert tracker.current_bytes == 300 * FP32
        del a, target
    assert tracker.current_bytes == 0


def test_several_outputs_lists_and_constants() -> None:
    with counting(TensorBytesTracker()) as tracker:
        values, indices = torch.arange(10.0).sort()
        parts = torch._foreach_add([values, values], 1.0)
        constant = torch.tensor([1.0, 2.0, 3.0])
        assert tracker.current_bytes == 10 * FP32 + 10 * INT64 + 2 * 10 * FP32 + 3 * FP32
    del values, indices, parts, constant


def test_peak_since_the_last_call() -> None:
    with counting(TensorBytesTracker()) as tracker:
        kept = torch.ones(10)
        torch.ones(1000)
        assert tracker.take_peak() == 1010 * FP32
        assert tracker.take_peak() == 10 * FP32
        torch.ones(5)
        assert tracker.take_peak() == 15 * FP32
    del kept


def test_a_storage_that_no_operator_made_is_counted_by_hand() -> None:
    outside = torch.ones(50)
    with counting(TensorBytesTracker()) as tracker:
        tracker.count(outside)
        tracker.count(outside.view(5, 10))
        assert tracker.current_bytes == 50 * FP32
        again = outside.add_(1)
        assert tracker.current_bytes == 50 * FP32
    del again


def test_another_device_type_is_not_counted() -> None:
    with counting(TensorBytesTracker("meta")) as tracker:
        real = torch.ones(100)
        meta = torch.ones(100, device="meta")
        assert tracker.current_bytes == 100 * FP32
    del real, meta


def test_sparse_gradients_count_their_parts() -> None:
    table = nn.Embedding(10, 5, sparse=True)
    with counting(TensorBytesTracker()) as tracker:
        table(torch.tensor([1, 2])).sum().backward()
        assert tracker.current_bytes == 2 * INT64 + 2 * 5 * FP32
    table.weight.grad = None
    assert tracker.current_bytes == 0


# ---- peaks by formula


def test_a_chain_of_saved_results() -> None:
    steps, numel = 5, 1000
    x = torch.zeros(numel, requires_grad=True)
    with counting(TensorBytesTracker()) as tracker:
        y = x
        for _ in range(steps):
            y = y.exp()
        total = y.sum()
        del y
        assert tracker.current_bytes == tracker.take_peak() == steps * numel * FP32 + FP32
        total.backward()
        # the loss, its gradient (expanded, not copied), the saved results, one gradient
        assert tracker.take_peak() == 2 * FP32 + (steps + 1) * numel * FP32
        x.grad = None
        assert tracker.current_bytes == FP32
    del total


def test_checkpointing_keeps_inputs_and_recomputes_one_segment() -> None:
    segments, steps, numel = 4, 3, 1000

    def segment(y: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            y = y.exp()
        return y

    x = torch.zeros(numel, requires_grad=True)
    with counting(TensorBytesTracker()) as tracker:
        y = x
        for _ in range(segments):
            y = checkpoint(segment, y, use_reentrant=False, preserve_rng_state=False)
        total = y.sum()
        del y
        # `exp` saves its result, which is no input of the segment: the last result is held by nobody, while each
        # segment's input is held by the recomputation to come
        assert tracker.current_bytes == (segments - 1) * numel * FP32 + FP32
        tracker.take_peak()
        total.backward()
        assert tracker.take_peak() == 2 * FP32 + ((segments - 1) + steps + 1) * numel * FP32
        x.grad = None
        assert tracker.current_bytes == FP32
    del total


def test_selective_checkpointing() -> None:
    rows, width = 20, 30
    weight = torch.randn(width, width, requires_grad=True)
    x = torch.randn(rows, width)

    def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = func is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def run() -> torch.Tensor:
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        out: torch.Tensor = checkpoint(lambda: (x @ weight).exp().exp(), use_reentrant=False, context_fn=contexts)
        return out.sum()

    with counting(TensorBytesTracker()) as tracker:
        total = run()
        assert tracker.current_bytes == rows * width * FP32 + FP32  # the product is kept, both exponentials are not
        total.backward()
        assert weight.grad is not None
        weight.grad = None
        del total
        gc.collect()
        assert tracker.current_bytes == 0


def test_linear() -> None:
    rows, inputs, outputs = 50, 100, 200
    layer, x = nn.Linear(inputs, outputs), torch.randn(rows, inputs)
    with counting(TensorBytesTracker()) as tracker:
        y = layer(x)
        assert tracker.take_peak() == rows * outputs * FP32
        y.backward(torch.ones(rows, outputs))
        # result, given gradient, gradients of weight and bias
        assert tracker.take_peak() == (2 * rows * outputs + inputs * outputs + outputs) * FP32
        layer.zero_grad()
        assert tracker.current_bytes == rows * outputs * FP32
    del y


def test_embedding() -> None:
    vocabulary, width, tokens = 300, 16, 40
    table, ids = nn.Embedding(vocabulary, width), torch.arange(tokens)
    with counting(TensorBytesTracker()) as tracker:
        out = table(ids)
        assert tracker.take_peak() == tokens * width * FP32
        out.backward(torch.ones(tokens, width))
        assert tracker.take_peak() == (2 * tokens * width + vocabulary * width) * FP32
        table.weight.grad = None
    del out


def test_attention() -> None:
    batch, heads, length, width = 2, 3, 64, 16
    part = batch * heads * length * width * FP32
    leaves = [torch.randn(batch, length, heads, width, requires_grad=True) for _ in range(3)]
    with counting(TensorBytesTracker()) as tracker:
        out = nn.functional.scaled_dot_product_attention(*(leaf.transpose(1, 2) for leaf in leaves), is_causal=True)
        assert tracker.take_peak() == part + batch * heads * length * FP32  # the result and its rows' log-sums
        given = torch.ones_like(out)
        out.backward(given)
        assert tracker.take_peak() == 5 * part + batch * heads * length * FP32  # its gradient and those of q, k, v
        for leaf in leaves:
            leaf.grad = None
        assert tracker.current_bytes == 2 * part
    del out, given


class Block(nn.Module):
    """One transformer block as GPT has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return added


def test_a_block_keeps_what_the_textbook_says() -> None:
    batch, length, width, heads = 2, 32, 64, 4
    block, x = Block(width, heads), torch.randn(batch, length, width)
    tokens = batch * length
    with counting(TensorBytesTracker()) as tracker:
        y = block(x)
        # per token: 2 norms' results, q k v, attention's result, the two sums and their last addend's place
        saved = tokens * (2 * width + 3 * width + width + 2 * width + 2 * 4 * width)
        statistics = tokens * 2 * 2 + batch * heads * length  # mean and deviation of each norm; attention's log-sums
        assert tracker.current_bytes == (saved + statistics) * FP32
    del y


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "block": lambda: (Block(64, 4), torch.randn(2, 32, 64)),
    "lstm": lambda: (nn.LSTM(16, 32, 2, batch_first=True), torch.randn(4, 10, 16)),
    "conv": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True)), torch.randn(2, 3, 16, 16)),
    "embedding": lambda: (nn.Embedding(100, 16), torch.randint(0, 100, (4, 7))),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(2, 5, 32)),
    "bfloat16 block": lambda: (Block(64, 4).bfloat16(), torch.randn(2, 32, 64).bfloat16()),
}


def iterate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)  # dropout
    out = model(x)
    loss: torch.Tensor = (out[0] if isinstance(out, tuple) else out).float().square().sum()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("case", CASES)
def test_peak_equals_torchs_own_tracker(case: str) -> None:
    """That one also counts parameters, buffers and inputs, and costs far more; take those away and the two agree."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model, x = CASES[case]()
    iterate(model, x)
    model.zero_grad()
    with counting(TensorBytesTracker()) as tracker:
        iterate(model, x)
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert tracker.current_bytes == gradients
    model.zero_grad()
    assert tracker.current_bytes == 0

    theirs = MemTracker()
    theirs.track_external(model, x)
    with theirs:
        iterate(model, x)
    model.zero_grad()
    known = [*model.parameters(), *model.buffers(), x]
    total = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert tracker.take_peak() == total - sum(tensor.numel() * tensor.element_size() for tensor in known)


@pytest.mark.parametrize("case", CASES)
def test_results_are_bitwise_those_without_it(case: str) -> None:
    model, x = CASES[case]()
    iterate(model, x)  # warm-up
    outcomes = []
    for on in (False, True):
        model.zero_grad()
        with ExitStack() as scope:
            if on:
                scope.enter_context(counting(TensorBytesTracker()))
            loss = iterate(model, x)
        outcomes.append(
            [loss, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]
        )
    assert len(outcomes[0]) > 1
    assert all(torch.equal(plain, counted) for plain, counted in zip(*outcomes, strict=True))
