"""A run that is loaded goes on as if it had never stopped, wherever it was saved and wherever it is loaded."""

from __future__ import annotations

import json
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from _checkpoints import SPEC, TIERS, Net, Run, assert_same
from ps_core import SGD, Adam, AdamW, Budget, CheckpointMismatch, Group, InvalidInput
from ps_core.engine import chunked, load_checkpoint, release, save_checkpoint, statistics
from ps_core.engine._checkpoint import writer as _writing
from ps_core.engine._checkpoint.json_values import decode, encode
from ps_core.engine._checkpoint.rng_state import random_state, restore_random_state

PRECISIONS = ("fp32", "bf16", "fp16")
SPECS = {"adamw": SPEC, "adam": Adam(lr=1e-2), "sgd": SGD(lr=0.1, momentum=0.9)}


def save(run: Run, path: Path, **told: Any) -> None:
    save_checkpoint(path, run.model, run.optimizer, extra={"scheduler": run.scheduler.state_dict()}, **told)


def load(run: Run, path: Path) -> None:
    run.scheduler.load_state_dict(load_checkpoint(path, run.model, run.optimizer)["scheduler"])


ELSEWHERE = zip(TIERS, (*list(TIERS)[1:], next(iter(TIERS))), strict=True)
ROWS = [
    *((precision, tiers, tiers) for precision, tiers in product(PRECISIONS, TIERS)),
    *(("bf16", saved, loaded) for saved, loaded in ELSEWHERE),
]


@pytest.mark.parametrize(("precision", "saved", "loaded"), ROWS)
def test_resumed_is_uninterrupted(tmp_path: Path, precision: str, saved: str, loaded: str) -> None:
    with Run(saved, precision) as run:
        run.train(3)
        found = statistics(run.model)
        assert saved == "cpu" or found.evictions or found.moved_bytes.get("disk->host"), "it was to be tight"
        save(run, tmp_path / "three")
        losses, values = run.train(2), run.values()
    with Run(loaded, precision, seed=2, group_bytes=5000) as run:
        run.train(1)
        load(run, tmp_path / "three")
        again = run.train(2)
        assert all(torch.equal(one, other) for one, other in zip(losses, again, strict=True))
        assert_same(values, run.values())


@pytest.mark.parametrize("spec", SPECS)
def test_into_a_fresh_model(tmp_path: Path, spec: str) -> None:
    with Run("emulated", spec=SPECS[spec]) as run:
        run.train(2)
        save(run, tmp_path / "two")
        losses, values = run.train(2), run.values()
    with Run("emulated", spec=SPECS[spec], seed=5) as run:
        load(run, tmp_path / "two")
        again = run.train(2)
        assert all(torch.equal(one, other) for one, other in zip(losses, again, strict=True))
        assert_same(values, run.values())


def test_before_the_first_step(tmp_path: Path) -> None:
    with Run("cpu", "fp16") as run:
        save(run, tmp_path / "zero")
        losses = run.train(3)
    with Run("emulated", "fp16", seed=3) as run:
        run.train(2)
        load(run, tmp_path / "zero")
        assert all(torch.equal(one, other) for one, other in zip(losses, run.train(3), strict=True))


def contents(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(path.iterdir())}


def test_the_same_training_gives_the_same_bytes_wherever_it_ran(tmp_path: Path) -> None:
    found = []
    for group_bytes, tiers in zip((2048, 3000, 5000, 7000, 4000), TIERS, strict=True):
        with Run(tiers, group_bytes=group_bytes) as run:
            run.train(2)
            save(run, tmp_path / tiers)
            found.append(contents(tmp_path / tiers))
    assert "masters.safetensors" in found[0]
    assert all(each == found[0] for each in found[1:])


