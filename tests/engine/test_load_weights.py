"""Published weights: files of the safetensors library's, read into chunks, and ours read by the library."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from _checkpoints import TIERS, Net, Run, assert_same
from _models import VOCABULARY, Language
from _states import masters_of
from ps_core import CheckpointDamaged, CheckpointMismatch, InvalidInput, Options
from ps_core._extents import Kind
from ps_core.engine import chunked, load_checkpoint, load_weights, materialized, save_checkpoint
from ps_core.engine._checkpoint.direct_io import TensorReader, TensorWriter, buffers
from ps_core.engine._checkpoint.safetensors_format import TYPES, TensorEntry, in_order, read_table, table_of

# The format.


def tensors() -> dict[str, torch.Tensor]:
    """One of each type, and unusual shapes."""
    found = {}
    for index, (name, dtype) in enumerate(TYPES.items()):
        whole = torch.arange(1, 8 + index)
        found[name] = whole % 2 == 0 if dtype is torch.bool else whole.to(torch.float32).to(dtype)
    large = torch.randn(5000, 300)
    return {
        **found,
        "number": torch.tensor(2.5),
        "none": torch.zeros(4, 0),
        "ü \"'": large,
        "turned": large[:9, :7].t(),
    }


def write(path: Path, given: dict[str, torch.Tensor]) -> None:
    entries = in_order(TensorEntry(name, value.dtype, tuple(value.shape)) for name, value in given.items())
    with buffers(100_000) as pair:
        writer = TensorWriter(path, table_of(entries), pair)
        for entry in entries:
            writer.write(given[entry.name])
        writer.finish()
        writer.close()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [each.contiguous().view(torch.uint8) if each.dim() else each.clone() for each in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    given = tensors()
    write(tmp_path / "a.safetensors", given)
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert found.keys() == given.keys()
    assert all(same(value, found[name]) for name, value in given.items())
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    given = {name: value.contiguous() for name, value in tensors().items()}
    safetensors.torch.save_file(given, tmp_path / "a.safetensors", metadata={"format": "pt", "by": "somebody"})
    start, entries = read_table(tmp_path / "a.safetensors")
    assert {entry.name for entry in entries} == given.keys()
    with buffers(10**9) as pair:
        reader = TensorReader(tmp_path / "a.safetensors", [(start, (tmp_path / "a.safetensors").stat().st_size)], pair)
        for entry in entries:
            target = torch.empty(entry.shape, dtype=entry.dtype)
            reader.read(entry.dtype, target)
            assert same(target, given[entry.name]), entry.name
        reader.close()


def test_a_checkpoint_is_read_by_the_library(tmp_path: Path) -> None:
    with Run("emulated") as run:
        run.train(1)
        save_checkpoint(tmp_path / "a", run.model, run.optimizer)
        state, names = run.optimizer.state_dict(masters=True), [name for name, _ in run.model.named_parameters()]
        order = [name for group in run.optimizer.param_groups for name in group["param_names"]]
    for section, kind in (("masters", None), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        found = safetensors.torch.load_file(tmp_path / "a" / f"{section}.safetensors")
        for name, value in found.items():
            index = order.index(name)
            expected = masters_of(state)[index] if kind is None else state["state"][index][kind]
            assert torch.equal(expected, value)
        assert set(names) - found.keys() == {name for name in names if name.startswith("blocks.1.")}


# Weights.


def plain_weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(40)
    return {name: value.to(dtype) for name, value in Language(tied=True).state_dict().items()}


def untied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Hugging Face saves: tied ones once."""
    return {name: value for name, value in weights.items() if name != "head.weight"}


