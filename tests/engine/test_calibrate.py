"""What `pstar doctor --calibrate` runs, with next to nothing to measure."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ps_core._simulate.machine import MACHINES, machine_from_toml
from ps_core._trace import Amounts
from ps_core.engine import _calibrate
from ps_core.engine._calibration import bandwidths, cpu_caches, engine_overhead, operators, probes, transformer_blocks
from ps_core.engine._calibration.cpu_caches import Cache, last_cache, stack_size
from ps_core.engine._calibration.engine_overhead import EMULATED, Bookkeeping, Launching, Told, divide
from ps_core.engine._calibration.operators import Attended, Operators, Slow, attention
from ps_core.engine._calibration.probes import BUSY, SPREAD, Probe, collect, steadiness
from ps_core.engine._calibration.transformer_blocks import Blocks, OnADevice, OnTheCpu, Timed, fit
from ps_kernels import PinnedArena


def taking(times: Sequence[float], *, waited_s: float = 0.0, name: str = "work") -> Probe:
    """A probe that has been sampled."""
    found = Probe(name, lambda: None)
    found.times, found.waited_s = list(times), waited_s
    return found


def test_every_figure_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bandwidths, "_PARAMETERS", 2**16)
    monkeypatch.setattr(bandwidths, "_CACHE_SIZES", 0)
    monkeypatch.setattr(bandwidths, "_BLOCK_BYTES", 2**16)
    monkeypatch.setattr(bandwidths, "_DISK_BYTES", 2**20)
    monkeypatch.setattr(transformer_blocks, "_TOKENS", 64)
    monkeypatch.setattr(cpu_caches, "_FEWEST", 1)
    monkeypatch.setattr(cpu_caches, "_MOST", 1)
    monkeypatch.setattr(transformer_blocks, "_WIDTHS", (32, 64, 128))
    monkeypatch.setattr(operators, "_TOKENS", 64)
    monkeypatch.setattr(operators, "_LENGTHS", (16, 64))
    monkeypatch.setattr(operators, "_BENT", (8, 64))
    monkeypatch.setattr(_calibrate, "_ROUNDS", 1)
    monkeypatch.setattr(_calibrate, "_OWN", ())  # of so little they may be lost in noise
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _calibrate.main() == 0
    text = capsys.readouterr().out
    assert [line.split(":")[0] for line in text.splitlines()[:5]] == [
        "# norm of bf16 gradients",
        "# copies in memory of cpu, reads and writes together",
        "# 1 blocks in torch.bfloat16",
        "# 1 blocks in torch.float32",
        "# spread",
    ]
    found, base = machine_from_toml(text), MACHINES["cpu"]
    of_the_engine = {"moment_overhead_s", "tensor_overhead_s", "instruction_overhead_s", "move_overhead_s"}
    of_operators = {
        f"{name}{kind}_s" for name in ("element", "query", "query_backward", "tanh") for kind in ("", "_fp32")
    }
    noisy = of_the_engine | of_operators
    same = {key for key in type(found).__slots__ if getattr(found, key) == getattr(base, key)}
    assert same - noisy == {"memory_bytes", "collective_bandwidth", "internode_bandwidth", "launch_s"}
    assert found.name.endswith(", calibrated")
    assert found.played_copy_bandwidth > 0, "the CPU plays the accelerator"
    assert found.host_dram_bandwidth >= found.host_bandwidth, "cores alone, or copies beside them"
    assert min(found.attention_flops, found.attention_flops_fp32) > 0
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize(("tries", "status"), [((0.0, 3e-6), 0), ((3e-6,), 0), ((0.0, 0.0), 1)])
def test_what_cannot_be_nothing_is_measured_again_and_never_written(
    tries: tuple[float, ...], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = replace(MACHINES["cpu"], instruction_overhead_s=1e-6, move_overhead_s=1e-6)
    found = [(replace(usual, tensor_overhead_s=seconds), ["a note"]) for seconds in tries]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_calibrate, "calibrate", lambda device: found.pop(0))
    assert _calibrate.main() == status
    said = capsys.readouterr()
    assert not found
    if status:
        assert said.out == ""
        assert said.err.startswith("tensor_overhead_s came out as 0, twice: ")
    else:
        assert machine_from_toml(said.out).tensor_overhead_s == 3e-6


def test_on_a_card_the_built_in_machine_says_what_a_moment_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [(replace(MACHINES["a100-80"], moment_overhead_s=0.0), [])]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_calibrate, "calibrate", lambda device: found.pop(0))
    assert _calibrate.main() == 0
    assert machine_from_toml(capsys.readouterr().out).moment_overhead_s == 0


def test_products_and_elements_are_told_apart() -> None:
    """From made-up seconds: 5 for any amount, a tenth an operation, a hundredth an element, bytes at 4 a second.

    What attention takes by itself, half a second an operation and one or two a query, is neither's; nor are tangents.
    """
    slow = Slow(attention_flops=2.0, query_s=1.0, query_backward_s=2.0, tanh_s=3.0)

    def timed(flops: float, elements: float, weight_bytes: float, scale: float) -> Timed:
        amounts = Amounts(flops + 7 * scale, elements, 7 * scale, 2 * scale, scale, 5 * scale)
        beside = (3.5 + 2 + 2 + 15) * scale
        return Timed(amounts, weight_bytes, 5 + flops / 10 + elements / 100 + weight_bytes / 4 + beside)

    told = [timed(1, 10, 4, 1), timed(300, 2000, 16, 40), timed(5000, 9000, 400, 3)]
    assert fit(told, 4.0, slow) == pytest.approx((10, 0.01))


def test_noise_leaves_all_to_products() -> None:
    """Elements that would take less than nothing take nothing."""
    amounts = (0, 0, 5.0), (300, 2000, 5.1), (5000, 9000, 505.0)
    told = [Timed(Amounts(flops, elements), 0, seconds) for flops, elements, seconds in amounts]
    assert fit(told, 4.0, Slow(1.0, 0, 0, 0)) == (10, 0)


def test_attention_is_told_from_two_lengths() -> None:
    """From made-up seconds: 50 operations a second, of 7 two there and five back; a query 3 s there and 20 back."""
    short, long = (
        Attended(queries=10, flops=flops, forward_s=30 + flops * 2 / 7 / 50, backward_s=200 + flops * 5 / 7 / 50)
        for flops in (7000.0, 56000.0)
    )
    assert attention(short, long) == pytest.approx((50, 3, 20))


def test_attention_in_noise_is_not_infinitely_fast() -> None:
    """Longer sequences that took no longer: a quarter of their time is taken for the difference."""
    short = Attended(queries=10, flops=70.0, forward_s=4.0, backward_s=12.0)
    rate, query, query_backward = attention(short, short._replace(flops=140.0))
    assert rate == 70 / 4
    assert query == (4 - 20 / rate) / 10
    assert query_backward == (12 - 50 / rate) / 10
    assert attention(short._replace(forward_s=0.0), short._replace(flops=140.0))[1] == 0, "never less than nothing"


def test_tangents_are_the_difference_between_two_forms() -> None:
    timed = Operators(torch.bfloat16)
    for probes_of_one, seconds in zip(timed.rows, ((1.0, 2.0), (3.0, 4.0), (1.0, 9.0)), strict=True):
        for probe, taken in zip(probes_of_one, seconds, strict=True):
            probe.times = [operators._TIMES * taken]
    numel = operators._BENT[0] * operators._BENT[1]
    assert timed.fit().tanh_s == 8 / (2 * numel), "there and back"
    timed.rows[-1][1].times = [0.0]
    assert timed.fit().tanh_s == 0


def test_what_attention_is_timed_with_is_counted_as_blocks_are() -> None:
    """A block in eight heads of 64, recomputed: twice there, once back, as long and as many as the probes'."""
    length = operators._LENGTHS[0]
    model = transformer_blocks.Blocks(1, 512)
    counted, _ = transformer_blocks.counted(model, torch.zeros(operators._TOKENS // length, length, 512))
    queries = operators._HEADS * operators._TOKENS
    assert (counted.queries, counted.queries_backward) == (2 * queries, queries)
    assert counted.attention_flops == (2 + 2 + 5) * 2.0 * queries * length * operators._HEAD
    assert counted.tanhs == 0


def cache_of(folder: Path, levels: dict[str, tuple[str, str, str]]) -> Path:
    """As the system lists them: level, type, size."""
    for name, entries in levels.items():
        (folder / name).mkdir()
        for file, text in zip(("level", "type", "size"), entries, strict=True):
            (folder / name / file).write_text(text + "\n")
    return folder


def test_the_last_level_of_cache_is_found(tmp_path: Path) -> None:
    told = {
        "index0": ("1", "Data", "48K"),
        "index1": ("4", "Instruction", "64K"),
        "index2": ("3", "Unified", "32M"),
        "index3": ("2", "Unified", "1024K"),
        "index4": ("5", "Unified", "much"),
    }
    found = last_cache(cache_of(tmp_path, told))
    assert (found, str(found)) == (Cache(2**25, known=True), "a cache of 32 MiB")


def test_an_unknown_cache_is_assumed(tmp_path: Path) -> None:
    (tmp_path / "index0").mkdir()  # without a word on its size
    for folder in (tmp_path, tmp_path / "none"):
        assert last_cache(folder) == Cache(cpu_caches.DEFAULT_BYTES, known=False)
        assert str(last_cache(folder)) == "a cache of 32 MiB (assumed)"


@pytest.mark.parametrize(
    ("block_bytes", "cache_bytes", "blocks_wanted"),
    [(12, 36, 6), (12, 37, 7), (12, 1, 4), (12, 10**6, 16), (24, 36, 4)],
)
def test_stacks_are_twice_the_cache(block_bytes: int, cache_bytes: int, blocks_wanted: int) -> None:
    assert stack_size(block_bytes, cache_bytes) == blocks_wanted


def test_all_widths_have_as_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many where numbers are twice as long."""
    monkeypatch.setattr(transformer_blocks, "_TOKENS", 8)
    monkeypatch.setattr(transformer_blocks, "_WIDTHS", (8, 16, 64))
    each = 2 * 4 * sum(parameter.numel() for parameter in transformer_blocks.Block(64, 1).parameters())
    monkeypatch.setattr(transformer_blocks, "last_cache", lambda: Cache(3 * each, known=True))
    full, half = OnTheCpu(torch.float32), OnTheCpu(torch.bfloat16)
    assert (full.blocks, half.blocks) == (6, 12)
    assert [probe.name for probe in full.probes] == [f"float32 blocks, {width} wide" for width in (8, 16, 64)]


def test_the_rate_of_a_device_is_that_of_its_blocks() -> None:
    model = OnADevice(torch.device("cpu"), torch.float32)
    model.probe.times = [2.0]
    # Attention's products: two in forward, two in recomputation, five in backward. Recomputation leaves out a block's
    # last product, whose output backward does not read. The model's input has no gradient.
    attention = 9 * 2 * 2048 * 512 * 4096
    flops = 2 * ((8 * 12 - 2 * 4) * 2048**2 * 4096 + attention) + 4 * 2048**2 * 4096
    elements = model._amounts.elements
    assert elements > 2 * 10 * 2048 * 4096
    assert model.fit(1e30) == (pytest.approx(flops / 2.0), pytest.approx(4e-30))
    rate = 4.0 * elements / 0.5
    assert model.fit(rate) == (pytest.approx(flops / 1.5), 4.0 / rate)
    assert model.fit(1.0) == (pytest.approx(flops / 1.0), 4.0), "at least half is products"


def test_launching_is_told_from_the_engines_own_work() -> None:
    """From made-up seconds: a plain operator takes 2 s; the engine copies gradients, and takes 5 s for each tensor."""
    launching = Launching(EMULATED)
    collect([launching.probes], 1)
    assert all(probe.seconds > 0 for probe in launching.probes)
    plain, managed, _ = launching.probes
    gradients = len(list(Blocks(8, 32).parameters()))
    assert launching._launches > 8 * 24
    plain.times = [2.0 * launching._launches]
    managed.times = [2.0 * (launching._launches + gradients) + 5.0 * 3 * gradients]
    assert launching.fit() == pytest.approx((2.0, 5.0))


def test_the_engines_own_work_is_divided_among_moments_tensors_steps_and_moves() -> None:
    """From made-up seconds: 0.01 a moment, 0.001 a tensor, 0.1 a step or norm and 3 any step, 0.05 a move."""
    few = Told(passes_s=0.16 + 0.3 + 0.8, step_s=3.8, moments=16, tensors=300, norms=8, steps=8, moves=0)
    many = Told(passes_s=0.9 + 0.3 + 2.0, step_s=5.0, moments=90, tensors=300, norms=20, steps=20, moves=0)
    moving = many._replace(passes_s=many.passes_s + 1.5, step_s=many.step_s + 0.5, moves=40)
    assert divide(few, many, moving) == pytest.approx((0.01, 0.001, 0.1, 0.05))


def test_what_is_timed_is_counted() -> None:
    """Smaller groups: more moments, and a norm and a step for each group; where there is room nothing moves."""
    before = torch.random.get_rng_state()
    models = Bookkeeping()
    assert torch.equal(before, torch.random.get_rng_state())
    collect(models.rows, 1)
    few, many, moving = (model.told() for model in models._models)
    assert few.norms == few.steps < many.norms == many.steps == moving.steps
    assert few.moments == 16
    assert many.moments == moving.moments > 4 * few.moments
    assert few.tensors == many.tensors == moving.tensors == 3 * 98
    assert few.moves == many.moves == 0 < moving.moves
    assert few.passes_s > 0 < few.step_s


def test_probes_take_turns_and_long_ones_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def probe(name: str) -> Probe:
        return Probe(name, lambda: order.append(name))

    first, second, third = probe("a"), probe("b"), probe("c")
    monkeypatch.setattr(third, "sample", lambda: (third.work(), third.times.append(4.0)))
    collect([[first, second], [third]], 3, between=lambda: order.append("|"))
    assert "".join(order) == "abc" + "|abc" * 2 + "|ab", "once uncounted; the third has had its time after two"
    assert len(first.times) == 3


def test_steps_and_copies_exceed_the_last_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy takes another block, so that memory is read and written, not a cache."""
    monkeypatch.setattr(bandwidths, "_PARAMETERS", 1000)
    monkeypatch.setattr(bandwidths, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr(bandwidths, "last_cache", lambda: Cache(14_000, known=True))
    assert bandwidths.StepRate(torch.device("cpu")).moved_bytes == 4000 * 28
    arenas = list[int]()
    monkeypatch.setattr(bandwidths.ps_kernels, "PinnedArena", partial(_unpinned, arenas))
    monkeypatch.setattr(torch, "zeros", partial(_on_the_cpu, torch.zeros))
    for name in ("Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    links = bandwidths.Links(torch.device("cuda"))
    assert arenas == [14 * 4096], "of 56,000 bytes"
    copied = {links._next_block().data_ptr() for _ in range(14)}
    assert len(copied) == 14
    links.up(28)
    assert all(links._next_block().data_ptr() in copied for _ in range(14))


def test_large_caches_do_not_exhaust_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small virtual machine may be told the size of its large host's cache."""
    monkeypatch.setattr(bandwidths, "_PARAMETERS", 1000)
    monkeypatch.setattr(bandwidths, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr(bandwidths, "last_cache", lambda: Cache(2**31, known=True))
    monkeypatch.setattr(bandwidths, "available_bytes", lambda: 16 * 28_000)
    assert bandwidths.StepRate(torch.device("cpu")).moved_bytes == 2000 * 28
    arenas = list[int]()
    monkeypatch.setattr(bandwidths.ps_kernels, "PinnedArena", partial(_unpinned, arenas))
    monkeypatch.setattr(torch, "zeros", partial(_on_the_cpu, torch.zeros))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    bandwidths.Links(torch.device("cuda"))
    assert arenas == [7 * 4096], "of 28,000 bytes"


def _unpinned(sizes: list[int], size: int, *, pin: bool) -> PinnedArena:
    assert pin
    sizes.append(size)
    return PinnedArena(size, pin=False)


def _on_the_cpu(make: Any, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    assert device.type == "cuda"
    made: Tensor = make(size, dtype=dtype)
    return made


def test_traffic_of_the_host_is_the_step_s_and_that_of_copies_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that ends once four copies were made, in half a second by a clock that only these move."""
    clock, left = [0.0], [4]
    monkeypatch.setattr(bandwidths, "_PARAMETERS", 1000)
    monkeypatch.setattr(bandwidths, "_CACHE_SIZES", 0)
    monkeypatch.setattr(bandwidths, "_BLOCK_BYTES", 4096)
    traffic = bandwidths.HostTraffic(torch.device("cpu"))

    class Pool(nullcontext[Any]):
        def __init__(self, threads: int) -> None:
            super().__init__(self)

        def submit(self, step: Any) -> Any:
            return SimpleNamespace(done=lambda: not left[0], result=step)

    def copy() -> None:
        left[0] -= 1
        clock[0] += 0.125

    monkeypatch.setattr(bandwidths, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(bandwidths, "ThreadPoolExecutor", Pool)
    taken: list[None] = []
    traffic._step.probe.work = lambda: taken.append(None)
    for way in ("up", "down"):
        monkeypatch.setattr(traffic._links, way, copy)
    traffic.probe.work()
    assert len(taken) == 1
    assert traffic.rate() == (28 * 1000 + 4 * 2 * 4096) / 0.5


def test_the_lower_quartile_counts() -> None:
    probe = taking([9.0, 1.0, 2.0, 8.0, 4.0])
    assert (probe.seconds, probe.spread) == (2.0, 1.0)
    assert taking([3.0]).spread == 0


@pytest.mark.parametrize(
    ("probe", "busy"),
    [
        (taking([1.0, 1.0, 1.1]), False),
        (taking([1.0, 2.0, 2.0]), True),
        (taking([1.0, 1.0, 1.0], waited_s=0.1), False),
        (taking([1.0, 1.0, 1.0], waited_s=0.3), True),
    ],
)
def test_a_busy_machine_is_named(probe: Probe, busy: bool) -> None:
    said = steadiness([[probe]])
    assert said[0].startswith(SPREAD)
    assert probe.name in said[0]
    assert [line.startswith(BUSY) for line in said[1:]] == [True] * busy


def test_a_threads_own_work_is_timed_by_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process does no more than the thread, 3 s of the processor's in 10 by the wall; else the wall's."""
    for whole, expected, waited in ((3.0, 3.0, 7.0), (6.0, 10.0, 0.0)):
        readings = {"perf_counter": [0.0, 10.0], "process_time": [0.0, whole], "thread_time": [0.0, 3.0]}
        clocks = {name: partial(values.pop, 0) for name, values in readings.items()}
        monkeypatch.setattr(probes, "time", SimpleNamespace(**clocks))
        probe = Probe("work", lambda: None)
        probe.sample()
        assert (probe.times, probe.waited_s) == ([expected], waited)


def test_budgets_of_the_tiny_model_are_what_they_are_for() -> None:
    assert engine_overhead._AMPLE > 14 * 2**17 > engine_overhead._TIGHT