def test_files_are_cut_at_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_writing, "FILE_BYTES", 12_000)
    with Run("emulated") as run:
        run.train(1)
        save(run, tmp_path / "a")
        values = run.values()
    names = [each.name for each in sorted((tmp_path / "a").glob("masters*"))]
    assert names == [f"masters-{i:05}-of-{len(names):05}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) > 2
    sizes = [(tmp_path / "a" / name).stat().st_size for name in names]
    assert all(size < 14_000 for size in sizes)
    with Run("cpu", seed=4) as run:
        load(run, tmp_path / "a")
        assert_same(values, run.values())


def test_saving_changes_nothing(tmp_path: Path) -> None:
    with Run("emulated") as run:
        expected = run.train(4), run.values()
    with Run("emulated") as run:
        losses = []
        for index in range(4):
            losses += run.train(1)
            save(run, tmp_path / str(index))
        assert all(torch.equal(one, other) for one, other in zip(expected[0], losses, strict=True))
        assert_same(expected[1], run.values())


# What comes with it.


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "epoch": 3,
        "best": (0.1, float("inf"), -0.0, 1e-320),
        "name": "run ü",
        3: [None, True, b"\x00\xff"],
        "$odd": {"ema": torch.arange(5, dtype=torch.bfloat16), ("a", 1): {}},
        "numpy": numpy.float64(0.3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2, dtype=torch.uint8),
        "strided": torch.arange(6).view(2, 3).t(),
    }
    with Run("cpu") as run:
        save_checkpoint(tmp_path / "a", run.model, run.optimizer, extra=extra)
        found = load_checkpoint(tmp_path / "a", run.model, run.optimizer)
        assert list(found) == list(extra)
        for name in ("epoch", "best", "name", 3, "numpy"):
            assert repr(found[name]) == repr(float(extra[name]) if name == "numpy" else extra[name])
        assert found["$odd"]["ema"].dtype is torch.bfloat16
        assert found["$odd"]["ema"].tolist() == [0, 1, 2, 3, 4]
        assert found["$odd"]["a", 1] == {}
        assert found["empty"].shape == (0, 3)
        assert found["scalar"].item() == 2
        assert found["strided"].tolist() == [[0, 3], [1, 4], [2, 5]]
        save_checkpoint(tmp_path / "b", run.model, run.optimizer)
        assert load_checkpoint(tmp_path / "b", run.model, run.optimizer) == {}


def test_what_json_cannot_hold_is_named(tmp_path: Path) -> None:
    with Run("cpu") as run:
        with pytest.raises(InvalidInput, match=r"extra\['a'\]\[1\] is a set, which a checkpoint cannot hold"):
            save_checkpoint(tmp_path / "a", run.model, run.optimizer, extra={"a": [1, {2}]})
        run.optimizer.param_groups[1]["why"] = print
        with pytest.raises(InvalidInput, match=r"param_groups\[1\]\['why'\] is a builtin_function_or_method"):
            save_checkpoint(tmp_path / "a", run.model, run.optimizer)
        assert list(tmp_path.iterdir()) == []


def test_random_numbers_go_on(tmp_path: Path) -> None:
    def draws() -> tuple[float, ...]:
        return random.random(), random.gauss(0, 1), float(torch.rand(())), float(numpy.random.normal())

    with Run("cpu") as run:
        random.gauss(0, 1)
        numpy.random.normal()
        save_checkpoint(tmp_path / "a", run.model, run.optimizer)
        expected = [draws() for _ in range(2)]
        load_checkpoint(tmp_path / "a", run.model, run.optimizer)
        assert [draws() for _ in range(2)] == expected


def test_random_numbers_of_cuda_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are two devices; and where there is then one."""
    states, restored = [torch.arange(16, dtype=torch.uint8) + index for index in range(2)], {}
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "get_rng_state_all": lambda: states,
        "device_count": lambda: 1,
        "set_rng_state": lambda state, device: restored.update({device: state}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    restore_random_state(decode(json.loads(json.dumps(encode("", random_state(), str))), {}.__getitem__))
    assert list(restored) == [0]
    assert torch.equal(restored[0], states[0])


def test_learning_rates_and_whatever_else_a_group_holds(tmp_path: Path) -> None:
    with Run("cpu") as run:
        run.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
        run.optimizer.param_groups[1]["note"] = ("mine", None)
        save_checkpoint(tmp_path / "a", run.model, run.optimizer)
    with Run("cpu") as run:
        load_checkpoint(tmp_path / "a", run.model, run.optimizer)
        assert run.optimizer.param_groups[0]["lr"].item() == 0.25
        assert run.optimizer.param_groups[1]["note"] == ("mine", None)
        assert run.optimizer.param_groups[1]["params"][0] is dict(run.model.named_parameters())["blocks.0.norm.bias"]
        run.train(1)


class Counting(nn.Module):
    """State of its own that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(tokens)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "last": torch.tensor([self.calls])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["last"].item() == state["calls"]
        self.calls = state["calls"]


def test_extra_state_of_modules(tmp_path: Path) -> None:
    with Run("cpu", build=Counting) as run:
        run.train(3)
        save(run, tmp_path / "a")
    with Run("cpu", build=Counting) as run:
        load(run, tmp_path / "a")
        assert run.model.calls == 3


