"""Checkpoints of a model that several processes share: exact, whole or not there, and free of how many they are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import _checkpoint_cases as cases
from _buggy import Change, Original, Rows, take_out
from _crew import Crew
from ps_core import CheckpointDamaged
from ps_core.engine import export_checkpoint

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(
    ("device", "precision", "rule"),
    [
        ("cpu", "fp32", "sgd"),
        ("checked", "bf16", "adamw"),
        ("cpu", "fp16", "adamw"),
        ("cpu, disk", "bf16", "adamw"),
        ("checked", "bf16", "nadam"),
    ],
)
def test_resumed_is_uninterrupted(two: Crew, tmp_path: Path, device: str, precision: str, rule: str) -> None:
    two.run(cases.resumes, tmp_path / "a", device, precision, rule)


def test_one_of_several_copies_writes(four: Crew, tmp_path: Path) -> None:
    four.run(cases.copies, tmp_path / "a", replicate=2)


def test_any_number_of_processes_loads_it(four: Crew, two: Crew, tmp_path: Path) -> None:
    """Four save, two load and save, one, and two again: the same states to the bit, and rank i's random numbers."""
    saved = four.run(cases.begins, tmp_path / "four")
    by_two = two.run(cases.hands_on, tmp_path / "four", tmp_path / "two")
    by_one = cases.hands_on(None, tmp_path / "two", tmp_path / "one")
    again = two.run(cases.hands_on, tmp_path / "one", tmp_path / "again", 2000)
    values = saved[0][0]
    assert len(values) > 30
    assert values == by_two[0][0] == by_one[0] == again[0][0]
    for one, other in zip(saved, by_two, strict=False):
        assert one == other, "each rank's own buffers and random numbers"
    assert saved[0] != saved[1]
    assert saved[0][1] == by_one[1] == again[0][1] == again[1][1]
    for name in ("four", "two", "one", "again"):
        export_checkpoint(tmp_path / name, tmp_path / f"{name}.safetensors")
        assert (tmp_path / f"{name}.safetensors").read_bytes() == (tmp_path / "four.safetensors").read_bytes()
    saved_orders = json.loads((tmp_path / "four" / "manifest.json").read_text())["orders"]
    assert saved_orders == {"turned": [1, cases.WORDS]}, "it is cut, and does not lie row by row"
    assert json.loads((tmp_path / "again" / "manifest.json").read_text())["orders"], "whole where it came from"
    assert len(list((tmp_path / "four").glob("masters-*-of-00004.safetensors"))) == 4


def test_parameters_that_lie_in_another_order(two: Crew, tmp_path: Path) -> None:
    two.run(cases.turns, tmp_path)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_whose_disk_is_full(two: Crew, tmp_path: Path, odd: int) -> None:
    two.run(cases.fails, tmp_path / "a", odd)


def test_what_ranks_must_agree_on(two: Crew, tmp_path: Path) -> None:
    two.run(cases.refuses, tmp_path / "a")


def test_damaged_parts_are_named_on_every_rank(two: Crew, tmp_path: Path) -> None:
    two.run(cases.damaged, tmp_path)


def test_parts_are_checked_by_one_process_too(two: Crew, tmp_path: Path) -> None:
    values = two.run(cases.begins, tmp_path / "a")[0][0]
    with cases.running(None, seed=3) as run:
        for name in ("masters-00002-of-00002", "exp_avg_sq-00001-of-00002", "weights-00002-of-00002"):
            file = tmp_path / "a" / f"{name}.safetensors"
            before = file.read_bytes()
            cases._flip(file)
            with pytest.raises(CheckpointDamaged, match=f"{name}.safetensors: its checksum is"):
                run.load(tmp_path / "a")
            file.write_bytes(before)
        run.load(tmp_path / "a")
        assert run.values() == values