def in_one(path: Path, weights: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    safetensors.torch.save_file(untied(weights), path / "model.safetensors")
    return path


def by_itself(path: Path, weights: dict[str, torch.Tensor]) -> Path:
    safetensors.torch.save_file(untied(weights), path)
    return path


def with_both_names(path: Path, weights: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    safetensors.torch.save_file({name: value.clone() for name, value in weights.items()}, path / "any.safetensors")
    return path


def in_shards(path: Path, weights: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    places = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(untied(weights))}
    for file in set(places.values()):
        safetensors.torch.save_file({name: weights[name] for name in places if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


ROWS = [*((each, "cpu") for each in (in_one, by_itself, with_both_names)), *((in_shards, tiers) for tiers in TIERS)]


@pytest.mark.parametrize(("source", "tiers"), ROWS)
def test_masters_start_from_what_the_files_hold(
    tmp_path: Path, source: Callable[[Path, dict[str, torch.Tensor]], Path], tiers: str
) -> None:
    weights = plain_weights()
    with Run(tiers, build=lambda: Language(tied=True)) as run:
        assert load_weights(run.model, source(tmp_path / "a", weights)) == ([], [])
        masters = masters_of(run.optimizer.state_dict(masters=True))
        order = [name for group in run.optimizer.param_groups for name in group["param_names"]]
        assert all(torch.equal(masters[index], weights[name]) for index, name in enumerate(order)), "rounded"
        rounded = {name: value.bfloat16() for name, value in weights.items()}
        found = run.model.state_dict()
        kept = [name for name in found if name.startswith("norm.")]  # in fp32
        assert_same({**rounded, **{name: weights[name] for name in kept}}, found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_types_are_converted(tmp_path: Path, dtype: torch.dtype, training: bool) -> None:
    weights = plain_weights(dtype)
    with Run("emulated", "fp16", build=lambda: Language(tied=True), **({} if training else {"spec": None})) as run:
        load_weights(run.model, by_itself(tmp_path / "a.safetensors", weights))
        engine = run.model.table.weight._owner
        for record in engine.records:
            kind = Kind.P32 if training else record.group.weight
            assert torch.equal(
                engine.read_state(record, kind),
                weights[record.name].float().to(torch.float32 if training else record.dtype),
            )


def test_a_model_that_has_no_memory_until_then(tmp_path: Path) -> None:
    weights = plain_weights()
    with torch.device("meta"):
        model = Language(tied=True)
    model, _ = chunked(model, None, options=Options(group_bytes=2048))
    load_weights(model, in_shards(tmp_path / "a", weights))
    assert torch.equal(model.state_dict()["table.weight"], weights["table.weight"].bfloat16())


def test_a_checkpoint_gives_its_weights(tmp_path: Path) -> None:
    with Run("emulated") as run:
        run.train(2)
        save_checkpoint(tmp_path / "a", run.model, run.optimizer, extra={"other": torch.ones(3)})
        with materialized(run.model):
            weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    with Run("cpu", "fp32", seed=3) as run:
        run.train(1)
        steps = [record.steps for record in run.model.table.weight._owner.records]
        load_weights(run.model, tmp_path / "a")
        found = run.model.state_dict()
        masters = safetensors.torch.load_file(tmp_path / "a" / "masters.safetensors")
        assert all(torch.equal(found[name], value) for name, value in masters.items())
        for name in ("norm.running_mean", "blocks.1.wide.weight"):
            assert torch.equal(found[name], weights[name].float())
        assert steps == [record.steps for record in run.model.table.weight._owner.records]
        run.train(1)


def test_training_goes_on_from_them(tmp_path: Path) -> None:
    path = by_itself(tmp_path / "a.safetensors", dict(Net().state_dict()))
    with Run("emulated", seed=2) as one, Run("cpu", seed=2) as other:
        losses = []
        for run in (one, other):
            load_weights(run.model, path)
            torch.manual_seed(5)
            tokens = torch.randint(VOCABULARY, (4, 8))
            run.model.eval()
            losses.append(run.model(tokens))
            losses[-1].backward()
            run.optimizer.step()
        assert torch.equal(*losses)
        assert_same(one.values(), other.values())


# What does not fit.


def test_names_that_are_missing_or_left_over(tmp_path: Path) -> None:
    weights = plain_weights()
    del weights["blocks.1.wide.bias"]
    weights |= {"lm_head.extra": torch.ones(2), "z": torch.ones(1)}
    path = by_itself(tmp_path / "a.safetensors", weights)
    with Run("cpu", build=lambda: Language(tied=True)) as run:
        before = run.values()
        with pytest.raises(CheckpointMismatch) as caught:
            load_weights(run.model, path)
        assert_same(before, run.values())
        for line in (
            "'blocks.1.wide.bias': in the model, not in the files",
            "'lm_head.extra': in the files, not in the model",
            "try: .*strict=False",
        ):
            assert re.search(line, str(caught.value))
        missing, unexpected = load_weights(run.model, path, strict=False)
        assert (missing, sorted(unexpected)) == (["blocks.1.wide.bias"], ["lm_head.extra", "z"])
        after = run.model.state_dict()
        assert torch.equal(after["blocks.1.wide.bias"], before["model blocks.1.wide.bias"])
        assert torch.equal(after["blocks.2.wide.bias"], weights["blocks.2.wide.bias"].bfloat16())


def test_two_values_for_one_parameter(tmp_path: Path) -> None:
    weights = plain_weights(torch.float16)
    weights["head.weight"] = weights["table.weight"].clone()
    weights["head.weight"][-1, -1] += 1
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(weights, path)
    what = "'table.weight' and 'head.weight' are one parameter in the model, and have different values in the files"
    with Run("emulated", build=lambda: Language(tied=True)) as run:
        before = run.values()
        with pytest.raises(CheckpointMismatch, match=f"{what}; try: a model in which they are not tied .*strict=False"):
            load_weights(run.model, path)
        assert_same(before, run.values())
        with pytest.warns(UserWarning, match=f"{what}: 'table.weight' is taken"):
            assert load_weights(run.model, path, strict=False) == ([], [])
        assert torch.equal(run.model.state_dict()["head.weight"], weights["table.weight"].bfloat16())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3), r"'table.weight': shape \(3,\) in the files, \(48, 32\) in the model"),
        (torch.ones(48, 32, dtype=torch.int8), "'table.weight': torch.int8 in the files, torch.bfloat16 in the model"),
    ],
)
def test_values_that_cannot_be(tmp_path: Path, value: torch.Tensor, message: str) -> None:
    path = by_itself(tmp_path / "a.safetensors", {**plain_weights(), "table.weight": value})
    with Run("cpu", build=lambda: Language(tied=True)) as run:
        before = run.values()
        for strict in (True, False):
            with pytest.raises(CheckpointMismatch, match=message):
                load_weights(run.model, path, strict=strict)
        assert_same(before, run.values())


def test_files_that_are_not_there_or_not_whole(tmp_path: Path) -> None:
    weights = plain_weights()
    with Run("cpu", build=lambda: Language(tied=True)) as run:
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "pytorch_model.bin").write_text("")
        for path in (tmp_path / "empty", tmp_path / "nowhere"):
            with pytest.raises(InvalidInput, match=r"expected a safetensors file, or a folder .*found: none"):
                load_weights(run.model, path)
        path = in_shards(tmp_path / "a", weights)
        index = path / "model.safetensors.index.json"
        whole = json.loads(index.read_text())
        twice = '{"weight_map": {"x": "a", "x": "b"}}'
        for broken in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"x": 1}}', twice):
            index.write_text(broken)
            with pytest.raises(CheckpointDamaged, match="not an index"):
                load_weights(run.model, path)
        whole["weight_map"]["more"] = "model-1.safetensors"
        index.write_text(json.dumps(whole))
        with pytest.raises(CheckpointDamaged, match=r"model-1.safetensors: it has no 'more', which model.safetensors"):
            load_weights(run.model, path)
        (path / "model-2.safetensors").unlink()
        with pytest.raises(CheckpointDamaged, match=r"model-2.safetensors: .*No such file"):
            load_weights(run.model, index)
        index.unlink()
        with pytest.raises(InvalidInput, match=r"found: model-0.safetensors, model-1.safetensors. Name one"):
            load_weights(run.model, path)


