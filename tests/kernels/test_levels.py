"""Compiled code of every instruction set, torch and numpy: bitwise the pure-Python reference."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
import time
import warnings
from array import array
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ps_kernels
from ps_core import _options
from ps_core._reference import floats, optim, sum_of_squares
from ps_kernels import _backends, _compile, _native
from ps_kernels._arithmetic_order import BLOCK_NUMEL

LEVELS = [name for name in _native.LEVELS if ps_kernels.backends()[name] == "available"]
EVERY = [*LEVELS, "torch", "numpy"]
KINDS = [np.float32, np.uint16, np.float16]
SPECIAL = [0.0, -0.0, 1e-45, -1e-41, 1.2e-38, 65504.0, 65520.0, 6e-8, 3e-8, 3.4e38, np.inf, -np.inf, np.nan]
lengths = st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129]), st.integers(0, 700))


def view_as(backend: str, x: np.ndarray) -> Any:
    """The array itself for numpy and compiled code, a tensor on the same bytes for torch."""
    if backend != "torch":
        return x
    tensor = torch.from_numpy(x)
    return tensor.view(torch.bfloat16) if x.dtype == np.uint16 else tensor


def as_kind(x: np.ndarray, kind: type) -> np.ndarray:
    if kind is np.uint16:
        return np.array(floats.to_bf16(array("f", x.tolist())), np.uint16)
    with np.errstate(over="ignore"):
        return x.astype(kind)


def as_singles(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)


def shifted(x: np.ndarray, by: int) -> np.ndarray:
    """The same values, starting ``by`` elements after where numpy would put them."""
    room = np.zeros(x.size + by, x.dtype)
    room[by:] = x
    return room[by:]


def numbers(rng: np.random.Generator, numel: int, least: int = -12) -> np.ndarray:
    """Of many magnitudes, every tenth of them special."""
    x = (rng.standard_normal(numel) * 10.0 ** rng.integers(least, 4, numel)).astype(np.float32)
    places = rng.random(numel) < 0.1
    x[places] = rng.choice(np.array(SPECIAL, np.float32), places.sum())
    return x


def same(bits: Any, one: np.ndarray, other: np.ndarray, what: str) -> None:
    np.testing.assert_array_equal(bits(one), bits(other), err_msg=what)


@given(
    numel=lengths,
    offsets=st.lists(st.integers(0, 17), min_size=5, max_size=5),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from([None, *KINDS])),
    chosen=st.fixed_dictionaries(
        {
            "step": st.integers(1, 1000),
            "lr": st.sampled_from([0.0, 1e-3, 0.7, 1e38]),
            "beta1": st.floats(0, 0.999),
            "beta2": st.floats(0, 0.9999),
            "eps": st.sampled_from([0.0, 1e-8, 1e-3]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "decoupled": st.booleans(),
        }
    ),
    scale=st.sampled_from([1.0, 0.37, 1e-30, 0.0]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_adam_is_the_reference(
    bits: Any, numel: int, offsets: list[int], kinds: Any, chosen: dict[str, Any], scale: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    start = [
        numbers(rng, numel),
        numbers(rng, numel),
        np.abs(numbers(rng, numel)),
        as_kind(numbers(rng, numel), kinds[0]),
    ]
    optimizer = (_options.AdamW if chosen["decoupled"] else _options.Adam)(
        lr=chosen["lr"],
        betas=(chosen["beta1"], chosen["beta2"]),
        eps=chosen["eps"],
        weight_decay=chosen["weight_decay"],
    )
    runs = [array("f", x.tolist()) for x in (*start[:3], as_singles(start[3]))]
    wanted = [np.array(x, np.float32) for x in optim.step_run(optimizer, chosen["step"], scale, *runs)]
    for backend in EVERY:
        arrays = [shifted(x, by) for x, by in zip(start, offsets, strict=False)]
        out = None if kinds[1] is None else shifted(np.zeros(numel, kinds[1]), offsets[4])
        ps_kernels.adam_step(
            *(view_as(backend, x) for x in arrays),
            None if out is None else view_as(backend, out),
            **chosen,
            grad_scale=scale,
            backend=backend,
        )
        for mine, theirs in zip(arrays, wanted, strict=False):
            same(bits, mine, theirs, backend)
        same(bits, arrays[3], start[3], f"{backend}: the gradient is only read")
        if out is not None:
            same(bits, out, as_kind(wanted[0], kinds[1]), backend)


@given(
    numel=lengths,
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from([None, *KINDS])),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1.0, 0.37]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_sgd_is_the_reference(
    bits: Any, numel: int, kinds: Any, momentum: float, decay: float, scale: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    start = [numbers(rng, numel), numbers(rng, numel), as_kind(numbers(rng, numel), kinds[0])]
    optimizer = _options.SGD(lr=0.3, momentum=momentum, weight_decay=decay)
    runs = [array("f", x.tolist()) for x in (start[0], start[1], start[1], as_singles(start[2]))]
    wanted = [np.array(x, np.float32) for x in optim.step_run(optimizer, 1, scale, *runs)]
    for backend in EVERY:
        arrays = [shifted(x, 3) for x in start]
        out = None if kinds[1] is None else shifted(np.zeros(numel, kinds[1]), 1)
        ps_kernels.sgd_step(
            *(view_as(backend, x) for x in arrays), None if out is None else view_as(backend, out), lr=0.3,
            momentum_decay=momentum, weight_decay=decay, grad_scale=scale, backend=backend,
        )  # fmt: skip
        for mine, theirs in zip(arrays[:2], wanted, strict=False):
            same(bits, mine, theirs, backend)
        if out is not None:
            same(bits, out, as_kind(wanted[0], kinds[1]), backend)


def nearest(exact: Fraction) -> np.float32:
    """The single nearest to an exact value, the even one of two."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) % 2))


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("exponent", [0, -30, -126, -135], ids=lambda exponent: f"2^{exponent}")
def test_fused_operations_round_once(bits: Any, backend: str, exponent: int) -> None:
    """A hair from halfway between two singles: too little for a double, so rounding twice would go wrong."""
    rng = np.random.default_rng(abs(exponent))
    unit = 2.0 ** max(exponent - 23, -149)
    p = (rng.integers(0, 1 << 23, 400) * unit + (2.0**exponent if exponent >= -126 else 0)).astype(np.float32)
    p *= rng.choice([-1, 1], 400).astype(np.float32)
    for k in (1, 3, 101):
        lr, less = (1 + k * 2.0**-23) * 2.0**-40, 1 - k * 2.0**-23
        g = (rng.choice([-1, 1], 400) * less * (unit / 2) * 2.0**40).astype(np.float32)
        wanted = np.array(
            [nearest(Fraction(float(x)) - Fraction(lr) * Fraction(float(y))) for x, y in zip(p, g, strict=True)]
        )
        twice = (p.astype(np.float64) - lr * g.astype(np.float64)).astype(np.float32)
        assert (twice != wanted).mean() > 0.1, "or there is nothing to see"
        mine = p.copy()
        ps_kernels.sgd_step(view_as(backend, mine), None, view_as(backend, g.copy()), lr=lr, backend=backend)
        same(bits, mine, wanted, backend)


