"""Start CUDA kernels by CuPy, on PyTorch's current stream.

[Note: denormals and CuPy]
CuPy appends ``-ftz=true`` to the options of every module that it compiles from a source. The last such option counts,
so denormals would be flushed whatever this package sets. So CuPy's compiler is called one level lower, where only the
architecture is appended. The modules are loaded as binaries, which are kept here instead of in CuPy's own cache.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ps_kernels._compile import cache_folder
from ps_kernels._cuda_source import KERNELS, Tuning, options, source


class _Handle:
    """Give CuPy PyTorch's stream, by the protocol for streams of other libraries."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version, and the stream's address."""
        return 0, self._address


class CupyLauncher:
    """Compile kernels when first used, and keep them on disk; see [Note: denormals and CuPy]."""

    def __init__(self, tuning: Tuning | None = None) -> None:
        self._tuning = tuning or Tuning()
        self._cupy: Any = import_module("cupy")  # it has no types
        self._modules: dict[tuple[int, str], Any] = {}
        self._functions: dict[tuple[int, str, str], Any] = {}
        self._streams: dict[tuple[int, int], Any] = {}
        """CuPy's streams, by device number and PyTorch's address, which is 0 for the default stream of every device."""

    def launch(
        self, kernel: tuple[str, str], grid: tuple[int, int], arguments: Sequence[int | float], on: Tensor
    ) -> None:
        """Start a kernel on PyTorch's current stream."""
        import numpy as np

        cuda, index = self._cupy.cuda, on.get_device()
        values = tuple(np.float32(each) if isinstance(each, float) else np.int64(each) for each in arguments)
        address = torch._C._cuda_getCurrentRawStream(index)
        with cuda.Device(index):
            stream = self._streams.get((index, address))
            if stream is None:
                stream = self._streams[index, address] = cuda.Stream.from_external(_Handle(address))
            with stream:
                self._function(index, *kernel)((grid[0],), (grid[1],), values)

    def multiprocessors(self, on: Tensor) -> int:
        """Return how many multiprocessors the tensor's device has."""
        return _multiprocessors(on.get_device())

    def warm(self, index: int, modules: Iterable[str] = tuple(KERNELS)) -> Iterator[tuple[str, float]]:
        """Compile all kernels for a device, or load them; yield each with its seconds, a module's in the first."""
        with self._cupy.cuda.Device(index):
            for module in modules:
                for name in KERNELS[module]:
                    start = time.perf_counter()
                    self._function(index, module, name)
                    yield name, time.perf_counter() - start

    def _function(self, index: int, module: str, name: str) -> Any:
        """Return a kernel on the current device, which has that index."""
        found = self._functions.get((index, module, name))
        if found is None:
            loaded = self._modules.get((index, module))
            if loaded is None:
                loaded = self._modules[index, module] = self._cupy.RawModule(path=str(self._binary(index, module)))
            found = self._functions[index, module, name] = loaded.get_function(name)
        return found

    def _binary(self, index: int, module: str) -> Path:
        """Return the file with a module's machine code; its name has a hash of all that it depends on."""
        cuda, text = self._cupy.cuda, source(module)
        capability = cuda.Device(index).compute_capability
        words = options(module, self._tuning)
        facts = (text, words, capability, cuda.nvrtc.getVersion(), self._cupy.__version__)
        name = f"{module}-sm{capability}-{sha256(repr(facts).encode()).hexdigest()[:16]}.cubin"
        path = cache_folder() / name
        if path.is_file():
            return path
        code, _ = cuda.compiler.compile_using_nvrtc(text, words)
        try:
            return _keep(code, path)
        except OSError:  # nothing can be written there: it is for this process alone
            return _keep(code, self._own_folder / name)

    @cached_property
    def _own_folder(self) -> Path:
        made = tempfile.mkdtemp(prefix="ps_kernels-")
        finalize(self, shutil.rmtree, made, ignore_errors=True)
        return Path(made)


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _keep(code: bytes, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        made.write_bytes(code)
        made.replace(path)  # in one move: another process finds all of it or nothing
    return path