@pytest.mark.parametrize(
    "there", ["../other/model-1.safetensors", "{}/other/model-1.safetensors", "a/../../other/x", ""]
)
def test_an_index_that_names_files_of_another_folder(tmp_path: Path, there: str) -> None:
    path = in_shards(tmp_path / "a", plain_weights())
    (in_shards(tmp_path / "other", plain_weights()) / "model.safetensors.index.json").unlink()
    index = path / "model.safetensors.index.json"
    whole, name = json.loads(index.read_text()), there.format(tmp_path)
    whole["weight_map"] = {key: name if "-1" in place else place for key, place in whole["weight_map"].items()}
    index.write_text(json.dumps(whole))
    said = f"index.json: its weight_map names {name!r}, expected files of its own folder"
    with Run("cpu", build=lambda: Language(tied=True)) as run:
        before = run.values()
        with pytest.raises(CheckpointDamaged, match=re.escape(said)):
            load_weights(run.model, path)
        assert_same(before, run.values())


def test_files_that_are_links_to_another_folder(tmp_path: Path) -> None:
    """As the cache of Hugging Face has them: a snapshot of links to blobs."""
    weights, blobs = plain_weights(), tmp_path / "blobs"
    path = in_shards(tmp_path / "snapshots", weights)
    blobs.mkdir()
    for number, file in enumerate(sorted(path.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))
    with Run("cpu", build=lambda: Language(tied=True)) as run:
        load_weights(run.model, path)
        loaded = run.model.state_dict()
        assert all(torch.equal(loaded[name], weights[name].to(loaded[name].dtype)) for name in untied(weights))