@given(numel=lengths, kinds=st.tuples(*[st.sampled_from(KINDS)] * 2), by=st.integers(0, 9), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_other_work_is_the_same_everywhere(bits: Any, numel: int, kinds: Any, by: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, total = shifted(as_kind(numbers(rng, numel), kinds[0]), by), numbers(rng, numel)
    chunk = np.zeros(numel + by, kinds[1])
    results = []
    for backend in EVERY:
        sums, into, norms, back = total.copy(), chunk.copy(), np.ones(2, np.float32), np.zeros_like(x)
        source = view_as(backend, x)
        ps_kernels.accumulate(view_as(backend, sums), source, scale=0.3, backend=backend)
        ps_kernels.sumsq_finite(source, view_as(backend, norms), backend=backend)
        half = numel // 2
        rows, alone = np.ones((3, 2), np.float32), np.ones((3, 2), np.float32)
        spans = [(0, half), (half, half), (half, numel)]
        ps_kernels.sumsq_finite(source, view_as(backend, rows), spans=spans, backend=backend)
        for (start, stop), row in zip(spans, alone, strict=True):
            ps_kernels.sumsq_finite(source[start:stop], view_as(backend, row), backend=backend)
        same(bits, rows, alone, backend)
        ps_kernels.gather([source[half:], source[:half]], view_as(backend, into), [by + half, by], backend=backend)
        ps_kernels.scatter(
            view_as(backend, into), [by + half, by], [view_as(backend, back)[half:], view_as(backend, back)[:half]],
            backend=backend,
        )  # fmt: skip
        results.append((sums, norms, into, back))
    for backend, result in zip(EVERY, results, strict=True):
        for mine, theirs in zip(result, results[-1], strict=True):
            same(bits, mine, theirs, backend)
    same(bits, results[-1][2][by:], x if kinds[0] is kinds[1] else as_kind(as_singles(x), kinds[1]), "cast")


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_conversions_of_all_16_bit_numbers(bits: Any, backend: str, kind: type) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).view(kind if kind is np.float16 else np.uint16)
    singles = np.empty(1 << 16, np.float32)
    ps_kernels.gather([patterns], singles, [0], backend=backend)
    same(bits, singles, as_singles(patterns), backend)
    # And back from singles around them: between two neighbours, and a bit to either side.
    near = singles.view(np.uint32)[:, None] + np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], np.uint32)
    near = near.reshape(-1).view(np.float32)
    halves = np.empty(near.size, patterns.dtype)
    ps_kernels.gather([near], halves, [0], backend=backend)
    same(bits, halves, as_kind(near, kind if kind is not np.float32 else np.uint16), backend)


