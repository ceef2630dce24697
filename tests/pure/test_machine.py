"""Machine files: what they hold, and what is said of damaged ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core._errors import InvalidInput
from ps_core._simulate.machine import MACHINES, NUMBERS, Machine, default_machine, machine, machine_from_toml
from ps_core._trace import Amounts

GIB = 2**30
WHOLE = MACHINES["v100"].to_toml()


def refusal(text: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        machine_from_toml(text, source="m.toml")
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", MACHINES)
def test_built_in_machines_survive_toml(name: str) -> None:
    assert machine_from_toml(MACHINES[name].to_toml()) == MACHINES[name]
    assert machine(name) is MACHINES[name]


def test_computing_adds_up() -> None:
    """In 16 bits and in fp32, each amount at its own figure; attention as products where nothing else is told."""
    amounts = Amounts(flops=7e4, attention_flops=1e4, elements=1e3, queries=100.0, queries_backward=10.0, tanhs=1.0)
    half = {"matmul_flops": 6e4, "attention_flops": 1e3, "element_s": 1e-2, "query_s": 1e-1, "query_backward_s": 2.0}
    full = {"matmul_flops_fp32": 1e4, "element_fp32_s": 2e-2, "query_fp32_s": 1.0, "query_backward_fp32_s": 3.0}
    found = replace(MACHINES["cpu"], **half, **full, tanh_s=9.0, tanh_fp32_s=4.0)
    assert found.computing_s(amounts, fp32=False) == pytest.approx(1 + 10 + 10 + 10 + 20 + 9)
    assert found.computing_s(amounts, fp32=True) == pytest.approx(6 + 1 + 20 + 100 + 30 + 4)
    faster = replace(found, attention_flops_fp32=2e3)
    assert faster.computing_s(amounts, fp32=True) == pytest.approx(6 + 5 + 20 + 100 + 30 + 4)
    assert MACHINES["cpu"].computing_s(amounts, fp32=False) == pytest.approx(7e4 / MACHINES["cpu"].matmul_flops)


@settings(max_examples=40)
@given(st.lists(st.floats(1, 1e3), min_size=len(NUMBERS), max_size=len(NUMBERS)))
def test_any_figures_survive_toml(numbers: list[float]) -> None:
    figures = dict(zip(NUMBERS, numbers, strict=True))
    whole = {key: int(value) + 1 for key, value in figures.items() if key.endswith("_bytes")}
    made = replace(MACHINES["t4"], **{**figures, **whole})
    assert machine_from_toml(made.to_toml()) == made


def test_built_in_figures_are_plausible() -> None:
    for entry in MACHINES.values():
        assert entry.matmul_flops_fp32 < entry.matmul_flops
        assert entry.disk_write_bandwidth <= entry.disk_read_bandwidth < entry.h2d_bandwidth <= entry.host_bandwidth
        assert entry.h2d_bandwidth < entry.device_bandwidth or entry.name == "cpu"
        assert entry.internode_bandwidth <= entry.collective_bandwidth


def test_optional_fields_have_defaults() -> None:
    lines = [line for line in WHOLE.splitlines() if not line.startswith(("latency_s", "moment_overhead_s"))]
    assert machine_from_toml("\n".join(lines)) == replace(MACHINES["v100"], latency_s=20e-6, moment_overhead_s=100e-6)


def test_a_base_fills_in_the_rest() -> None:
    made = machine_from_toml('base = "h200"\nh2d_bandwidth = 4e11\n')
    assert made == replace(MACHINES["h200"], name="h200, adapted", h2d_bandwidth=4e11)
    assert machine_from_toml('base = "h200"\nname = "mine"').name == "mine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = [", "m.toml: not TOML"),
        ('base = "abacus"', "unknown base 'abacus'"),
        ("base = 3", "unknown base 3"),
        (WHOLE + "horse_power = 3", "unknown key 'horse_power'"),
        ('name = "x"', "'memory_bytes' is missing"),
        (WHOLE.replace('"v100"', "7"), "name must be a text"),
        (WHOLE.replace('"v100"', '"a\\nb"'), "name must be a plain text"),
        ('base = "t4"\nh2d_bandwidth = 0', "h2d_bandwidth must be a number above 0, found 0"),
        ('base = "t4"\nh2d_bandwidth = -1.5', "found -1.5"),
        ('base = "t4"\ntanh_s = -1', "tanh_s must be a number of at least 0, found -1"),
        ('base = "t4"\nattention_flops = "x"', "attention_flops must be a number of at least 0, found 'x'"),
        ('base = "t4"\nh2d_bandwidth = true', "found True"),
        ('base = "t4"\nh2d_bandwidth = "fast"', "found 'fast'"),
        ('base = "t4"\nh2d_bandwidth = inf', "found inf"),
        ('base = "t4"\nh2d_bandwidth = nan', "found nan"),
        (
            f'base = "t4"\nh2d_bandwidth = {10**400}',
            "h2d_bandwidth must be 1 to 1e+24, found a whole number of 1329 bits",
        ),
        ('base = "t4"\nmemory_bytes = 1.5', "memory_bytes must be a whole number, found 1.5"),
        ('base = "t4"\nmemory_bytes = false', "found False"),
        ('base = "t4"\nhost_memory_bytes = 0', "host_memory_bytes must be a number above 0"),
    ],
)
def test_damaged_files_are_refused_in_one_line(text: str, says: str) -> None:
    assert says in refusal(text)


def test_files_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "t4"')
    assert machine(str(path)).matmul_flops == MACHINES["t4"].matmul_flops
    for name in ("missing.toml", "."):
        with pytest.raises(InvalidInput, match="cannot read machine file"):
            machine(str(tmp_path / name))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="cannot read machine file"):
        machine(str(path))
    with pytest.raises(InvalidInput, match=r"unknown machine 'v1000' .known: v100, "):
        machine("v1000")


@pytest.mark.parametrize(
    ("gib", "name"),
    [
        *((4, "laptop"), (8, "rtx4060"), (10, "rtx3060"), (12, "rtx3060"), (16, "t4"), (24, "rtx4090")),
        *((32, "v100"), (40, "a100-40"), (48, "l40s"), (80, "a100-80")),
    ],
)
def test_the_nearest_machine_by_memory(gib: int, name: str) -> None:
    assert default_machine(gib * GIB).name == name


@pytest.mark.parametrize(
    ("gib", "device", "name"),
    [
        (80, "NVIDIA H100 80GB HBM3", "h100"),
        (94, "NVIDIA H100 NVL", "h100"),
        (80, "NVIDIA A100-SXM4-80GB", "a100-80"),
        (40, "NVIDIA A100-PCIE-40GB", "a100-40"),
        (16, "Tesla V100-SXM2-16GB", "v100"),
        (24, "NVIDIA GeForce RTX 4090", "rtx4090"),
        (8, "NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4060"),
        (12, "NVIDIA GeForce RTX 3060", "rtx3060"),
        (24, "NVIDIA GeForce RTX 3090", "rtx3090"),
        (16, "NVIDIA GeForce RTX 4080 SUPER", "rtx4080"),
        (32, "NVIDIA GeForce RTX 5090", "rtx5090"),
        (48, "NVIDIA L40S", "l40s"),
        (80, "NVIDIA H1000", "a100-80"),
        (80, "", "a100-80"),
    ],
)
def test_an_accelerators_name_tells_its_kind_and_memory_the_rest(gib: int, device: str, name: str) -> None:
    assert default_machine(gib * GIB, device).name == name


def test_no_accelerator_is_a_cpu_and_much_memory_an_h200() -> None:
    assert default_machine(0).name == "cpu"
    assert default_machine(139 * GIB).name == "h200"
    assert default_machine(1).name == "laptop"


def test_a_name_must_be_printable() -> None:
    with pytest.raises(InvalidInput, match="plain text"):
        Machine(**{key: getattr(MACHINES["t4"], key) for key in NUMBERS}, name="")


@pytest.mark.parametrize(
    "text",
    ["base = ['a']", "base = {}", "base = 'v100'\nhost_bandwidth = 5e-324", "base = 'v100'\nlatency_s = 1e308"],
)
def test_figures_nothing_has_and_bases_that_are_no_name(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        machine_from_toml(text)
    assert "\n" not in str(caught.value)
