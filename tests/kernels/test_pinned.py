"""Host memory: its size, its alignment, how long it lives, and what pins it."""

from __future__ import annotations

import gc
import mmap
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ps_kernels import InvalidArgument, KernelError, PinnedArena, _pinned
from ps_kernels._pinned import CudaPinner, prefer_node, touch

MIB = 1 << 20


class StubPinner:
    """Pins nothing, and remembers being asked."""

    def __init__(self, why_not: str | None = None, node: int | None = None) -> None:
        self._why_not, self._node = why_not, node
        self.calls: list[tuple[str, int]] = []

    def node(self) -> int | None:
        return self._node

    def pin(self, address: int, numbytes: int) -> str | None:
        self.calls.append(("pin", numbytes))
        return self._why_not

    def unpin(self, address: int) -> None:
        self.calls.append(("unpin", 0))


def test_tensors_are_views_of_it() -> None:
    arena = PinnedArena(4096, pin=False)
    singles = arena.tensor(128, 4, torch.float32)
    halves = arena.tensor(128, 8, torch.bfloat16)
    singles.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert halves[1::2].tolist() == [1, 2, 3, 4]
    assert arena.tensor(4096, 0, torch.float32).shape == (0,)
    assert arena.bytes == 4096
    assert not arena.pinned


@pytest.mark.parametrize("size", [1, 4097, 3 * MIB + 5])
def test_alignment_and_zeros(size: int) -> None:
    arena = PinnedArena(size, pin=False)
    assert arena.bytes == size
    whole = arena.tensor(0, size, torch.uint8)
    assert whole.data_ptr() % 4096 == 0
    assert not whole.any()
    whole.fill_(255)
    if size > 256:
        assert arena.tensor(128, 1, torch.uint8).data_ptr() % 128 == 0


