"""What `pstar doctor --calibrate` runs, with next to nothing to measure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ps_core._simulate.machine import MACHINES, machine_from_toml
from ps_core.engine import _calibrate
from ps_core.engine._calibration import bandwidths, blocks, bookkeeping, probes
from ps_core.engine._calibration.blocks import Amount, OnADevice, fit
from ps_core.engine._calibration.bookkeeping import Bookkeeping, Told, divide
from ps_core.engine._calibration.probes import BUSY, SPREAD, Probe, collect, steadiness


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
    monkeypatch.setattr(bandwidths, "_BLOCK_BYTES", 2**16)
    monkeypatch.setattr(bandwidths, "_DISK_BYTES", 2**20)
    monkeypatch.setattr(blocks, "_TOKENS", 64)
    monkeypatch.setattr(blocks, "_BLOCKS", 1)
    monkeypatch.setattr(blocks, "_WIDTHS", (32, 64, 128))
    monkeypatch.setattr(_calibrate, "_ROUNDS", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _calibrate.main() == 0
    text = capsys.readouterr().out
    assert [line.split(":")[0] for line in text.splitlines()[:3]] == [
        "# norm of bf16 gradients",
        "# copies in memory of cpu, reads and writes together",
        "# spread",
    ]
    found, base = machine_from_toml(text), MACHINES["cpu"]
    of_the_engine = {"moment_overhead_s", "tensor_overhead_s", "instruction_overhead_s", "move_overhead_s"}
    noisy = {*of_the_engine, "element_s", "element_fp32_s"}
    same = {key for key in type(found).__slots__ if getattr(found, key) == getattr(base, key)}
    assert same - noisy == {"memory_bytes", "collective_bandwidth", "internode_bandwidth"}
    assert found.name.endswith(", calibrated")
    assert found.played_copy_bandwidth > 0, "the CPU plays the accelerator"
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_products_and_elements_are_told_apart() -> None:
    """From made-up seconds: 5 for any amount, a tenth an operation, a hundredth an element, bytes at 4 a second."""

    def amount(flops: float, elements: float, weight_bytes: float) -> Amount:
        return Amount(flops, elements, weight_bytes, 5 + flops / 10 + elements / 100 + weight_bytes / 4)

    told = [amount(1, 10, 4), amount(300, 2000, 16), amount(5000, 9000, 400)]
    assert fit(told, 4.0) == pytest.approx((10, 0.01))


def test_noise_leaves_all_to_products() -> None:
    """Elements that would take less than nothing take nothing."""
    told = [Amount(0, 0, 0, 5.0), Amount(300, 2000, 0, 5.1), Amount(5000, 9000, 0, 505.0)]
    assert fit(told, 4.0) == (10, 0)


def test_work_and_overhead_on_a_device_are_told_apart() -> None:
    """With a second, and a second for each 4,096 tokens."""
    model = OnADevice(torch.device("cpu"), torch.float32)
    for probe, seconds in zip(model.probes, (2.0, 4.0), strict=True):
        probe.times = [seconds]
    recomputed, once = 4 * (12 * 384**2 + 13 * 384), 384**2 + 384
    rate, overhead = model.fit()
    assert rate == pytest.approx((8 * recomputed + 6 * once) * 4096)
    assert overhead == pytest.approx(1 / 10), "of four blocks and what is before them, there and back"


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
    collect([[first, second], [third]], 3)
    assert "".join(order) == "abc" + "abc" * 2 + "ab", "once uncounted; the third has had its time after two"
    assert len(first.times) == 3


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
    assert bookkeeping._AMPLE > 14 * 2**17 > bookkeeping._TIGHT