class Strange(Net):
    """Buffers and parameters of whole numbers, in other memory orders, without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.arange(3, dtype=torch.int16))
        self.whole = nn.Parameter(torch.arange(4), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.image = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.number = nn.Parameter(torch.tensor(1.5))
        self.alias = self.counts

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.counts += 1
        return super().forward(tokens) + (self.turned.sum() + self.image.sum()) * self.number.square()


@pytest.mark.parametrize("tiers", ["emulated", "cpu, disk"])
def test_unusual_parameters_and_buffers(tmp_path: Path, tiers: str) -> None:
    with Run(tiers, build=Strange) as run:
        run.train(2)
        assert not run.model.turned.is_contiguous()
        save(run, tmp_path / "a")
        losses, values = run.train(2), run.values()
    with Run(tiers, build=Strange, seed=9) as run:
        run.model.whole.zero_()
        load(run, tmp_path / "a")
        assert run.model.alias is run.model.counts
        assert all(torch.equal(one, other) for one, other in zip(losses, run.train(2), strict=True))
        assert_same(values, run.values())


# Models that are not trained.


def test_weights_of_a_training_run_for_a_model_that_is_only_used(tmp_path: Path) -> None:
    with Run("emulated") as run:
        run.train(2)
        save(run, tmp_path / "a")
        expected = run.model.state_dict()
    with Run("cpu", spec=None, seed=7) as run:
        before = torch.get_rng_state()
        load_checkpoint(tmp_path / "a", run.model, None)
        assert torch.equal(before, torch.get_rng_state()), "somebody else's random numbers"
        assert_same(expected, run.model.state_dict())
        save_checkpoint(tmp_path / "b", run.model, None, extra={"note": 1})
    with Run("emulated", spec=None, seed=8) as run:
        assert load_checkpoint(tmp_path / "b", run.model, None) == {"note": 1}
        assert_same(expected, run.model.state_dict())
    with Run("cpu") as run, pytest.raises(CheckpointMismatch, match="the optimizer: none in the checkpoint"):
        load_checkpoint(tmp_path / "b", run.model, run.optimizer)


# What is refused.


def test_amid_a_step(tmp_path: Path) -> None:
    with Run("emulated", told={"accumulation_steps": 2}) as run:
        run.train(1)
        run.model(run.batch()).backward()
        with pytest.raises(InvalidInput, match=r"\d+ gradients \(the first of 'table.weight'\) wait for a step"):
            save(run, tmp_path / "a")
        assert not (tmp_path / "a").exists()
        run.optimizer.zero_grad()
        save(run, tmp_path / "a")
        values = run.values()
        run.model(run.batch()).backward()
        load(run, tmp_path / "a")
        assert all(parameter.grad is None for parameter in run.model.parameters()), "gradients of other weights"
        assert_same(values, run.values())


def test_inside_a_backward_pass(tmp_path: Path) -> None:
    with Run("cpu") as run:
        save(run, tmp_path / "a")
        loss = run.model(run.batch())
        for call in (save, load):
            graph = loss * 1.0
            graph.register_hook(lambda _, call=call: call(run, tmp_path / "b"))
            with pytest.raises(InvalidInput, match="inside a backward pass nothing can be"):
                graph.backward(retain_graph=True)


def test_a_loss_from_before_cannot_be_used_after(tmp_path: Path) -> None:
    with Run("emulated") as run:
        run.train(1)
        save(run, tmp_path / "a")
        loss = run.model(run.batch())
        load(run, tmp_path / "a")
        with pytest.raises(RuntimeError, match=r"modified|changed|step"):
            loss.backward()


def test_where_it_may_be(tmp_path: Path) -> None:
    with Run("cpu") as run:
        (tmp_path / "empty").mkdir()
        for name in ("none", "empty"):
            with pytest.raises(InvalidInput, match=f"there is no checkpoint at {re.escape(str(tmp_path))}/{name}"):
                load(run, tmp_path / name)
        save(run, tmp_path / "new" / "folder" / "a")
        with pytest.raises(InvalidInput, match="exists already: choose another path, or give overwrite=True"):
            save(run, tmp_path / "new" / "folder" / "a")
        with pytest.raises(InvalidInput, match="'/' cannot be a checkpoint: name a folder below it"):
            save(run, Path("/"), overwrite=True)
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "work.txt").write_text("years of it")
        (tmp_path / "file").write_text("")
        for name in ("precious", "file"):
            with pytest.raises(InvalidInput, match="is not a checkpoint, so it is not overwritten"):
                save(run, tmp_path / name, overwrite=True)
        assert (tmp_path / "precious" / "work.txt").read_text() == "years of it"
        with_notes = tmp_path / "new" / "folder" / "a"
        for name in ("notes.txt", "momentum_buffer.safetensors", ".hidden"):
            (with_notes / name).write_text("mine")
        with pytest.raises(
            InvalidInput,
            match=r"what is none of it \('.hidden', 'momentum_buffer.safetensors', 'notes.txt'\), so it is not over",
        ):
            save(run, with_notes, overwrite=True)
        for name in ("notes.txt", "momentum_buffer.safetensors", ".hidden"):
            assert (with_notes / name).read_text() == "mine"
            (with_notes / name).unlink()
        (tmp_path / "precious" / "manifest.json").write_text('{"name": "somebody\'s page"}')
        with pytest.raises(InvalidInput, match="is not a checkpoint, so it is not overwritten"):
            save(run, tmp_path / "precious", overwrite=True)
        (tmp_path / "link").symlink_to(tmp_path / "new" / "folder" / "a")
        run.train(1)
        save(run, str(tmp_path / "link"), overwrite=True)
        assert (tmp_path / "link").is_symlink()
        load(run, tmp_path / "new" / "folder" / "a")
        names = sorted(each.name for each in tmp_path.rglob("*") if ".a." in each.name)
        assert names == []


def test_with_whom(tmp_path: Path) -> None:
    with Run("cpu") as run, Run("cpu") as other:
        for optimizer, found in ((None, "found None"), (torch.optim.SGD([torch.zeros(1)]), "found a SGD")):
            with pytest.raises(InvalidInput, match=f"the optimizer that .* returned with this model, {found}"):
                save_checkpoint(tmp_path / "a", run.model, optimizer)
        with pytest.raises(InvalidInput, match="this optimizer is another model's"):
            save_checkpoint(tmp_path / "a", run.model, other.optimizer)
        with pytest.raises(InvalidInput, match="not under management"):
            save_checkpoint(tmp_path / "a", Net(), run.optimizer)
        save_checkpoint(tmp_path / "a", run.model.blocks, run.optimizer)  # names are the whole model's all the same
        values = run.values()
        load_checkpoint(tmp_path / "a", other.model.blocks[0], other.optimizer)
        assert_same(values, other.values())


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32, track_running_stats=False)


class Thawed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].wide.requires_grad_(True)


BIASES = (Group(match=lambda name, _: name.endswith("bias"), lr=2e-2),)
NORMS = (Group(match=lambda name, _: "norm" in name, lr=2e-2),)
DIFFERENT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "model": (
        {"build": Wider},
        [
            "'blocks.0.norm.weight': in the checkpoint, not in the model",
            "'blocks.0.weight': in the model, not in the checkpoint",
            r"and \d+ differences more",
        ],
    ),
    "frozen": (
        {"build": Thawed},
        ["'blocks.1.wide.weight': frozen in the checkpoint, trained in the model: freeze it before chunked"],
    ),
    "precision": ({"precision": "fp32"}, ["dtype BF16 in the checkpoint, F32 in the model"]),
    "rule": ({"spec": Adam(groups=BIASES)}, ["the optimizer: AdamW in the checkpoint, Adam here"]),
    "groups": ({"spec": AdamW()}, ["the optimizer's groups: 2 in the checkpoint, 1 here"]),
    "members": (
        {"spec": AdamW(groups=NORMS)},
        [r"'blocks.0.norm.weight': in param_groups\[0\] in the checkpoint, in param_groups\[1\] here"],
    ),
    "buffers": ({"build": Strange}, ["parameter 'turned': in the model, not in the checkpoint"]),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_something_else_is_told_apart_and_nothing_is_changed(tmp_path: Path, what: str) -> None:
    told, expected = DIFFERENT[what]
    with Run("cpu") as run:
        run.train(1)
        save(run, tmp_path / "a")
    with Run("emulated", **{"seed": 3, **told}) as run:
        run.train(1)
        values, state = run.values(), random.getstate()
        with pytest.raises(CheckpointMismatch) as caught:
            load(run, tmp_path / "a")
        for text in expected:
            assert re.search(text, str(caught.value)), caught.value
        assert re.search(r"try: build the model.*\n  load_weights\(model, '.*a'\)", str(caught.value))
        assert_same(values, run.values())
        assert random.getstate() == state
        run.train(1)


@pytest.mark.parametrize("tensor", [torch.zeros(3).to_sparse(), torch.zeros(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_dense_memory_is_refused_by_name(tensor: torch.Tensor, tmp_path: Path) -> None:
    model, optimizer = chunked(nn.Linear(8, 8), AdamW(), budget=Budget(host="64MiB"))
    with pytest.raises(InvalidInput, match=r"extra\['key'\] is a tensor of layout"):
        save_checkpoint(tmp_path / "saved", model, optimizer, extra={"key": tensor})
    assert not list(tmp_path.iterdir())
    release(model)