@pytest.mark.parametrize(
    ("size", "message"),
    [
        pytest.param(2**60, r"bytes: cannot allocate 1,152,921,504,606,846,976 bytes \(.+\)", id="address space"),
        pytest.param(
            10**400, "bytes: expected at most 9223372036854775807, found a whole number of 1329 bits", id="400 digits"
        ),
        pytest.param("1GiB", "bytes: expected a whole number from 1, found '1GiB'", id="text"),
    ],
)
def test_memory_that_no_computer_gives(size: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        PinnedArena(size, pin=False)


@pytest.mark.parametrize("pin", ["no", 1, None])
def test_pinning_is_asked_for_by_true_or_false(pin: Any) -> None:
    with pytest.raises(InvalidArgument, match="pin: expected True or False, found"):
        PinnedArena(4096, pin=pin)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from Linux")
def test_it_takes_what_was_asked_for() -> None:
    """In a process of its own: 65 MiB, which an allocator of powers of two would make 128."""
    program = (
        "import torch\nfrom ps_kernels import PinnedArena\n"
        "def resident():\n"
        "    line = next(each for each in open('/proc/self/status') if each.startswith('VmRSS'))\n"
        "    return int(line.split()[1]) / 1024\n"
        "torch.ones(10).fill_(2)\n"
        "before = resident()\n"
        "arena = PinnedArena(65 << 20, pin=False)\n"
        "empty = resident()\n"
        "arena.tensor(0, 65 << 20, torch.uint8).fill_(1)\n"
        "full = resident()\n"
        "arena.close()\n"
        "print(empty - before, full - before, resident() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    empty, full, closed = (float(word) for word in done.stdout.split())
    assert empty < 4
    assert 64 <= full < 72
    assert closed < 8


def test_close() -> None:
    arena = PinnedArena(4096, pin=False)
    view = arena.tensor(0, 8, torch.float32)[2:]
    with pytest.raises(KernelError, match="has 1 tensors in use: drop them"):
        arena.close()
    view.fill_(1)
    del view
    gc.collect()
    arena.close()
    arena.close()
    assert arena.bytes == 0
    with pytest.raises(KernelError, match="is closed and gives no more tensors"):
        arena.tensor(0, 1, torch.float32)


def test_tensors_outlive_a_dropped_arena_and_pinning_outlives_them() -> None:
    pinner = StubPinner()
    arena = PinnedArena(1 << 16, pinner=pinner)
    assert arena.pinned
    tensor = arena.tensor(0, 1 << 14, torch.float32)
    del arena
    gc.collect()
    assert tensor.fill_(2).sum() == 2 << 14
    assert pinner.calls == [("pin", 1 << 16)]
    del tensor
    gc.collect()
    assert pinner.calls == [("pin", 1 << 16), ("unpin", 0)]


def test_close_unpins_once() -> None:
    pinner = StubPinner(node=0)
    arena = PinnedArena(4096, pinner=pinner)
    arena.close()
    arena.close()
    del arena
    gc.collect()
    assert [name for name, _ in pinner.calls] == ["pin", "unpin"]


def test_where_pinning_fails_memory_is_there_all_the_same() -> None:
    with pytest.warns(UserWarning, match="not pinned, so copies are slower: no room"):
        arena = PinnedArena(4096, pinner=StubPinner("no room"))
    assert not arena.pinned
    assert arena.tensor(0, 4, torch.float32).tolist() == [0] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device() -> None:
    with pytest.warns(UserWarning, match="torch finds no CUDA device"):
        assert not PinnedArena(4096).pinned
    assert CudaPinner().node() is None


def test_not_being_pinned_is_said_once() -> None:
    """By the package itself, not by Python's filter, which may be set to show every warning."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            PinnedArena(4096, pinner=StubPinner("no room"))
    assert [str(each.message) for each in said] == [
        "ps_kernels: host memory is not pinned, so copies are slower: no room"
    ]


class Runtime:
    """CUDA's runtime, which refuses more than a page."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return 0 if arguments[1] <= 4096 else 2

    def cudaHostUnregister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return 0


def test_the_runtime_is_called_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, waited = Runtime(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index != 1, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(CudaPinner, "node", lambda self: None)
    arena = PinnedArena(4096)
    address = arena.tensor(0, 1, torch.uint8).data_ptr()
    arena.close()
    assert runtime.calls == [(address, 4096, 1), (address,)]
    assert waited == [0, 2], "waiting for a card that is not in use would take memory there"
    filled = []
    made = torch.zeros(1)
    monkeypatch.setattr(torch, "empty", lambda *_, device, **__: filled.append(device) or made)
    with pytest.warns(UserWarning, match="cudaHostRegister failed with status 2"):
        PinnedArena(8192)
    assert filled == ["cuda"], "the runtime's last error is taken away by a launch, and not left for the next one"


def resident_bytes() -> int:
    line = next(each for each in Path("/proc/self/status").read_text("ascii").splitlines() if "VmRSS" in each)
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from Linux")
@pytest.mark.parametrize("more", [0, 5 * MIB + 13])
def test_threads_touch_all_of_it_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """Each page, whatever the threads' parts; and nothing beyond the end, which the next bytes show."""
    monkeypatch.setattr(_pinned.os, "sched_getaffinity", lambda _: range(3))
    arena, size = PinnedArena(128 * MIB, pin=False), 96 * MIB + more
    memory = arena.tensor(size, 2, torch.uint8).fill_(7)
    before = resident_bytes()
    touch(arena.tensor(0, 1, torch.uint8).data_ptr(), size)
    assert resident_bytes() - before > size - 4 * MIB
    assert memory.tolist() == [7, 7]
    assert not arena.tensor(0, size, torch.uint8).any()


def test_pinning_comes_after_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(_pinned, "touch", lambda address, numbytes: calls.append(f"{numbytes} {len(runtime.calls)}"))
    assert CudaPinner().pin(4096, 4096) is None
    assert calls == ["4096 0"]


def test_the_node_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x3B, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    for text, node in (("1\n", 1), ("-1\n", None), ("?", None)):
        read = []
        monkeypatch.setattr(Path, "read_text", lambda self, encoding, text=text, read=read: read.append(self) or text)
        assert CudaPinner().node() == node
        assert [str(path) for path in read] == ["/sys/bus/pci/devices/0000:3b:00.0/numa_node"]


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE.exists() or "[never]" in HUGE.read_text("ascii"), reason="no huge pages here")
def test_huge_pages_are_asked_for() -> None:
    """Only private memory gets them; what mmap makes by itself is shared."""
    whole = PinnedArena(8 * MIB, pin=False).tensor(0, 8 * MIB, torch.uint8)
    flags = []
    for line in Path("/proc/self/smaps").read_text("ascii").splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            inside, private = first <= whole.data_ptr() < last, line.split()[1].endswith("p")
        elif inside and line.startswith("VmFlags"):
            flags = line.split()[1:]
            break
    assert private
    assert "hg" in flags


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="children cannot be kept out here")
def test_a_child_gets_no_pinned_memory() -> None:
    """A page that both have is copied for whoever writes first, and the device would go on with the other."""
    arena = PinnedArena(4096, pinner=StubPinner())
    address = arena.tensor(0, 1, torch.uint8).data_ptr()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process of several threads
        child = os.fork()
    if child == 0:
        here = any(line.startswith(f"{address:x}-") for line in open("/proc/self/maps"))  # noqa: SIM115
        os.write(writer, b"yes" if here else b"no")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 3) == b"no"
    assert any(line.startswith(f"{address:x}-") for line in Path("/proc/self/maps").read_text("ascii").splitlines())
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("node", [-1, 64, 1000])
def test_a_node_beyond_the_mask_is_refused(node: int) -> None:
    assert not prefer_node(0, 4096, node)


@pytest.mark.skipif(sys.platform != "linux", reason="memory nodes are Linux's")
def test_a_node_that_is_not_there_is_refused() -> None:
    address = PinnedArena(4096, pin=False).tensor(0, 1, torch.uint8)
    assert not prefer_node(address.data_ptr(), 4096, 63)


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "1GiB"])
def test_sizes_that_are_refused(count: object) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"bytes: expected a whole number from 1, found {count!r}")):
        PinnedArena(count)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [(-4, 1), (0, -1), (2, 1), (4096, 1), (0, 1025)])
def test_places_that_are_refused(place: tuple[int, int]) -> None:
    arena = PinnedArena(4096, pin=False)
    with pytest.raises(InvalidArgument, match="expected a multiple of 4, and an end within 4096 bytes"):
        arena.tensor(*place, torch.float32)


def test_a_window_is_given_by_whole_numbers_and_a_type() -> None:
    arena, wrong = PinnedArena(4096, pin=False), "expected a whole number of 64 bits, found"
    with pytest.raises(InvalidArgument, match=f"offset: {wrong} 0.5"):
        arena.tensor(0.5, 4, torch.float32)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=f"numel: {wrong} a whole number of 1329 bits"):
        arena.tensor(0, 10**400, torch.float32)
    with pytest.raises(InvalidArgument, match=r"dtype: expected a torch\.dtype, found 'float32'"):
        arena.tensor(0, 4, "float32")  # type: ignore[arg-type]
