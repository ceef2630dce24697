"""Run raw kernels on CUDA tensors, on PyTorch's current stream. Keeps [Note: order of arithmetic].

The kernels work on the tensors' own memory, and on PyTorch's stream, so PyTorch's allocator needs no notice. Other data
of a launch are in a PyTorch tensor too, which is freed in stream order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from ps_kernels._arithmetic_order import BLOCK_NUMEL, AdamScalars, SgdScalars
from ps_kernels._batch import Batch
from ps_kernels._compile import cache_folder
from ps_kernels._cuda_launch import CupyLauncher
from ps_kernels._cuda_source import Tuning

_NORM_THREADS, _COPY_THREADS, _LOSS_THREADS = 512, 256, 512
_TILE = 1 << 14
"""Bytes, or elements to be cast, that a thread block copies at a time; as in copy.cu."""
_THREADS_A_MULTIPROCESSOR = 8 * 2048
"""Eight times what any device runs at once: enough blocks for an even end, and enough work for each."""
_MOST_TABLES = 4096
"""The largest number of tables of spans to keep."""
_SORTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SAME_TYPE = 0

Argument = int | float
"""A kernel's argument: an int is a 64-bit address or length, a float a single-precision number."""


class Launcher(Protocol):
    """Protocol of an object that starts kernels."""

    def launch(self, kernel: tuple[str, str], grid: tuple[int, int], arguments: Sequence[Argument], on: Tensor) -> None:
        """Start a kernel, named by module and name, on blocks times threads, on ``on``'s current stream."""

    def multiprocessors(self, on: Tensor) -> int:
        """Return how many multiprocessors the tensor's device has."""


