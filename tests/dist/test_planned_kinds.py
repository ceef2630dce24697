"""Ranks that follow one plan where some parameters are kept in fp32, above a disk, and with copies of the model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from _threads import Together, run
from test_planned_ranks import Case, drawn, train, unlike


@pytest.mark.parametrize(("processes", "copies"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("room", [0, 60, 200])
def test_copies_of_a_model_follow_one_plan(
    processes: int, copies: int, room: int, precision: str, accumulate: int
) -> None:
    case = Case("emulated" if room else "cpu", precision, room, accumulate)
    found, _ = run(processes, train, case, copies=copies)
    for *steps, predicted in found:
        assert predicted["wire"] > 0
        for step in steps[2:]:
            for name, size in predicted.items():
                assert step.get(name, 0) == pytest.approx(size, rel=0.02), name


KEEPS: dict[str, tuple[str, ...]] = {"some": ("1.*", "4.*"), "biases": ("*.bias",), "all": ("*",)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kept", list(KEEPS))
@pytest.mark.parametrize(("device", "room"), [("cpu", 0), ("emulated", 55), ("emulated", 100)])
def test_parameters_that_are_kept_in_fp32_are_in_the_plan(
    ranks: int, device: str, room: int, kept: str, accumulate: int
) -> None:
    found, _ = run(ranks, train, Case(device, "bf16", room, accumulate, kept=KEEPS[kept]))
    for *steps, predicted in found:
        for step in steps[2:]:
            for name, size in predicted.items():
                assert step.get(name, 0) == pytest.approx(size, rel=0.02), name


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("device", "host"), [("cpu", 40), ("cpu", 48), ("emulated", 14)])
def test_ranks_with_a_disk_follow_one_plan(
    ranks: int, device: str, host: int, precision: str, accumulate: int, tmp_path: Path
) -> None:
    case = Case(device, precision, 45 if precision == "fp32" else 36, accumulate, host=host, disk=str(tmp_path))
    found, _ = run(ranks, train, case)
    for *steps, predicted in found:
        assert predicted["host->disk"] > 0 < predicted["disk->host"]
        for step in steps[2:]:
            for name, size in predicted.items():
                assert step.get(name, 0) == pytest.approx(size, rel=0.02), name


@pytest.mark.parametrize("device_kib", [None, 16, 40])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_do_other_than_a_plan_with_parameters_kept_in_fp32(seed: int, device_kib: int | None) -> None:
    ranks = 2 + seed % 2
    run(ranks, unlike, drawn(random.Random(seed), ranks), "bf16", device_kib, ("experts.1.*", "*.bias"))


@pytest.mark.parametrize("device_kib", [None, 16, 40])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("seed", "processes", "copies"), [(0, 2, 2), (1, 4, 2), (3, 4, 2)])
def test_copies_that_do_other_than_the_plan(
    seed: int, processes: int, copies: int, precision: str, device_kib: int | None
) -> None:
    program = drawn(random.Random(seed), processes)
    run(processes, unlike, program, precision, device_kib, copies=copies)


@pytest.mark.parametrize("device_kib", [None, 12])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_ranks_with_a_disk_that_do_other_than_the_plan(
    seed: int, precision: str, device_kib: int | None, tmp_path: Path
) -> None:
    """Shards that other ranks ask for are read from the disk."""
    ranks = 2 + seed % 2

    def trains(each: Together) -> None:
        host = ranks * (12 if device_kib is None else 6) * 2**10
        below = {"host": host, "disk": "64MiB", "disk_dir": str(tmp_path)}
        unlike(each, drawn(random.Random(seed), ranks), precision, device_kib, **below)
        assert each.asked

    run(ranks, trains)
