"""The library that stands in for CUDA's runtime in ``nox -s host_side``, called as PyTorch calls it, but by ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "host_side"
OUT_OF_MEMORY, INVALID_VALUE, ALREADY_REGISTERED, NOT_REGISTERED = 2, 1, 712, 713
HOST, DEVICE = 1, 2

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="it is compiled for Linux"
)


@pytest.fixture(scope="module")
def stand_in() -> Any:
    spec = importlib.util.spec_from_file_location("stand_in", FOLDER / "stand_in.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cuda(stand_in: Any, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("libraries")
    return ctypes.CDLL(str(stand_in.runtime(folder, frozenset({"cudaGraphLaunch", "cudaMalloc"}))))


class Memory:
    """Device memory of the library's."""

    def __init__(self, cuda: ctypes.CDLL, size: int) -> None:
        self.at = ctypes.c_void_p()
        self.status = cuda.cudaMalloc(ctypes.byref(self.at), ctypes.c_size_t(size))

    def __add__(self, count: int) -> ctypes.c_void_p:
        assert self.at.value is not None
        return ctypes.c_void_p(self.at.value + count)


def free_bytes(cuda: ctypes.CDLL) -> int:
    free, whole = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(whole)) == 0
    assert whole.value == 1 << 30
    return free.value


def test_memory_is_counted_and_runs_out(cuda: ctypes.CDLL) -> None:
    before = free_bytes(cuda)
    memory = Memory(cuda, 1 << 20)
    assert memory.status == 0
    assert free_bytes(cuda) == before - (1 << 20)
    assert Memory(cuda, 1 << 30).status == OUT_OF_MEMORY
    assert [cuda.cudaGetLastError() for _ in range(2)] == [OUT_OF_MEMORY, 0]
    assert cuda.cudaFree(memory + 128) == INVALID_VALUE
    assert cuda.cudaFree(memory.at) == 0
    assert cuda.cudaFree(memory.at) == INVALID_VALUE
    assert cuda.cudaFree(None) == 0
    assert free_bytes(cuda) == before


def test_copies_move_bytes_and_stay_within_their_memory(cuda: ctypes.CDLL) -> None:
    memory, text = Memory(cuda, 4096), ctypes.create_string_buffer(b"weights", 4096)
    back = ctypes.create_string_buffer(4096)
    copy = cuda.cudaMemcpyAsync
    assert copy(memory.at, text, ctypes.c_size_t(4096), 1, None) == 0
    assert copy(back, memory.at, ctypes.c_size_t(4096), 2, None) == 0
    assert back.value == b"weights"
    assert copy(memory + 1, text, ctypes.c_size_t(4096), 1, None) == INVALID_VALUE
    assert cuda.cudaMemsetAsync(memory + 4000, 1, ctypes.c_size_t(97), None) == INVALID_VALUE
    cuda.cudaFree(memory.at)


def test_registrations_do_not_overlap_and_copies_do_not_cross_them(cuda: ctypes.CDLL) -> None:
    mapping = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    page, counted = mmap.PAGESIZE, [cuda.standin_count(which) for which in (0, 1)]

    def place(index: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(begin + index * page)

    def register(index: int, pages: int) -> int:
        return int(cuda.cudaHostRegister(place(index), ctypes.c_size_t(pages * page), 1))

    assert (register(0, 2), register(2, 2)) == (0, 0)
    assert (register(1, 1), register(0, 4)) == (ALREADY_REGISTERED, ALREADY_REGISTERED)
    memory = Memory(cuda, 4 * page)
    assert cuda.cudaMemcpyAsync(memory.at, place(1), ctypes.c_size_t(page), 1, None) == 0
    assert cuda.cudaMemcpyAsync(memory.at, place(1), ctypes.c_size_t(2 * page), 1, None) == INVALID_VALUE
    assert kind_of(cuda, place(3)) == HOST
    assert kind_of(cuda, memory.at) == DEVICE
    assert cuda.cudaHostUnregister(place(1)) == NOT_REGISTERED
    assert (cuda.cudaHostUnregister(place(0)), cuda.cudaHostUnregister(place(2))) == (0, 0)
    assert kind_of(cuda, place(3)) == 0
    assert [cuda.standin_count(which) for which in (0, 1)] == [count + 2 for count in counted]
    cuda.cudaFree(memory.at)


def kind_of(cuda: ctypes.CDLL, address: ctypes.c_void_p) -> int:
    found = (ctypes.c_int * 64)()
    assert cuda.cudaPointerGetAttributes(found, address) == 0
    return found[0]


def test_events_have_times(cuda: ctypes.CDLL) -> None:
    events = [ctypes.c_void_p() for _ in range(2)]
    for event in events:
        assert cuda.cudaEventCreateWithFlags(ctypes.byref(event), 0) == 0
        assert cuda.cudaEventRecord(event, None) == 0
    taken = ctypes.c_float(-1.0)
    assert cuda.cudaEventElapsedTime(ctypes.byref(taken), *events) == 0
    assert taken.value >= 0.0


def test_functions_that_it_lacks_return_success(cuda: ctypes.CDLL) -> None:
    """Of those that are wanted besides; its own are not made twice."""
    assert cuda.cudaGraphLaunch(None, None) == 0


def test_each_library_has_what_is_wanted_of_it(stand_in: Any, tmp_path: Path) -> None:
    """Functions with the version that they are wanted in, as PyTorch's libraries name it, and those without one."""
    lib, made = tmp_path / "lib", tmp_path / "made"
    lib.mkdir()
    first = tmp_path / "first"
    for soname, names in {"libcublas.so.13": {"cublasCreate_v2"}, "libnccl.so.2": {"ncclSend"},
                          "libcudart.so.13": {"cudaMalloc", "cudaOther"}}.items():  # fmt: skip
        stand_in._build(first, soname, soname, names)
    code = "int {0}(void); int call(void) {{ return {0}(); }}\n"
    for index, (name, soname) in enumerate(
        {"cublasCreate_v2": "libcublas.so.13", "ncclSend": "libnccl.so.2", "cudaOther": "libcudart.so.13"}.items()
    ):
        source = tmp_path / f"{index}.c"
        source.write_text(code.format(name), "utf-8")
        told = ("cc", "-shared", "-fPIC", "-o", str(lib / f"libtorch_{index}.so"), str(source), str(first / soname))
        subprocess.run(told, check=True)
    stand_in.libraries(lib, made)
    for soname, name in {"libcublas.so.13": "cublasCreate_v2", "libcudart.so.13": "cudaOther"}.items():
        said = subprocess.run(["nm", "-D", str(made / soname)], capture_output=True, text=True, check=True).stdout
        assert re.search(rf" T {name}@@{re.escape(soname)}$", said, flags=re.MULTILINE)
    assert (
        " T cudaMalloc@@"
        in subprocess.run(
            ["nm", "-D", str(made / "libcudart.so.13")], capture_output=True, text=True, check=True
        ).stdout
    )
