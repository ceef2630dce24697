"""A writer with a bug: manifest, tables and checksums agree, and something is not there, or not what it should be.

Nothing of such a checkpoint is taken: the error names what is wrong, and the run is as it was, to the bit.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from _buggy import Change, Original, Rows, take_out
from _checkpoints import Net, Run, assert_same
from ps_core import CheckpointDamaged, CheckpointMismatch
from ps_core.engine import export_checkpoint, load_checkpoint, load_weights, save_checkpoint
from ps_core.engine._checkpoint import writer as _writing
from ps_core.engine._checkpoint.atomic_folder import MANIFEST, SUMS


class Stateful(Net):
    """With a state that is no tensor of ``state_dict``."""

    def get_extra_state(self) -> Any:
        return {"seen": torch.arange(3), "name": "x"}

    def set_extra_state(self, state: Any) -> None:
        self.found = state


class Saved(Original):
    """The checkpoint of a run that has gone on since."""

    def __init__(self, path: Path, run: Run) -> None:
        self.run = run
        save_checkpoint(path, run.model, run.optimizer, extra={"a": torch.ones(7), "b": (1, torch.zeros(2))})
        super().__init__(path)

    def check(self, path: Path, expected: str) -> None:
        """Both kinds of load refuse it by name, and change nothing."""
        before, drawn = values_of(self.run), drawn_from()
        with pytest.raises((CheckpointDamaged, CheckpointMismatch), match=expected):
            load_checkpoint(path, self.run.model, self.run.optimizer)
        assert drawn == drawn_from()
        assert_same(before, values_of(self.run))
        shutil.rmtree(path)


def values_of(run: Run) -> dict[str, Any]:
    """All but the state that is no tensor, of which there is one value only."""
    return {name: value for name, value in run.values().items() if "extra_state" not in name}


def drawn_from() -> tuple[Any, ...]:
    """The states of the generators."""
    mersenne = numpy.random.get_state()
    return bytes(torch.get_rng_state().numpy()), random.getstate(), mersenne[1].tobytes(), mersenne[2:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """In fp16, which has a loss scale; several files a section."""
    folder = tmp_path_factory.mktemp("incomplete")
    with pytest.MonkeyPatch.context() as patch, Run("emulated", precision="fp16", build=Stateful) as run:
        patch.setattr(_writing, "FILE_BYTES", 12_000)
        run.train(2)
        found = Saved(folder / "sound", run)
        run.train(1)
        yield found


def test_the_generator_itself(saved: Saved) -> None:
    """An unchanged copy is the checkpoint, and loads."""
    path = saved.changed(lambda manifest, rows: None)
    assert {each.name: each.read_bytes() for each in path.iterdir() if each.name not in (MANIFEST, SUMS)} == {
        each.name: each.read_bytes() for each in saved.path.iterdir() if each.name not in (MANIFEST, SUMS)
    }
    now = values_of(saved.run)
    assert load_checkpoint(path, saved.run.model, saved.run.optimizer)["b"][0] == 1
    with pytest.raises(AssertionError):
        assert_same(now, values_of(saved.run))
    saved.run.train(1)


# Tensors.


def test_every_tensor_missing(saved: Saved) -> None:
    found = saved.places()
    assert {section for *_, section, _ in found} == {"masters", "exp_avg", "exp_avg_sq", "weights", "buffers", "extra"}
    for name, index, section, tensor in found:
        what = f"{section}.*{re.escape(repr(tensor))}" if section != "buffers" else re.escape(repr(tensor))
        saved.check(saved.changed(take_out(name, index)), what)


@pytest.mark.parametrize("section", ["masters", "exp_avg", "exp_avg_sq", "weights", "buffers", "extra"])
def test_every_section_missing(saved: Saved, section: str) -> None:
    def change(manifest: dict[str, Any], rows: Rows) -> None:
        for name in [name for name, row in manifest["files"].items() if row["section"] == section]:
            del manifest["files"][name]

    saved.check(saved.changed(change), "running_mean" if section == "buffers" else f"section '{section}'")


def test_every_tensor_twice(saved: Saved) -> None:
    """Another file of its section has it once more, with other values."""
    for name, index, section, tensor in saved.places():

        def change(
            manifest: dict[str, Any], rows: Rows, name: str = name, index: int = index, section: str = section
        ) -> None:
            other = f"{section}-00009-of-00009.safetensors"
            row = manifest["files"][name]
            manifest["files"][other] = {**row, "tensors": [row["tensors"][index]]}
            rows[other] = [bytes(len(rows[name][index]))]

        saved.check(saved.changed(change), f"{section}.*{re.escape(repr(tensor))}.*more than once")


@pytest.mark.parametrize("section", ["masters", "exp_avg", "exp_avg_sq", "weights", "extra"])
@pytest.mark.parametrize("how", ["unknown", "of another section"])
def test_a_tensor_too_many(saved: Saved, section: str, how: str) -> None:
    names = {tensor for *_, of, tensor in saved.places() if of == ("weights" if section == "masters" else "masters")}
    new = "nobody.weight" if how == "unknown" else sorted(names)[0]

    def change(manifest: dict[str, Any], rows: Rows) -> None:
        name = next(name for name, row in manifest["files"].items() if row["section"] == section)
        manifest["files"][name]["tensors"].append([new, "F32", [3]])
        rows[name].append(bytes(12))

    expected = rf"section '{section}' has '{re.escape(new)}'"
    if new in {tensor for *_, of, tensor in saved.places() if of == section}:
        expected = "more than once"
    saved.check(saved.changed(change), expected)


def test_every_tensor_of_another_type_or_shape(saved: Saved) -> None:
    for name, index, section, tensor in saved.places():
        if section == "extra":
            continue  # whatever there is

        def retyped(manifest: dict[str, Any], rows: Rows, name: str = name, index: int = index) -> None:
            row = manifest["files"][name]["tensors"][index]
            row[1] = {"F32": "I32", "F16": "BF16", "I64": "F64"}[row[1]]

        def reshaped(manifest: dict[str, Any], rows: Rows, name: str = name, index: int = index) -> None:
            row = manifest["files"][name]["tensors"][index]
            row[2] = [1, *row[2]]

        for change in (retyped, reshaped):
            what = repr(tensor) if section == "buffers" else f"{section}.*{tensor!r}"
            saved.check(saved.changed(change), re.escape(what).replace(r"\.\*", ".*"))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(0, 10), (12, -1)], "elements 10 to 11 are missing"),
        ([(0, 10), (8, -1)], "elements 8 to 9 are there more than once"),
        ([(1, -1)], "elements 0 to 0 are missing"),
        ([(0, -2)], "elements .* are missing"),
        ([(0, -1), (0, -1)], "more than once"),
    ],
)
def test_parts_with_gaps_and_overlaps(saved: Saved, parts: list[tuple[int, int]], expected: str) -> None:
    """As of several processes, of which one said too little or too much."""
    name, index, _, tensor = next(each for each in saved.places() if each[2] == "masters")
    numel = len(saved.rows[name][index]) // 4

    def change(manifest: dict[str, Any], rows: Rows) -> None:
        tensors, data = manifest["files"][name]["tensors"], rows[name]
        del tensors[index]
        whole = data.pop(index)
        for number, (first, end) in enumerate(parts):
            stop = end + 1 + numel if end < 0 else end
            tensors.append([f"{tensor}[{first}:{stop}]#{number}", "F32", [stop - first], tensor, first])
            data.append(whole[4 * first : 4 * stop])

    saved.check(saved.changed(change), f"'masters'.*{tensor!r}.*{expected}")


def test_two_sections_exchanged(saved: Saved) -> None:
    def change(manifest: dict[str, Any], rows: Rows) -> None:
        for name, row in manifest["files"].items():
            if "exp_avg" in name:
                row["section"] = "exp_avg" if "sq" in name else "exp_avg_sq"

    saved.check(saved.changed(change), r"exp_avg.*\.safetensors.* section 'exp_avg")


# The manifest.


def drop(*keys: str) -> Change:
    def change(manifest: dict[str, Any], rows: Rows) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        del manifest[keys[-1]]

    return change


def put(value: Any, *keys: Any) -> Change:
    def change(manifest: dict[str, Any], rows: Rows) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        assert manifest.get(keys[-1], ...) != value or type(manifest[keys[-1]]) is not type(value)
        manifest[keys[-1]] = value

    return change


TOP = ("format", "version", "save", "ranks", "orders", "parameters", "optimizer", "modules", "extra", "files")
TOP += ("random_files",)
DROPPED = [(key,) for key in TOP] + [("optimizer", key) for key in ("name", "groups", "steps", "loss_scale")]
DROPPED += [("random", key) for key in ("torch", "python")] + [("optimizer", "loss_scale", "scale")]
DROPPED += [("parameters", "table.weight", key) for key in ("shape", "dtype", "trainable")]
DROPPED += [("files", "buffers.safetensors", key) for key in ("section", "tensors")]


@pytest.mark.parametrize("keys", DROPPED, ids=".".join)
def test_something_missing(saved: Saved, keys: tuple[str, ...]) -> None:
    saved.check(saved.changed(drop(*keys)), keys[-1])


NAN = {"$float": "nan"}
WRONG = [
    *(
        ((count, "optimizer", "steps", "table.weight"), r"steps.*'table\.weight'")
        for count in (-1, 1.0, True, "1", None)
    ),
    ((3, "optimizer", "steps", "nobody"), r"steps.*'nobody'"),
    ((3, "optimizer", "steps", "blocks.1.wide.weight"), r"steps.*'blocks\.1\.wide\.weight'"),
    ((7, "optimizer", "steps"), "steps"),
    *(((value, "optimizer", "loss_scale", "scale"), "loss.scale") for value in (-1.0, 0, True, "1", None, NAN)),
    *(((value, "optimizer", "loss_scale", "growth_interval"), "growth_interval") for value in (-1, 0, 1.5, True, "1")),
    *(((value, "optimizer", "loss_scale", "_growth_tracker"), "_growth_tracker") for value in (-1, 1.5, True, "1")),
    ((None, "optimizer", "loss_scale"), "loss scale"),
    (([], "optimizer", "loss_scale"), "loss.scale"),
    (("Adamax", "optimizer", "name"), "Adamax"),
    (("SGD", "optimizer", "name"), "momentum_buffer|SGD"),
    ((None, "optimizer"), "optimizer"),
    (([], "optimizer", "groups"), "groups"),
    (({}, "optimizer", "groups"), "groups"),
    (({}, "random"), "torch"),
    (({"$bytes": "AAAA"}, "random", "torch"), "random numbers"),
    (({"$tuple": [3, {"$tuple": [1, 2]}, None]}, "random", "python"), "random numbers"),
    (("x", "random", "numpy"), "random numbers"),
    (([1], "random", "numpy", "state", "key"), "random numbers"),
    (("x", "random", "cuda"), "random numbers"),
    *(
        ((shape, "parameters", "table.weight", "shape"), r"'table\.weight'.*shape")
        for shape in ([-1], [1.0], [True], "x")
    ),
    (("F99", "parameters", "table.weight", "dtype"), r"'table\.weight'.*F99"),
    ((1, "parameters", "table.weight", "trainable"), r"'table\.weight'.*trainable"),
    ((False, "parameters", "table.weight", "trainable"), r"'table\.weight'"),
    ((7, "parameters", "table.weight"), r"'table\.weight'"),
    (("moments", "files", "buffers.safetensors", "section"), "moments"),
    ((3, "files", "buffers.safetensors", "section"), "section"),
    (([["a"]], "files", "buffers.safetensors", "tensors"), r"buffers\.safetensors"),
    (([["a", "F99", [2]]], "files", "buffers.safetensors", "tensors"), "F99"),
    (([["a", "F32", [-2]]], "files", "buffers.safetensors", "tensors"), r"'a'"),
    (([["a", "F32", [2], "b"]], "files", "buffers.safetensors", "tensors"), r"'a'"),
    (([], "files"), "files"),
    (([], "modules"), "modules"),
    (([], "extra"), "extra"),
    (({"$tensor": "99"}, "extra", "a"), "'99'"),
    (({"$float": "x"}, "extra", "a"), "extra"),
    (({"$bytes": 3}, "extra", "a"), "extra"),
    (({"name": "x"}, "modules", ""), "section 'extra' has '0'"),
    (({"a": 1}, "modules", "nobody"), "nobody"),
    ((1, "version"), "save"),
    (("", "save"), "save"),
    ((0, "ranks"), "ranks"),
    ((2, "ranks"), "random_files"),
    (({"nobody": [1]}, "orders"), "nobody"),
    ((1, "files", "buffers.safetensors", "writer"), "writer"),
    ((True, "version"), "version"),
]


@pytest.mark.parametrize(("what", "expected"), WRONG, ids=lambda each: str(each)[:60])
def test_something_that_is_not_what_it_should_be(saved: Saved, what: tuple[Any, ...], expected: str) -> None:
    saved.check(saved.changed(put(*what)), expected)


def group(key: str, value: Any = ...) -> Change:
    def change(manifest: dict[str, Any], rows: Rows) -> None:
        found = manifest["optimizer"]["groups"][1]
        if value is ...:
            del found[key]
        else:
            found[key] = value(found[key]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (group("param_names"), "param_names"),
        (group("param_names", 3), "param_names"),
        (group("param_names", lambda names: names[1:]), "bias"),
        (group("param_names", lambda names: [*names, names[0]]), "bias"),
        (group("param_names", lambda names: [*names, "nobody"]), "nobody"),
        (group("lr"), "lr"),
        *((group("lr", lr), "lr") for lr in ("x", -1.0, None, NAN)),
        (group("betas", {"$tuple": [0.9]}), "betas"),
        (group("betas", {"$tuple": [0.9, 2.0]}), "betas"),
        (group("amsgrad", True), "amsgrad"),
    ],
)
def test_groups_that_nothing_can_be_stepped_with(saved: Saved, change: Change, expected: str) -> None:
    saved.check(saved.changed(change), expected)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\xff"])
def test_a_manifest_that_is_none(saved: Saved, text: str) -> None:
    saved.check(saved.written(text, saved.manifest, saved.rows), rf"{MANIFEST}: ")


@pytest.mark.parametrize("key", ["table.weight", "buffers.safetensors", "optimizer", "python"])
def test_a_key_twice(saved: Saved, key: str) -> None:
    """JSON's readers take the last one in silence."""
    text, begins = json.dumps(saved.manifest), f'"{key}": '
    assert begins in text
    at = text.index(begins)
    value = json.JSONDecoder().raw_decode(text, at + len(begins))[1]
    twice = f"{text[:value]}, {text[at:value]}{text[value:]}"
    assert json.loads(twice) == saved.manifest
    saved.check(saved.written(twice, saved.manifest, saved.rows), f"{re.escape(repr(key))}.*more than once")


# Weights alone.


@pytest.mark.parametrize("section", ["masters", "weights"])
@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_what_is_incomplete(saved: Saved, section: str, strict: bool, tmp_path: Path) -> None:
    name, index, _, tensor = next(each for each in saved.places() if each[2] == section)
    path = saved.changed(take_out(name, index))
    with Run("cpu", spec=None, build=Stateful) as other:
        before = values_of(other)
        with pytest.raises(CheckpointDamaged, match=f"'{section}'.*{tensor!r}"):
            load_weights(other.model, path, strict=strict)
        with pytest.raises(CheckpointDamaged, match=f"'{section}'.*{tensor!r}"):
            load_checkpoint(path, other.model, None)
        assert_same(before, values_of(other))
    with pytest.raises(CheckpointDamaged, match=f"'{section}'.*{tensor!r}"):
        export_checkpoint(path, tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == []
    shutil.rmtree(path)
