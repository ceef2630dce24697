"""Build libraries that stand in for CUDA's, so that PyTorch for CUDA runs its host side without a card.

    python tests/host_side/stand_in.py FOLDER

``cudart.c`` is the runtime. Every other function that this PyTorch's libraries take from CUDA's (cuBLAS, cuDNN, NCCL
and more) returns 0, which they take for success. Start Python with ``LD_LIBRARY_PATH=FOLDER`` then.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

RUNTIME = Path(__file__).with_name("cudart.c")
_OTHERS = "libnccl.so.2"
"""Has the functions whose library is not named where they are wanted."""
_TAGS = {"NVSHMEM": "libnvshmem_host.so.3"}
_DRIVER = "libcuda.so.1"
_DRIVERS_OWN = re.compile(
    rb"(?<=\0)(cu(?:Ctx|Device|Driver|Func|Get|Init|Launch|Link|Mem|Module|Occupancy|Stream|Tensor)\w*)(?=\0)"
)
"""Names of functions that PyTorch looks for in the driver while it runs."""


def runtime(folder: Path, names: frozenset[str] = frozenset()) -> Path:
    """Build the runtime, with these functions besides its own, which only return 0; return its path."""
    return _build(folder, "libcudart.so.13", "libcudart.so.13", names - _known(), RUNTIME)


def _known() -> frozenset[str]:
    return frozenset(re.findall(r"^\S[^;={}\n]*?\b(\w+)\(", RUNTIME.read_text("utf-8"), flags=re.MULTILINE))


def libraries(lib: Path, folder: Path) -> None:
    """Build what the libraries in PyTorch's folder ``lib`` need of CUDA's."""
    wanted: dict[str, set[str]] = {}
    for path in lib.glob("*.so"):
        for soname in re.findall(r"NEEDED +(lib(?:cu|nv|nccl)\S+)", _said("objdump", "-p", str(path))):
            wanted.setdefault(soname, set())
    for path in lib.glob("*.so"):
        for name, tag in re.findall(r" [Uw] (\w+)(?:@(\S+))?$", _said("nm", "-D", "-u", str(path)), flags=re.MULTILINE):
            soname = _TAGS.get(tag, tag)
            if soname in wanted:
                wanted[soname].add(name)
            elif not tag and re.match("nccl|cu[A-Zs]|nvrtc", name):
                wanted[_OTHERS].add(name)
        wanted.setdefault(_DRIVER, set()).update(name.decode() for name in _DRIVERS_OWN.findall(path.read_bytes()))
    tags = {soname: tag for tag, soname in _TAGS.items()}
    for soname, names in wanted.items():
        if soname.startswith("libcudart"):
            runtime(folder, frozenset(names))
    for soname, names in wanted.items():
        if soname == _DRIVER:  # whose own functions are the runtime's
            _build(folder, soname, soname, names - _known(), folder / "libcudart.so.13")
        elif not soname.startswith("libcudart"):
            _build(folder, soname, tags.get(soname, soname), names)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _build(folder: Path, soname: str, tag: str, names: set[str] | frozenset[str], *sources: Path) -> Path:
    """Build a library whose functions have the version ``tag``."""
    folder.mkdir(parents=True, exist_ok=True)
    made, code, versions = (folder / f"{soname}{ending}" for ending in ("", ".c", ".map"))
    code.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names)), "utf-8")
    versions.write_text(f"{tag} {{ global: *; }};\n", "utf-8")
    linked = f"-Wl,--no-as-needed,-soname,{soname},--version-script,{versions}"
    files = map(str, (code, *sources))
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-pthread", linked, "-o", str(made), *files], check=True)
    return made


if __name__ == "__main__":
    found = find_spec("torch")
    assert found is not None, "torch is not installed"
    assert found.origin is not None, "torch is not installed"
    libraries(Path(found.origin).parent / "lib", Path(sys.argv[1]))