@pytest.mark.parametrize("backend", LEVELS)
def test_threads_cuts_and_alignment_change_nothing(bits: Any, backend: str) -> None:
    """Long enough for several threads and for stores that pass the caches."""
    before = torch.get_num_threads()
    numel, rng = (1 << 21) + 77, np.random.default_rng(3)
    start = [*(rng.standard_normal((3, numel)).astype(np.float32) ** 2), rng.integers(0, 1 << 15, numel, np.uint16)]
    results = []
    for threads, by, parts in ((1, 0, 1), (2, 0, 1), (3, 5, 1), (7, 32, 1), (2, 1, 3)):
        ps_kernels.set_threads(threads)
        arrays = [shifted(x, by) for x in start]
        out, norm = shifted(np.zeros(numel, np.uint16), by), np.zeros(2, np.float32)
        cuts = [numel // parts // 64 * 64 * part for part in range(parts)] + [numel]
        for first, last in itertools.pairwise(cuts):
            ps_kernels.adam_step(*(x[first:last] for x in arrays), out[first:last], step=3, lr=1e-2, backend=backend)
        ps_kernels.sumsq_finite(arrays[0], norm, backend=backend)
        chunk = shifted(np.zeros(numel, np.uint16), by + 1)
        ps_kernels.gather([out[: numel // 3], out[numel // 3 :]], chunk, [0, numel // 3], backend=backend)
        same(bits, chunk, out, backend)
        results.append((*arrays[:3], out, norm))
    for result in results[1:]:
        for mine, theirs in zip(result, results[0], strict=True):
            same(bits, mine, theirs, f"{backend}")
    ps_kernels.set_threads(before)
    plain = [x.copy() for x in start]
    ps_kernels.adam_step(*plain, step=3, lr=1e-2, backend="numpy")
    same(bits, results[0][0], plain[0], backend)


def test_flushing_denormals_elsewhere_changes_nothing(bits: Any) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for backend in LEVELS:
            total = np.full(100, 1e-42, np.float32)
            ps_kernels.accumulate(total, np.full(100, 1e-42, np.float32), backend=backend)
            same(bits, total.view(np.uint32), np.full(100, 2 * np.float32(1e-42).view(np.uint32), np.uint32), backend)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("numel", [BLOCK_NUMEL - 1, BLOCK_NUMEL, 2 * BLOCK_NUMEL + 8193])
def test_sums_of_squares_are_the_reference(backend: str, numel: int) -> None:
    x, norms = np.random.default_rng(numel).standard_normal(numel).astype(np.float32), np.zeros(2, np.float32)
    ps_kernels.sumsq_finite(view_as(backend, x), view_as(backend, norms), backend=backend)
    assert norms.tolist() == [sum_of_squares.single_square_sum(array("f", x.tobytes())), 0]


def test_a_child_of_fork_works(bits: Any) -> None:
    """The threads stay with the parent, so the child does it alone, and does not wait for them."""
    program = (
        "import os, numpy as np, ps_kernels\n"
        "x, out = np.ones(1 << 20, np.float32), np.zeros(2, np.float32)\n"
        "ps_kernels.set_threads(2)\n"
        "ps_kernels.sumsq_finite(x, out)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    ps_kernels.sumsq_finite(x, out)\n"
        "    os._exit(int(out[0] != 1 << 21))\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=False, timeout=300).returncode == 0


def without_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, compiler: str) -> dict[str, Any]:
    monkeypatch.setenv("PS_KERNELS_CACHE", str(folder))
    monkeypatch.setenv("CC", compiler)
    found = _native.native.__wrapped__()
    monkeypatch.setattr(_backends, "native", lambda: found)
    return dict(found)


def test_without_a_compiler_torch_does_it_and_says_so_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_compiler(monkeypatch, tmp_path, "no-such-compiler")
    found = ps_kernels.backends()
    assert {found[name] for name in _native.LEVELS} == {"not compiled: no C compiler found: no-such-compiler"}
    x, out = torch.ones(4), torch.zeros(2)
    with pytest.warns(UserWarning, match="torch or numpy does the work, several times slower: not compiled: no C comp"):
        ps_kernels.sumsq_finite(x, out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps_kernels.sumsq_finite(x, out)
    assert out[0] == 8
    with pytest.raises(ps_kernels.BackendMissing, match="backend 'scalar': not compiled"):
        ps_kernels.sumsq_finite(x, out, backend="scalar")


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = without_compiler(monkeypatch, tmp_path, "false")
    assert found["scalar"] == "not compiled: the C compiler failed: exit status 1"
    (tmp_path / "file").touch()
    found = without_compiler(monkeypatch, tmp_path / "file", "false")
    assert "cannot compile into" in str(found["scalar"])


@pytest.mark.skipif(not LEVELS, reason="no C compiler here")
def test_a_plain_checkout_compiles_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PS_KERNELS_CACHE", str(tmp_path))
    made = _compile.library()
    assert made == tmp_path / _compile.library_name()
    assert list(tmp_path.iterdir()) == [made], "nothing else is left"
    before = os.stat(made).st_mtime_ns
    assert os.stat(_compile.library()).st_mtime_ns == before


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_of_several_at_once_one_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, locks: bool) -> None:
    """Threads stand for processes: each opens the folder, and locks belong to what was opened."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setenv("PS_KERNELS_CACHE", str(tmp_path / "new"))
    compiled, begun = [], threading.Barrier(4)

    def compile_into(folder: Path) -> Path:
        compiled.append(folder)
        time.sleep(0.2)
        made = folder / _compile.library_name()
        made.touch()
        return made

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def find(_: int) -> Path:
        begun.wait()
        return _compile.library()

    monkeypatch.setattr(_compile, "compile_into", compile_into)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(find, range(4)))
    assert found == {tmp_path / "new" / _compile.library_name()}
    if locks:
        assert len(compiled) == 1


def test_a_process_that_is_stopped_while_it_compiles_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setenv("PS_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(_compile, "_MOST_WAIT_S", 0.2)
    monkeypatch.setattr(_compile, "compile_into", lambda folder: folder / "compiled here")
    stopped = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    began = time.monotonic()
    assert _compile.library() == tmp_path / "compiled here"
    assert time.monotonic() - began >= 0.2
    os.close(stopped)


def test_where_the_library_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PS_KERNELS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _compile.cache_folder() == tmp_path / "ps_kernels"


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [("x86_64", {"avx512", "avx2", "scalar"}), ("aarch64", {"neon", "scalar"}), ("riscv64", {"scalar"})],
)
def test_levels_of_each_kind_of_processor(monkeypatch: pytest.MonkeyPatch, machine: str, wanted: set[str]) -> None:
    monkeypatch.setattr(_compile.platform, "machine", lambda: machine)
    assert set(_compile.levels()) == wanted


@pytest.mark.parametrize(("asked", "most"), [("1", 1), ("1,4", 1), ("", None), ("many", None), ("0", 1)])
def test_threads_at_the_start(monkeypatch: pytest.MonkeyPatch, asked: str, most: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert _native._default_threads() == most or (most is None and _native._default_threads() >= 1)


def test_every_level_of_the_processor_is_there() -> None:
    """What the system reports of the processor, and what was found, agree."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    if not LEVELS or not flags & {"avx2", "sse2"}:
        pytest.skip("no compiled levels, or no list of what the processor has")
    assert ("avx2" in LEVELS) == ({"avx2", "fma", "f16c"} <= flags)
    assert ("avx512" in LEVELS) == ({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"} <= flags)


@pytest.mark.parametrize("kind", KINDS)
def test_long_and_short_spans_are_summed_as_if_alone(bits: Any, kind: Any) -> None:
    """In a native backend by one call, whose scratch memory is the longest span's."""
    x = as_kind(numbers(np.random.default_rng(5), 200_000), kind)
    spans = [(7, 190_000), (0, 3), (3, 3), (65_536, 131_072), (1, 140_000), (199_999, 200_000)]
    for backend in EVERY:
        source, rows, alone = view_as(backend, x), np.ones((6, 2), np.float32), np.ones((6, 2), np.float32)
        ps_kernels.sumsq_finite(source, view_as(backend, rows), spans=spans, backend=backend)
        for (start, stop), row in zip(spans, alone, strict=True):
            ps_kernels.sumsq_finite(source[start:stop], view_as(backend, row), backend=backend)
        same(bits, rows, alone, backend)