def test_a_name_in_two_files(tmp_path: Path) -> None:
    """As a file of another save leaves it, that is still there: nothing says which of the values is meant."""
    path = in_shards(tmp_path / "a", plain_weights())
    name, other = (sorted(safetensors.torch.load_file(path / f"model-{index}.safetensors"))[0] for index in (0, 1))
    second = safetensors.torch.load_file(path / "model-1.safetensors")
    first = safetensors.torch.load_file(path / "model-0.safetensors")
    safetensors.torch.save_file({**second, name: first[name] + 1}, path / "model-1.safetensors")
    with Run("cpu", build=lambda: Language(tied=True)) as run:
        before = run.values()
        with pytest.raises(CheckpointDamaged, match=rf"model-1\.safetensors: it has '{name}', and so has .*model-0"):
            load_weights(run.model, path)
        assert_same(before, run.values())
    assert name != other


def test_a_name_twice_in_one_table(tmp_path: Path) -> None:
    """JSON's readers take the last one in silence."""
    path = by_itself(tmp_path / "a.safetensors", plain_weights())
    start, entries = read_table(path)
    text = path.read_bytes()[8:start].rstrip()
    row = json.dumps({"dtype": "F16", "shape": list(entries[0].shape), "data_offsets": [0, 1]})
    table = f'{{"{entries[0].name}":{row},'.encode() + text[1:]
    path.write_bytes(len(table).to_bytes(8, "little") + table + path.read_bytes()[start:])
    with pytest.raises(CheckpointDamaged, match=f"{re.escape(repr(entries[0].name))} more than once"):
        read_table(path)


