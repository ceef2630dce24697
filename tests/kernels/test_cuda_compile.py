"""Every CUDA kernel compiles, without a warning, for each architecture; what it takes of each is recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest

from _emulated import of_one_type
from _nvrtc import Compiled, Nvrtc, Resources, find, resources
from ps_kernels._cuda_source import KERNELS, OPTIONS, TUNINGS, Tuning, options, source

ARCHITECTURES = {70: 12, 75: 13, 80: 13, 86: 13, 89: 13, 90: 13, 100: 13, 120: 13}
"""Compute capability, and the release that compiles for it; 12 is the last that knows 70."""
SOAK_ONLY = (75, 86, 89, 100)
"""Architectures that only ``--soak`` compiles for: their registers lie between those of older and newer ones."""
VERBOSE = "--ptxas-options=-v"
EXPECTED = re.compile("nvrtc: warning: Architectures prior to '<compute/sm>_75' are deprecated.*\n?")
"""The one warning that is not about the source."""
RECORDED: dict[tuple[int, str], Resources] = {}


@cache
def compiler(major: int) -> Nvrtc:
    path = find(major)
    if path is None:
        pytest.skip(f"no NVRTC {major}: nothing was compiled with it")
    return Nvrtc(path)


@cache
def compiled(architecture: int, module: str) -> Compiled:
    """Compile one of the modules once for all tests of this process."""
    return compiler(ARCHITECTURES[architecture]).compile(source(module), architecture, (*OPTIONS, VERBOSE))


@pytest.fixture(scope="module", autouse=True)
def _table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close with registers and spilled bytes of every kernel."""
    yield
    if not RECORDED:
        return
    names = sorted({name for _, name in RECORDED})
    lines = [f"{'registers (+ bytes spilled)':28}" + "".join(f"{f'sm_{each}':>8}" for each in ARCHITECTURES)]
    for name in names:
        cells = []
        for architecture in ARCHITECTURES:
            found = RECORDED.get((architecture, name))
            spilled = f"+{found.spill_bytes}" if found and found.spill_bytes else ""
            cells.append(f"{f'{found.registers}{spilled}' if found else '-':>8}")
        lines.append(f"{name:28}" + "".join(cells))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *lines, sep="\n")


@pytest.mark.parametrize("module", KERNELS)
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=pytest.mark.soak) if each in SOAK_ONLY else each for each in ARCHITECTURES],
)
def test_every_kernel_compiles(architecture: int, module: str) -> None:
    made = compiled(architecture, module)
    assert made.binary.startswith(b"\x7fELF")
    assert "warning" not in EXPECTED.sub("", made.log)
    found = resources(made.log)
    assert set(found) == set(KERNELS[module]), "the kernels of the list and of the source are the same"
    RECORDED.update({(architecture, name): each for name, each in found.items()})
    # A block of 512 threads and 128 registers a thread are what every architecture can start.
    assert all(each.registers <= 128 for each in found.values())
    assert all(each.spill_bytes <= (16 if architecture == 70 else 0) for each in found.values()), found


@pytest.mark.parametrize(
    ("module", "kernel", "wide"),
    [
        ("step", "adam_bfloat16_bfloat16", {"ld.global.v4.f32": 3, "st.global.v4.f32": 3, "ld.global.v4.u16": 1}),
        ("step", "accumulate_float32", {"ld.global.v4.f32": 2, "st.global.v4.f32": 1}),
        ("norm", "norm_float32", {"ld.global.v4.f32": 4}),
        ("norm", "norm_bfloat16", {"ld.global.v4.u32": 4}),
        ("copy", "copy_pieces", {"ld.v4.u32": 4, "st.v4.u32": 4}),
    ],
)
def test_accesses_are_wide(module: str, kernel: str, wide: dict[str, int]) -> None:
    """As wide as they were meant to be, and so many in a row; written-out loops may multiply them."""
    text = compiled(90, module).ptx
    body = next(part for part in text.split(".entry ") if part.startswith(f"{kernel}("))
    for access, count in wide.items():
        found = len(re.findall(rf"\b{re.escape(access)}\b", body))
        assert found >= count, (access, found)
        assert found % count == 0


@pytest.mark.parametrize("packs", sorted({each.packs for each in TUNINGS}))
def test_tunings(packs: int) -> None:
    """As many reads before the first use as there are packs, past the caches, and nothing spilled."""
    words = options("step", Tuning(packs=packs, past=3))
    made = compiler(13).compile(of_one_type(), 90, (*words, VERBOSE))
    assert "warning" not in made.log
    kernel = "adam_bfloat16_bfloat16"
    assert resources(made.log)[kernel].spill_bytes == 0
    body = next(part for part in made.ptx.split(".entry ") if part.startswith(f"{kernel}("))
    first = body[: body.index("sqrt.rn")]
    assert first.count("ld.global.cs.v4.u32") == 3 * packs
    assert first.count("ld.global.cs.v2.u32") == packs
    assert body.count("st.global.cs.v4.u32") % (3 * packs) == 0
    assert "st.global.v4" not in body


def test_what_is_not_chosen_is_no_option() -> None:
    """So what is compiled for most users is what it was, whatever could be chosen."""
    assert options("step", Tuning()) == OPTIONS
    assert options("step", Tuning(past=1, threads=512)) == (*OPTIONS, "-DPS_PAST=1", "-DPS_STEP_THREADS=512")
    assert {options(module, each) for module in ("norm", "copy") for each in TUNINGS} == {OPTIONS}
    assert TUNINGS[0] == Tuning()
    assert len(set(map(str, TUNINGS))) == len(set(TUNINGS)) == len(TUNINGS)


def test_a_warning_is_seen() -> None:
    log = compiler(13).compile('extern "C" __global__ void it() { int unused; }', 80, OPTIONS).log
    assert "warning" in EXPECTED.sub("", log)


def test_an_error_is_raised() -> None:
    with pytest.raises(ValueError, match="undefined"):
        compiler(13).compile('extern "C" __global__ void it() { absent(); }', 80, OPTIONS)


def test_spills_are_seen() -> None:
    """A kernel that must spill, so that no spills above means something."""
    body = "".join(f"float x{i} = in[{i} * n];" for i in range(200)) + "__syncthreads();"
    body += "".join(f"out[{i} * n] = x{i} * x{(i * 7) % 200};" for i in range(200))
    text = f'extern "C" __global__ void __launch_bounds__(1024) it(const float *in, float *out, int n) {{ {body} }}'
    found = resources(compiler(13).compile(text, 80, (*OPTIONS, VERBOSE)).log)
    assert found["it"].spill_bytes > 0


def test_nothing_is_fused() -> None:
    """The options keep a product and a sum apart: without them the same source has another machine code."""
    text = 'extern "C" __global__ void it(float *a, float b, float c) { a[0] = a[0] * b + c; }'
    fused = tuple(option for option in OPTIONS if option != "-fmad=false")
    assert compiler(13).compile(text, 80, OPTIONS).binary != compiler(13).compile(text, 80, fused).binary


def test_denormals_are_kept() -> None:
    """With what CuPy's compiler adds by itself; what it adds to a RawModule's options would flush them."""
    for module in KERNELS:
        text = of_one_type() if module == "step" else source(module)
        kept, flushed = (
            compiler(13).compile(text, 90, (*OPTIONS, "--device-as-default-execution-space", *more))
            for more in ((), ("-ftz=true",))
        )
        assert not kept.log
        assert ".ftz" not in kept.ptx
        assert ".ftz" in flushed.ptx or module == "copy"


def test_where_no_compiler_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setenv("LD_LIBRARY_PATH", "/absent")
    assert find(13) is None