def test_parts_that_a_rank_forgot(two: Crew, tmp_path: Path) -> None:
    """Each tensor or part of each rank left out, the files of a rank, and a part that begins too early or too late."""
    two.run(cases.begins, tmp_path / "a")
    original = Original(tmp_path / "a")
    places = original.places()
    assert {row["writer"] for row in original.manifest["files"].values()} == {0, 1}

    def without_rank_one(manifest: dict[str, Any], rows: Rows) -> None:
        for name in [name for name, row in manifest["files"].items() if row["writer"] == 1]:
            if manifest["files"][name]["section"] != "buffers":
                del manifest["files"][name]

    def shifted(name: str, index: int, by: int) -> Change:
        def change(manifest: dict[str, Any], rows: Rows) -> None:
            manifest["files"][name]["tensors"][index][4] += by

        return change

    def put(value: Any, *keys: str) -> Change:
        def change(manifest: dict[str, Any], rows: Rows) -> None:
            for key in keys[:-1]:
                manifest = manifest[key]
            manifest[keys[-1]] = value

        return change

    changes = [(take_out(name, index), f"{section}.*{tensor.split('[')[0]}") for name, index, section, tensor in places]
    parts = [each for each in places if "[" in each[3] and not each[3].split("[")[1].startswith("0:")]
    assert {section for *_, section, _ in parts} == {"masters", "exp_avg", "exp_avg_sq", "weights"}
    changes += [(shifted(name, index, -1), "more than once") for name, index, *_ in parts]
    changes += [(shifted(name, index, 1), "are missing") for name, index, *_ in parts]
    changes += [(without_rank_one, "are missing|lacks"), (put(1, "ranks"), "1 ranks"), (put(0, "ranks"), "ranks")]
    changes += [(put([], "random_files"), "random_files"), (put({"turned": [1]}, "orders"), "'turned'")]
    with cases.running(None, seed=3) as run:
        before = run.values()
        for change, expected in changes:
            path = original.changed(change)
            with pytest.raises(CheckpointDamaged, match=expected):
                run.load(path)
            shutil.rmtree(path)
        assert run.values() == before
        run.load(original.changed(lambda manifest, rows: None))
        assert run.values() != before


def test_weights_are_loaded_by_shards(two: Crew, tmp_path: Path) -> None:
    torch.manual_seed(11)
    state = {name: value.contiguous() for name, value in cases.Net().state_dict().items()}
    other = {**state, "head.weight": state["head.weight"] + 1}
    safetensors.torch.save_file(other, tmp_path / "untied.safetensors")
    del state["head.weight"]
    safetensors.torch.save_file(state, tmp_path / "published.safetensors")
    cases.begins(None, tmp_path / "one")
    two.run(cases.weights, tmp_path / "published.safetensors", tmp_path / "one")


def test_one_file_of_all_weights(two: Crew, tmp_path: Path) -> None:
    values = two.run(cases.exports, tmp_path)[0]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "computed.safetensors", "masters.safetensors"]
    found = safetensors.torch.load_file(tmp_path / "computed.safetensors")
    model = {name.removeprefix("model "): value for name, value in values.items() if name.startswith("model ")}
    assert {name: cases.digest(value) for name, value in found.items()} == {
        name: value for name, value in model.items() if name != "head.weight"
    }
    masters = safetensors.torch.load_file(tmp_path / "masters.safetensors")
    trained = {
        cases.digest(masters[name]) for name in masters if not name.startswith(("frozen", "seen.r", "seen.n", "same"))
    }
    assert trained == {value for name, value in values.items() if name.startswith("master ")}
    for name, how in (("computed", False), ("masters", True)):
        export_checkpoint(tmp_path / "a", tmp_path / "offline.safetensors", masters=how, overwrite=True)
        offline = safetensors.torch.load_file(tmp_path / "offline.safetensors")
        streamed = safetensors.torch.load_file(tmp_path / f"{name}.safetensors")
        assert offline.keys() == streamed.keys()
        assert all(torch.equal(value, streamed[key]) for key, value in offline.items())


def test_at_most_two_chunks_of_memory(two: Crew, tmp_path: Path) -> None:
    two.run(cases.stays_small, tmp_path / "a")


def test_a_rank_killed_at_whatever_instant(tmp_path: Path) -> None:
    """The checkpoint before, or the new one, and nothing else; the other rank ends, and says who is gone."""
    done = subprocess.run(
        [sys.executable, PROGRAMS / "killed.py", tmp_path], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert {row[0] for row in rows} == {"0", "1"}, "which rank was killed"
    assert {row[1] for row in rows} == {"before", "after"}, "what was found"
    assert all(row[1] == "before" for row in rows if row[0] == "1"), "rank 1 was killed while it wrote"
