"""The loss in chunks against the plain one: numbers, gradients, and the bytes it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ps_kernels
from ps_core import InvalidInput
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker
from ps_models import _loss
from ps_models._loss import IGNORED, head_loss, next_labels

TOKENS, HIDDEN, VOCABULARY = 50, 16, 211


def use(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """The kernel, or what is done without one."""
    if compiled and not _loss._has_kernel("cpu"):
        pytest.skip("no compiled kernels here")
    monkeypatch.setattr(_loss, "_has_kernel", lambda _: compiled)


@pytest.fixture(params=[False, True], ids=["torch", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of making errors of logits."""
    use(monkeypatch, request.param)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    table = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    bias = torch.randn(VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[7:11] = IGNORED
    return *(each.to(dtype).requires_grad_() for each in (x, table, bias)), labels


def gradients(rows: int | None, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    x, table, bias, labels = inputs(dtype)
    loss, _ = head_loss(x, table, labels, bias_v=bias, rows=rows)
    (loss * scale).backward()
    return [loss.detach(), x.grad, table.grad, bias.grad]


class Made(TorchDispatchMode):
    """Keep the types of all tensors that are as large as a chunk's logits."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.dtypes = numel, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.dtypes |= {
            each.dtype for each in tree_leaves(made) if isinstance(each, Tensor) and each.numel() == self.numel
        }
        return made


@pytest.mark.parametrize("compiled", [False, True])
def test_fake_tensors_of_a_gpu_take_what_its_kernel_takes(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most operators on fake tensors of a GPU need one, so those of a CPU stand in."""
    monkeypatch.setattr(_loss, "_has_kernel", lambda _: compiled)
    with FakeTensorMode(), Made(TOKENS * VOCABULARY) as made:
        x, table, labels = (torch.empty(size, device="cuda") for size in (TOKENS, VOCABULARY, TOKENS))
        assert _loss._by_kernel(x, table, labels) is compiled
        monkeypatch.setattr(_loss, "_by_kernel", lambda *_: compiled)
        x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        table = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        head_loss(x, table, torch.zeros(TOKENS, dtype=torch.int64), rows=TOKENS)[0].backward()
    assert made.dtypes == ({torch.bfloat16} if compiled else {torch.bfloat16, torch.float32})


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rows", [1, 7, 25, 50, 1000])
def test_it_is_the_plain_one(rows: int) -> None:
    x, table, bias, labels = (each.detach().double() if each.is_floating_point() else each for each in inputs())
    exact = [each.requires_grad_() for each in (x, table, bias)]
    loss = functional.cross_entropy(functional.linear(*exact), labels, ignore_index=IGNORED)
    (3 * loss).backward()
    for found, right in zip(gradients(rows, torch.float32, 3.0), [loss, *(e.grad for e in exact)], strict=True):
        assert found.dtype is torch.float32
        assert torch.allclose(found, right.float(), rtol=2e-5, atol=1e-7)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_more_chunks_are_not_less_exact(dtype: torch.dtype) -> None:
    """Sums over chunks are not rounded on the way: twenty-five are as near as one, and as near as the plain loss."""
    x, table, bias, labels = inputs(dtype)
    exact = [each.detach().double().requires_grad_() for each in (x, table, bias)]
    functional.cross_entropy(functional.linear(*exact), labels, ignore_index=IGNORED).backward()
    right = exact[1].grad
    apart = {rows: (gradients(rows, dtype)[2].double() - right).norm() / right.norm() for rows in (2, 50, None)}
    assert apart[2] < 1.05 * apart[50]
    assert apart[2] < 1.2 * apart[None]
    assert gradients(2, dtype)[2].dtype is dtype


@pytest.mark.usefixtures("way")
def test_fp16_gradients_of_single_tokens_do_not_vanish() -> None:
    """With a mean over many tokens taken at once, each probability would be below what fp16 holds."""
    x = torch.zeros(4096, 8, dtype=torch.float16, requires_grad=True)
    table = torch.full((512, 8), 0.1, dtype=torch.float16).requires_grad_()
    loss, _ = head_loss(x, table, torch.arange(4096) % 512, rows=1024)
    (loss * 2**16).backward()
    assert x.grad is not None
    one = torch.full((512,), 1 / 512)
    one[0] -= 1
    expected = 2**16 / 4096 * (one @ table.detach().float())
    assert torch.allclose(x.grad[0].float(), expected, rtol=0.02, atol=2e-4)


@pytest.mark.usefixtures("way")
def test_fp16_sums_over_many_tokens_do_not_overflow() -> None:
    """A smaller loss scale does not help against a sum that overflows before it is scaled."""
    x = torch.full((32768, 4), 4.0, dtype=torch.float16)
    table, bias = torch.zeros(8, 4, dtype=torch.float16), torch.zeros(8, dtype=torch.float16)
    found = []
    for rows in (None, 1024):
        tensors = [each.clone().requires_grad_() for each in (x, table, bias)]
        head_loss(tensors[0], tensors[1], torch.zeros(32768).long(), bias_v=tensors[2], rows=rows)[0].backward()
        found.append([each.grad for each in tensors])
    for each, other in zip(*found, strict=True):
        torch.testing.assert_close(each, other, rtol=2e-3, atol=1e-6)


@pytest.mark.usefixtures("way")
def test_labels_that_do_not_count_give_nothing_and_none_at_all_no_number() -> None:
    _, x_grad, _, _ = gradients(7, torch.float32)
    assert not x_grad[7:11].any()
    assert x_grad[:7].any(1).all()
    x, table, _, labels = inputs()
    loss, _ = head_loss(x, table, torch.full_like(labels, IGNORED), rows=7)
    assert loss.isnan()


@pytest.mark.usefixtures("way")
def test_only_what_is_wanted_is_computed() -> None:
    x, table, bias, labels = inputs()
    table.requires_grad_(False)
    head_loss(x, table, labels, bias_v=bias, rows=7)[0].backward()
    assert table.grad is None
    assert torch.allclose(x.grad, gradients(None, torch.float32)[1], atol=1e-6)
    with torch.no_grad():
        assert not head_loss(x, table, labels, rows=7)[0].requires_grad


@pytest.mark.usefixtures("way")
def test_backward_twice_through_one_loss() -> None:
    x, table, _, labels = inputs()
    loss, _ = head_loss(x, table, labels, rows=7)
    loss.backward(retain_graph=True)
    first = table.grad.clone()
    loss.backward()
    assert torch.equal(table.grad, 2 * first)


def test_each_token_stands_beside_the_label_of_the_next() -> None:
    assert next_labels(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[2, 3, IGNORED], [5, 6, IGNORED]]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_bytes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, compiled: bool) -> None:
    """Logits of one chunk and the head's gradient, whatever the number of tokens."""
    use(monkeypatch, compiled)
    hidden, vocabulary, rows, size = 32, 4096, 64, dtype.itemsize
    table = torch.randn(vocabulary, hidden, dtype=dtype, requires_grad=True)
    table_bytes, chunk = vocabulary * hidden * size, rows * vocabulary
    for tokens in (128, 1024):
        x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
        labels = torch.randint(vocabulary, (tokens,))
        tracker = TensorBytesTracker()
        tracker.start()
        loss, _ = head_loss(x, table, labels, rows=rows)
        forward = tracker.take_peak()
        loss.backward()
        tracker.stop()
        backward, states = tracker.take_peak(), tokens * hidden * size
        table.grad = None
        # The logits, without a kernel in fp32 and in 16 bits; the sum in fp32, and the newest part of it; gradients of
        # hidden states.
        sums = table_bytes if size == 4 else vocabulary * hidden * (4 + size)
        a_logit = size if compiled or size == 4 else 4 + size
        assert chunk * a_logit < forward <= chunk * a_logit + sums + 2 * states + 20_000
        assert backward <= 2 * table_bytes + 2 * states + 20_000
        assert forward < tokens * vocabulary * 4 or tokens == 128


def test_a_label_that_is_no_word_is_torchs_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, compiled=True)
    x, table, _, labels = inputs()
    labels[30] = VOCABULARY
    with pytest.raises(IndexError, match="Target 211 is out of bounds"):
        functional.cross_entropy(functional.linear(x, table), labels)
    with pytest.raises(IndexError, match=f"Target 211 is out of bounds: expected 0 to 210, or {IGNORED} for"):
        head_loss(x, table, labels, rows=7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_what_is_used(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """For every chunk, over the logits; in fp32 where a bias sums their gradients. Not on fake tensors."""
    use(monkeypatch, compiled=True)
    given: list[tuple[Any, ...]] = []
    plain = ps_kernels.cross_entropy

    def watched(logits: Tensor, *rest: Any, **options: Any) -> None:
        given.append((len(logits), logits.dtype, options["gradient"]))
        plain(logits, *rest, **options)

    monkeypatch.setattr(ps_kernels, "cross_entropy", watched)
    x, table, bias, labels = inputs(dtype)
    head_loss(x, table, labels, rows=30)
    head_loss(x, table, labels, bias_v=bias, rows=50)
    with torch.no_grad():
        head_loss(x, table, labels, rows=50)
    assert given == [(30, dtype, True), (20, dtype, True), (50, torch.float32, True), (50, dtype, False)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        head_loss(mode.from_tensor(x), mode.from_tensor(table), mode.from_tensor(labels), rows=50)[0].backward()
    assert len(given) == 4


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_no_default_of_the_program_changes_it(dtype: torch.dtype) -> None:
    (x, table, bias, labels), right = inputs(), gradients(7, torch.float32)
    torch.set_default_dtype(dtype)
    try:
        loss, _ = head_loss(x, table, labels, bias_v=bias, rows=7)
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(*each) for each in zip([loss, x.grad, table.grad, bias.grad], right, strict=True))


@pytest.mark.usefixtures("way")
def test_labels_of_any_type_and_stride() -> None:
    x, table, _, labels = inputs()
    right = head_loss(x, table, labels, rows=7)[0]
    twice = torch.stack([labels, labels], 1)
    assert head_loss(x, table, twice[:, 0], rows=7)[0] == right
    assert head_loss(x, table, labels.int(), rows=7)[0] == right


@pytest.mark.parametrize("rows", [7, None])
def test_a_label_for_each_token(rows: int | None) -> None:
    x, table, _, labels = inputs()
    for wrong in (labels[:-1], torch.cat([labels, labels])):
        with pytest.raises(InvalidInput, match=rf"one for each of {TOKENS} tokens, found {len(wrong)}"):
            head_loss(x, table, wrong, rows=rows)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("tokens", [0, 3])
def test_where_no_token_counts_nobody_has_a_gradient(tokens: int) -> None:
    x, table, bias, _ = inputs()
    loss, _ = head_loss(x[:tokens], table, torch.full((tokens,), IGNORED), bias_v=bias, rows=2)
    assert loss.isnan()
    loss.backward()
    assert all(each.grad is not None and not each.grad.any() for each in (x, table, bias))


@pytest.mark.usefixtures("way")
def test_a_gradient_of_its_gradient_is_refused() -> None:
    x, table, _, labels = inputs()
    loss, _ = head_loss(x, table, labels, rows=7)
    with pytest.raises(InvalidInput, match="set loss_chunk_tokens=None"):
        torch.autograd.grad(loss, x, create_graph=True)
    loss, _ = head_loss(x, table, labels, rows=None)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
