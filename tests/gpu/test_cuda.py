"""The CUDA kernels on a device: the CPU's bits, in stream order, the same each time."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import ps_kernels
from ps_models._loss import head_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed"),
    pytest.mark.filterwarnings("default"),
]
KINDS = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1e-41, -1e-45, 3e38, float("inf"), float("nan"), 65520.0, 6e-8]


def drawn(numel: int, shift: int, seed: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(numel + 16, generator=rng) * 10.0 ** torch.randint(-12, 4, (numel + 16,), generator=rng)
    values[16 : 16 + len(SPECIAL)] = torch.tensor(SPECIAL)[: len(values[16 : 16 + len(SPECIAL)])]
    return values.to(kind)[shift : shift + numel]


def on_device(tensors: list[torch.Tensor], shift: int) -> list[torch.Tensor]:
    """Copies that start ``shift`` elements after an aligned address."""
    copies = []
    for tensor in tensors:
        room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device="cuda")
        copies.append(room[shift : shift + tensor.numel()].copy_(tensor))
    return copies


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, but for which nan it is."""
    words = {2: torch.int16, 4: torch.int32}[one.element_size()]
    one, other = one.cpu(), other.cpu()
    return bool(((one.view(words) == other.view(words)) | (one.isnan() & other.isnan())).all())


def test_it_is_the_backend_of_cuda_tensors() -> None:
    assert ps_kernels.backends()["cuda"] == "available"


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_kind", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 1003, 300_001])
def test_steps(numel: int, shift: int, kind: torch.dtype, out_kind: torch.dtype | None) -> None:
    here = [drawn(numel, shift, 1), drawn(numel, shift, 2), drawn(numel, shift, 3).abs(), drawn(numel, shift, 4, kind)]
    if out_kind is not None:
        here.append(drawn(numel, shift, 5, out_kind))
    there = on_device(here, shift)
    for step in (1, 2, 3):
        for those, backend in ((here, "torch"), (there, "cuda")):
            ps_kernels.adam_step(*those, step=step, lr=1e-2, weight_decay=0.1, decoupled=step < 3, backend=backend)
            ps_kernels.sgd_step(those[0], those[1], *those[3:], lr=0.1, momentum_decay=0.9, backend=backend)
            ps_kernels.sgd_step(those[0], None, *those[3:], lr=0.1, weight_decay=0.1, backend=backend)
            ps_kernels.accumulate(those[2], those[3], scale=0.25)
    assert all(same(one, other) for one, other in zip(here, there, strict=True))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [0, 1, 65_536, 65_537, 5_000_001])
def test_sums_of_squares_are_the_same_each_time(numel: int, kind: torch.dtype, shift: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(kind)
    here = torch.zeros(2)
    ps_kernels.sumsq_finite(x, here)
    (there,) = on_device([x], shift)
    for _ in range(20):
        total = torch.zeros(2, device="cuda")
        ps_kernels.sumsq_finite(there, total)
        assert total.tolist() == here.tolist()
    if numel:
        there[numel // 2] = float("inf")
        ps_kernels.sumsq_finite(there, total)
        assert total[1] == 1


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 65, 50257, 50304])
def test_losses(columns: int, kind: torch.dtype, shift: int) -> None:
    """More rows than run at a time; a label that does not count, and one that is no column."""
    rows = 3000 if columns < 100 else 300
    here = torch.randn(rows * columns, generator=torch.Generator().manual_seed(columns)).to(kind)
    (there,) = on_device([here], shift)
    labels = torch.arange(rows) % columns
    labels[5] = -100
    found = []
    for logits, backend in ((here, None), (there, "cuda")):
        mine, losses = labels.to(logits.device), torch.full((rows,), 7.0, device=logits.device)
        before = logits.clone()
        ps_kernels.cross_entropy(logits.view(rows, columns), mine, losses, gradient=False, backend=backend)
        assert same(before, logits)
        ps_kernels.cross_entropy(logits.view(rows, columns), mine, losses, factor=0.5, backend=backend)
        found.append(losses)
    assert same(*found)
    assert same(here, there)
    labels[3] = columns
    ps_kernels.cross_entropy(there.view(rows, columns), labels.cuda(), found[1], gradient=False)
    assert found[1].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("dtype", KINDS)