def test_a_file_that_is_written_to_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a download that has made it as long as it will be."""
    path = by_itself(tmp_path / "a.safetensors", plain_weights())
    real, size = os.preadv, path.stat().st_size

    def read(*given: Any) -> int:
        with path.open("r+b") as file:
            file.seek(size - 1)
            file.write(b"x")
        return real(*given)

    with Run("cpu", build=lambda: Language(tied=True)) as run:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", read)
            with pytest.raises(CheckpointDamaged, match=r"a\.safetensors: it was written to while it was read"):
                load_weights(run.model, path)
        load_weights(run.model, path)


class Numbered(nn.Module):
    """With whole numbers beside the weights, frozen and as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.codes = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
        self.register_buffer("places", torch.arange(4, dtype=torch.int32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("codes", torch.full((4,), 200, dtype=torch.uint8)),
        ("codes", torch.full((4,), 300, dtype=torch.int32)),
        ("places", torch.full((4,), 2**40)),
        ("places", torch.full((4,), 3 + 4j)),
    ],
)
def test_whole_numbers_that_may_not_fit(tmp_path: Path, name: str, value: torch.Tensor) -> None:
    weights = {each: tensor.detach() for each, tensor in Numbered().state_dict().items()}
    path = by_itself(tmp_path / "a.safetensors", {**weights, name: value})
    with Run("cpu", build=Numbered) as run:
        before = run.values()
        with pytest.raises(CheckpointMismatch, match=rf"'{name}': {value.dtype} in the files, torch.int"):
            load_weights(run.model, path)
        assert_same(before, run.values())
        small = {**weights, "places": torch.full((4,), 7, dtype=torch.int16)}
        load_weights(run.model, by_itself(tmp_path / "small.safetensors", small))
        assert run.model.places.tolist() == [7] * 4


def test_amid_a_step(tmp_path: Path) -> None:
    path = by_itself(tmp_path / "a.safetensors", plain_weights())
    with Run("cpu", build=lambda: Language(tied=True)) as run:
        run.model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
        with pytest.raises(InvalidInput, match=r"gradients .* wait for a step, and cannot be loaded"):
            load_weights(run.model, path)
        run.optimizer.zero_grad()
        load_weights(run.model, path)


def test_a_load_that_failed_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = by_itself(tmp_path / "a.safetensors", plain_weights())
    with Run("cpu", build=lambda: Language(tied=True)) as run:

        def fail(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr("os.preadv", fail)
            with pytest.raises(CheckpointDamaged, match="cannot be read"):
                load_weights(run.model, path)
        with pytest.raises(InvalidInput, match=r"load_weights\(.*\) failed half way"):
            run.model(torch.zeros(1, 2, dtype=torch.long))
        load_weights(run.model, path)
        run.model(torch.zeros(1, 2, dtype=torch.long))


class Headed(nn.Module):
    """As Hugging Face builds: a model, and a head on it."""

    base_model_prefix = "core"

    def __init__(self) -> None:
        super().__init__()
        self.core = Language(layers=1)
        self.top = nn.Linear(48, 3)


def test_prefixes_of_models_with_and_without_a_head(tmp_path: Path) -> None:
    torch.manual_seed(1)
    bare = Language(layers=1).state_dict()
    model, _ = chunked(Headed(), None, precision="fp32")
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(bare, path)
    missing, unexpected = load_weights(model, path, strict=False)
    assert (sorted(missing), unexpected) == (["top.bias", "top.weight"], [])
    assert_same(bare, model.core.state_dict())
    safetensors.torch.save_file({f"core.{name}": value + 1 for name, value in bare.items()}, path)
    core, _ = chunked(Language(layers=1), None, precision="fp32")
    core.base_model_prefix = "core"
    assert load_weights(core, path) == ([], [])
    assert_same({name: value + 1 for name, value in bare.items()}, core.state_dict())
    assert load_weights(model.core, tmp_path / "a.safetensors", strict=False)[0], "names of the part that is given"


def test_an_overwriting_cut_short_is_finished_first(tmp_path: Path) -> None:
    with Run("cpu") as run:
        save_checkpoint(tmp_path / "a", run.model, run.optimizer, extra={"number": 1})
        (tmp_path / "a").rename(tmp_path / ".a.ps-ready")
        load_weights(run.model, tmp_path / "a")
        assert load_checkpoint(tmp_path / "a", run.model, run.optimizer) == {"number": 1}