class CudaBackend:
    """Run the kernels of this package through a launcher."""

    def __init__(self, launcher: Launcher, tuning: Tuning | None = None) -> None:
        """Make the backend; ``tuning``: the launcher's, since kernels are compiled for it."""
        self._launcher, self._tuning = launcher, tuning or Tuning()
        self._tables: dict[tuple[tuple[tuple[int, int], ...], torch.device], tuple[Tensor, int]] = {}
        """Tables of spans, each with its number of blocks; never freed, because work on any stream may read them."""

    def adam(self, states: tuple[Tensor, Tensor, Tensor], grad: Tensor, out: Tensor | None, s: AdamScalars) -> None:
        """Make one step on parameter, momentum and variance."""
        self._step("adam", (*states, grad), out, astuple(s))

    def sgd(self, states: tuple[Tensor, Tensor | None], grad: Tensor, out: Tensor | None, s: SgdScalars) -> None:
        """Make one step on parameter and momentum."""
        self._step("sgd", (*states, grad), out, astuple(s))

    def sumsq_finite(self, x: Tensor, out: Tensor) -> None:
        """Add the sum of squares to ``out[0]``; set ``out[1]`` to one if anything is not finite."""
        numel, address = x.numel(), x.data_ptr()
        blocks = -(-numel // BLOCK_NUMEL)
        sums = torch.empty(max(blocks, 1), dtype=torch.float32, device=x.device)
        if blocks:
            arguments = (address, numel, int(address % 16 == 0), sums.data_ptr(), out.data_ptr())
            self._launch(("norm", f"norm_{_name(x)}"), (blocks, _NORM_THREADS), arguments, x)
        self._launch(("norm", "norm_total"), (1, _NORM_THREADS), (sums.data_ptr(), blocks, out.data_ptr()), x)

    def sumsq_each(self, x: Tensor, spans: Sequence[tuple[int, int]], out: Tensor) -> None:
        """Measure each span of ``x`` as `sumsq_finite` does, in one launch; see [Note: the table of spans]."""
        table, blocks = self._table_of_spans(tuple(spans), x)
        if not blocks:
            return
        count = len(spans)
        zeros = torch.zeros(2 * count + blocks, dtype=torch.float32, device=x.device)  # 64-bit counts, then sums
        done = zeros.data_ptr()
        arguments = (x.data_ptr(), table.data_ptr(), count, blocks, done, done + 8 * count, out.data_ptr())
        self._launch(("norm", f"norm_spans_{_name(x)}"), (blocks, _NORM_THREADS), arguments, x)

    def _table_of_spans(self, spans: tuple[tuple[int, int], ...], x: Tensor) -> tuple[Tensor, int]:
        """Return the table of spans on the device of ``x``, and the number of blocks; each step has the same spans."""
        known = self._tables.get((spans, x.device))
        if known is None:
            numels = [stop - start for start, stop in spans]
            *firsts, blocks = accumulate((-(-numel // BLOCK_NUMEL) for numel in numels), initial=0)
            if len(self._tables) < _MOST_TABLES:
                table = _on_device_at_once([[start for start, _ in spans], numels, firsts], x)
                known = self._tables[spans, x.device] = table, blocks
            else:
                known = _on_device([[start for start, _ in spans], numels, firsts], x), blocks
        return known

    def accumulate(self, accumulator: Tensor, grad: Tensor, scale: float) -> None:
        """Add the scaled gradient."""
        numel = grad.numel()
        if numel:
            head, groups = split(numel, (accumulator, grad))
            arguments = (accumulator.data_ptr(), grad.data_ptr(), numel, head, groups, float(scale))
            self._launch_step(f"accumulate_{_name(grad)}", arguments, numel, groups, grad)

    def cross_entropy(
        self, logits: Tensor, labels: Tensor, losses: Tensor, *, ignored: int, factor: float, gradient: bool
    ) -> int:
        """Write each row's loss, and its gradient in place of its logits; of a wrong label both are a nan.

        Return -1: the host waits for nothing.
        """
        rows, columns = logits.shape
        if rows:
            wide = columns % 2 == 0 and logits.data_ptr() % (2 * logits.element_size()) == 0
            addresses = (logits.data_ptr(), labels.data_ptr(), losses.data_ptr())
            arguments = (*addresses, rows, columns, int(wide), ignored, int(gradient), float(factor))
            self._launch(("loss", f"cross_entropy_{_name(logits)}"), (rows, _LOSS_THREADS), arguments, logits)
        return -1

    def copy_all(self, batch: Batch, *, scatter: bool) -> None:
        """Copy the tensors into the chunk, or with ``scatter`` out of it, in one launch; the host waits for nothing."""
        table, tiles = _table(batch, scatter=scatter)
        if tiles:
            like = batch.whole.array
            self._copy(_on_device(table, like), tiles, like)

    def copier(self, batch: Batch, *, scatter: bool) -> Callable[[], None]:
        """Return a call that does what `copy_all` does; the table is on the device already."""
        table, tiles = _table(batch, scatter=scatter)
        like = batch.whole.array
        columns = _on_device_at_once(table, like)
        readers = set[torch.cuda.Stream]()

        def copy(_keep: Batch = batch) -> None:
            if like.is_cuda:
                stream = torch.cuda.current_stream(like.device)
                if stream not in readers:  # once is enough: it counts when the table is freed
                    readers.add(stream)
                    columns.record_stream(stream)
            if tiles:
                self._copy(columns, tiles, like)

        return copy

    def _copy(self, columns: Tensor, tiles: int, on: Tensor) -> None:
        arguments = (columns.data_ptr(), columns.shape[1], tiles)
        self._launch(("copy", "copy_pieces"), (tiles, _COPY_THREADS), arguments, on)

    def set_threads(self, count: int) -> None:
        """Do nothing: this backend uses no CPU threads."""

    def _step(
        self, kind: str, arrays: tuple[Tensor | None, ...], out: Tensor | None, scalars: tuple[float, ...]
    ) -> None:
        grad = arrays[-1]
        assert grad is not None
        numel = grad.numel()
        if not numel:
            return
        every = [*arrays, out]
        head, groups = split(numel, [each for each in every if each is not None])
        addresses = [0 if each is None else each.data_ptr() for each in every]
        arguments = (*addresses, numel, head, groups, *(float(each) for each in scalars))
        name = f"{kind}_{_name(grad)}_{'none' if out is None else _name(out)}"
        self._launch_step(name, arguments, numel, groups, grad)

    def _launch_step(self, name: str, arguments: Sequence[Argument], numel: int, groups: int, on: Tensor) -> None:
        """Launch enough blocks that each thread has work; see [Note: tuning] in step.cu."""
        tuning = self._tuning
        blocks = -(-max(-(-groups // tuning.packs), numel - 4 * groups) // tuning.threads)
        self._launch(("step", name), (blocks, tuning.threads), arguments, on, tuning.blocks)

    def _launch(
        self,
        kernel: tuple[str, str],
        grid: tuple[int, int],
        arguments: Sequence[Argument],
        on: Tensor,
        most: int | None = None,
    ) -> None:
        """Launch at most ``most`` blocks for each multiprocessor."""
        blocks, threads = grid
        most = self._launcher.multiprocessors(on) * (most or _THREADS_A_MULTIPROCESSOR // threads)
        self._launcher.launch(kernel, (min(blocks, most), threads), arguments, on)


def why_not() -> str | None:
    """Return why this backend cannot work here, with PyTorch and CuPy installed; None if it can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        import_module("cupy")
    except Exception as error:
        return f"cupy cannot be imported: {' '.join(str(error).split())}"
    return None


def warm() -> list[str]:
    """Compile every kernel for every device now, not in the first step; return a line for each kernel."""
    launcher = CupyLauncher()
    lines = []
    for index in range(torch.cuda.device_count()):
        lines.append(f"{torch.cuda.get_device_name(index)}:")
        lines += [f"  {kernel:26} {taken_s * 1e3:8.1f} ms" for kernel, taken_s in launcher.warm(index)]
    return [*lines, f"kept in {cache_folder()}"]


@cache  # the compiled modules outlive a call
def make_backend() -> CudaBackend:
    """Return the backend of this module."""
    return CudaBackend(CupyLauncher())


def split(numel: int, tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Return the first element from which all tensors are aligned in groups of four, and the number of groups.

    See [Note: head, groups, rest] in step.cu.
    """
    for head in range(min(4, numel)):
        sizes = ((tensor.data_ptr(), tensor.element_size()) for tensor in tensors)
        if all((address + head * size) % (4 * size) == 0 for address, size in sizes):
            return head, (numel - head) // 4
    return 0, 0


def _on_device_at_once(table: list[list[int]], like: Tensor) -> Tensor:
    """Return a table where a kernel reads it; the host waits for the copy, so that any stream may read it."""
    return torch.tensor(table, dtype=torch.int64, device="cpu").to(like.device)


def _on_device(table: list[list[int]], like: Tensor) -> Tensor:
    """Return a table where a kernel reads it; the host waits for nothing."""
    columns = torch.tensor(table, dtype=torch.int64, device="cpu")
    return columns.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else columns


def _table(batch: Batch, *, scatter: bool) -> tuple[list[list[int]], int]:
    """Return the columns that copy.cu describes, and the number of tiles."""
    chunk = batch.whole.array.dtype
    sort_of = {kind: _sort(*((chunk, kind) if scatter else (kind, chunk))) for kind in batch.dtypes}
    sorts = [sort_of[part.dtype] for part in batch.parts]
    measures = zip(sorts, batch.nbytes, batch.numels, strict=True)
    lengths = [nbytes if sort == _SAME_TYPE else numel for sort, nbytes, numel in measures]
    firsts = list(accumulate((-(-length // _TILE) for length in lengths), initial=0))
    sources, targets = batch.addresses, batch.places()
    if scatter:
        sources, targets = targets, sources
    return [list(sources), list(targets), lengths, sorts, firsts[:-1]], firsts[-1]


def _sort(source: torch.dtype, target: torch.dtype) -> int:
    return _SAME_TYPE if source == target else 3 * _SORTS[source] + _SORTS[target]


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
