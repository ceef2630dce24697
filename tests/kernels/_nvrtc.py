"""NVRTC through ctypes: compile for any architecture where there is no device, no driver and no CuPy."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler made of a module, and what it said."""

    binary: bytes
    ptx: str
    log: str


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the assembler reports of one kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


class Nvrtc:
    """One release of the compiler."""

    def __init__(self, path: Path) -> None:
        # The compiler looks its built-in headers up by name; loading them first is what makes a wheel's copy found.
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, text: str, architecture: int, options: tuple[str, ...]) -> Compiled:
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"module.cu", 0, None, None)
        try:
            words = [f"-arch=sm_{architecture}".encode(), *(option.encode() for option in options)]
            status = self._library.nvrtcCompileProgram(
                program, ctypes.c_int(len(words)), (ctypes.c_char_p * len(words))(*words)
            )
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode()
            if status:
                raise ValueError(log)
            ptx = self._bytes(program, "PTX").rstrip(b"\0").decode()
            return Compiled(binary=self._bytes(program, "CUBIN"), ptx=ptx, log=log)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        held = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, held)
        return held.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}")


def find(major: int) -> Path | None:
    """The library of a release: a wheel's, or the system's."""
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    wheels = [f"cu{major}/lib", "cuda_nvrtc/lib"]
    places = [folder / wheel for folder in folders for wheel in wheels]
    places += [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    names = (place / f"libnvrtc.so.{major}" for place in places)
    return next((path for path in names if path.exists()), None)


_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<more>[^\n]*)",
    re.DOTALL,
)


def resources(log: str) -> dict[str, Resources]:
    """Each kernel's resources, out of a verbose assembler's log."""
    found = {}
    for entry in _ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", entry["more"])
        found[entry["name"]] = Resources(
            registers=int(entry["registers"]),
            stack_bytes=int(entry["stack"]),
            spill_bytes=int(entry["stores"]) + int(entry["loads"]),
            shared_bytes=int(shared[1]) if shared else 0,
        )
    return found