def test_the_chunked_loss_keeps_no_logits_in_fp32(dtype: torch.dtype) -> None:
    rows, words = 512, 50304
    x = torch.randn(2 * rows, 64, dtype=dtype, device="cuda", requires_grad=True)
    table = (torch.randn(words, 64, device="cuda") / 8).to(dtype).requires_grad_()
    labels = torch.randint(words, (2 * rows,), device="cuda")
    whole, _ = head_loss(x, table, labels, rows=None)
    wanted = torch.autograd.grad(whole, (x, table))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss, _ = head_loss(x, table, labels, rows=rows)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 1.3 * (rows * words * dtype.itemsize + table.numel() * (4 + dtype.itemsize))
    torch.testing.assert_close(loss, whole, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(torch.autograd.grad(loss, (x, table)), wanted, strict=True):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_kind", KINDS)
def test_gather_and_scatter(kind: torch.dtype, chunk_kind: torch.dtype) -> None:
    lengths = [(index * 7919) % 40_000 for index in range(200)]
    offsets = [sum(lengths[:index]) + index % 5 + 4 * index for index in range(200)]
    here = [drawn(length, 0, index, kind) for index, length in enumerate(lengths)]
    there = [on_device([each], index % 8)[0] for index, each in enumerate(here)]
    chunk = torch.zeros(offsets[-1] + lengths[-1] + 7, dtype=chunk_kind)
    other = chunk.cuda()
    ps_kernels.gather(here, chunk, offsets)
    ps_kernels.gather(there, other, offsets)
    assert same(chunk, other)
    back = [torch.zeros_like(each) for each in here]
    back_there = [each.cuda() for each in back]
    ps_kernels.scatter(chunk, offsets, back)
    ps_kernels.scatter(other, offsets, back_there)
    assert all(same(one, two) for one, two in zip(back, back_there, strict=True) if one.numel())


def test_work_is_in_the_order_of_the_current_stream() -> None:
    """Kernels on a side stream wait for the slow work before them there, read what that left, and hold up no host."""
    numel = 1 << 22
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    grad, accumulator, chunk = (torch.zeros(numel, device="cuda") for _ in range(3))
    for rehearsal in (True, False):  # the first time loads kernels and allocates, which may wait
        for each in (grad, accumulator, chunk):
            each.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            grad.fill_(2.0)
            ps_kernels.accumulate(accumulator, grad)
            ps_kernels.gather([accumulator], chunk, [0])
            accumulator.zero_()
        assert rehearsal or not side.query(), "the host was made to wait"
        side.synchronize()
        assert bool((chunk == 2).all())


def test_a_step_takes_the_same_bits_each_time() -> None:
    start = on_device([drawn(1 << 20, 0, seed) for seed in (1, 2, 3, 4)], 0)
    results = []
    for _ in range(3):
        arrays = [x.clone() for x in start]
        ps_kernels.adam_step(*arrays, step=7, lr=1e-3)
        results.append(arrays)
    assert all(same(one, other) for again in results[1:] for one, other in zip(results[0], again, strict=True))


def test_pinned_memory_is_copied_in_the_background() -> None:
    arena = ps_kernels.PinnedArena(256 << 20)
    assert arena.pinned
    host = arena.tensor(0, 64 << 20, torch.float32)
    assert host.is_pinned()
    device = torch.arange(64 << 20, dtype=torch.float32, device="cuda")
    host.copy_(device)
    host.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    host.copy_(device, non_blocking=True)
    assert not torch.cuda.current_stream().query(), "the host was made to wait"
    torch.cuda.synchronize()
    assert torch.equal(host, device.cpu())
    del host
    arena.close()


def test_every_kernel_compiles_ahead() -> None:
    from ps_kernels import _cuda
    from ps_kernels._cuda_source import KERNELS

    lines = _cuda.warm()
    assert sum(line.endswith(" ms") for line in lines) == torch.cuda.device_count() * sum(map(len, KERNELS.values()))
    assert lines[-1].startswith("kept in ")
