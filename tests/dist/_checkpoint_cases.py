"""Checkpoints by several processes, on each rank of a crew."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ps_dist
from _memory import grown_by
from _states import masters_of
from _zero_cases import batches
from checked_device.device import CheckedDevice
from ps_core import (
    SGD,
    AdamW,
    Budget,
    CheckpointDamaged,
    CheckpointMismatch,
    InvalidInput,
    Options,
    RanksDiverged,
    TierFailure,
    TorchOptimizer,
)
from ps_core.engine import chunked, load_checkpoint, load_weights, release, save_checkpoint, save_weights, statistics
from ps_core.engine._checkpoint import atomic_folder as _folder

WIDTH, WORDS = 24, 37
Found = dict[str, str]


class Net(nn.Module):
    """Tied, frozen, turned and empty parameters, dropout, and buffers that each rank has its own of."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.turned = nn.Parameter(torch.randn(WIDTH, WORDS).t())
        self.number = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.seen = nn.BatchNorm1d(WIDTH)
        self.register_buffer("same", torch.arange(5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.table(tokens))
        for layer in self.layers:
            x = x + functional.dropout(functional.gelu(layer(x)), 0.2, self.training)
        x = self.seen(x.flatten(0, 1).float()).to(x.dtype) * self.number
        return self.head(x) + functional.linear(x, self.turned)


class Run:
    """One rank's training, or (without collectives) that of one process."""

    def __init__(
        self,
        each: ps_dist.TorchCollectives | None,
        *,
        seed: int = 5,
        device: str = "cpu",
        precision: str = "bf16",
        rule: str = "adamw",
        group_bytes: int = 4000,
    ) -> None:
        self.each, self.step = each, 0
        self.rank, self.ranks = (0, 1) if each is None else (each.mesh.rank, each.mesh.size)
        torch.manual_seed(seed)
        small: dict[str, str] = {"device": f"{96 + 24 * self.ranks}KiB"} if device == "checked" else {}
        if device == "cpu, disk":
            small = {"host": f"{120 * self.ranks}KiB", "disk": "256MiB", "disk_dir": tempfile.gettempdir()}
        self.model, self.optimizer = chunked(
            Net(),
            RULES[rule],
            device=CheckedDevice(name="emulated", check=True, seed=3) if device == "checked" else "cpu",
            budget=Budget(**{"host": "256MiB", **small}),
            precision=precision,
            max_grad_norm=1.0,
            collectives=each,
            options=Options(group_bytes=group_bytes, poison=True, keep_fp32=("seen.*",)),
        )
        torch.manual_seed(100 * seed + self.rank)  # dropout of its own

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            tokens, targets = list(batches(self.step, self.ranks))[self.rank]
            loss = functional.cross_entropy(self.model(tokens).float(), targets.flatten()) / self.ranks
            self.optimizer.scale(loss).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            self.step += 1
        return losses

    def save(self, path: Path, **told: Any) -> None:
        extra = {"step": self.step, "tensor": torch.full((3,), float(self.step))}
        save_checkpoint(path, self.model, self.optimizer, extra=extra, **told)

    def load(self, path: Path) -> None:
        extra = load_checkpoint(path, self.model, self.optimizer)
        self.step = extra["step"]
        assert torch.equal(extra["tensor"], torch.full((3,), float(self.step)))

    def values(self) -> Found:
        """All there is, as short texts by name; buffers are this rank's."""
        state = self.optimizer.state_dict(masters=True)
        rows = {f"model {name}": value for name, value in self.model.state_dict().items()}
        rows |= {f"{name} {key}": each for key, row in state["state"].items() for name, each in row.items()}
        found = {name: digest(value) for name, value in rows.items()}
        return found | {
            "groups": repr(state["param_groups"]),
            "scale": repr(state.get("loss_scale")),
        }

    def close(self) -> None:
        release(self.model)


def digest(value: Tensor) -> str:
    plain = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return f"{tuple(value.shape)} {blake2b(bytes(plain.tolist()), digest_size=8).hexdigest()}"


RULES = {
    "adamw": AdamW(lr=1e-2, weight_decay=0.1),
    "sgd": SGD(lr=0.1, momentum=0.9),
    "nadam": TorchOptimizer(torch.optim.NAdam, lr=1e-2),
}


@contextmanager
def running(each: ps_dist.TorchCollectives | None, **how: Any) -> Iterator[Run]:
    run = Run(each, **how)
    yield run
    run.close()


def resumes(each: ps_dist.TorchCollectives, path: Path, device: str, precision: str, rule: str) -> None:
    """What is loaded goes on as what was not interrupted: on every rank the same losses, weights, states, buffers."""
    how = {"device": device, "precision": precision, "rule": rule}
    with running(each, **how) as run:
        run.train(2)
        found = statistics(run.model)
        assert "disk" not in device or found.moved_bytes.get("disk->host"), "it was to be tight"
        run.save(path)
        losses, values = run.train(2), run.values()
    assert os.listdir(path.parent) == [path.name]
    with running(each, seed=9, **how, group_bytes=7000) as run:
        run.train(1)
        run.load(path)
        assert run.train(2) == losses
        assert run.values() == values


def copies(each: ps_dist.TorchCollectives, path: Path) -> None:
    """Several copies of the model: one of them writes, all load."""
    resumes(each, path, "cpu", "bf16", "adamw")
    files = json.loads((path / "manifest.json").read_text())["files"]
    writers = {file["section"]: set() for file in files.values()}
    for file in files.values():
        writers[file["section"]].add(file["writer"])
    assert writers["masters"] == writers["exp_avg"] == {0, 1}
    assert writers["buffers"] == {0, 1, 2, 3}


def begins(each: ps_dist.TorchCollectives | None, path: Path) -> tuple[Found, str]:
    """A checkpoint after two steps; what is in it, and where random numbers are."""
    with running(each) as run:
        run.train(2)
        run.save(path)
        return run.values(), digest(torch.get_rng_state())


def hands_on(
    each: ps_dist.TorchCollectives | None, source: Path, target: Path, group_bytes: int = 6000
) -> tuple[Found, str]:
    """Load one, save another; what it found."""
    with running(each, seed=8, group_bytes=group_bytes) as run:
        run.load(source)
        found = run.values(), digest(torch.get_rng_state())
        run.save(target)
        run.train(1)
        return found


ORDERS: dict[str, Callable[[nn.Conv2d], Any]] = {
    "rows": lambda conv: conv,
    "channels last": lambda conv: conv.to(memory_format=torch.channels_last),
    "columns": lambda conv: setattr(
        conv, "weight", nn.Parameter(conv.weight.detach().permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0))
    ),
}
"""Put the elements of a convolution's weight into an order in memory, by the order's name."""


@contextmanager
def convolution(each: ps_dist.TorchCollectives | None, order: str, seed: int, group_bytes: int) -> Iterator[Any]:
    """A step of a convolution whose weight is cut on ranks; the model, and its values in the order of rows."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(3, 7, 3)
    ORDERS[order](conv)
    model, optimizer = chunked(
        conv, AdamW(lr=1e-2), precision="fp32", collectives=each, options=Options(group_bytes=group_bytes, poison=True)
    )
    model(torch.randn(2, 3, 6, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

    def values() -> list[Tensor]:
        state = optimizer.state_dict(masters=True)["state"][0]
        found = [model.state_dict()["weight"], *(state[name] for name in ("master", "exp_avg", "exp_avg_sq"))]
        return [value.clone(memory_format=torch.contiguous_format) for value in found]

    yield model, optimizer, values
    release(model)


def turns(each: ps_dist.TorchCollectives, folder: Path) -> None:
    """Load what one process or the ranks saved, from each order in memory into each: the weight and all states."""
    for number, (saved, loaded) in enumerate(itertools.product(ORDERS, ORDERS)):
        for saves in (None, each):
            for group_bytes in (1, 4000):
                path, wanted = folder / f"{number}-{saves is None}-{group_bytes}", list[Tensor]()
                if saves is not None or each.mesh.rank == 0:
                    with convolution(saves, saved, 1, group_bytes) as (model, optimizer, values):
                        wanted = values()
                        save_checkpoint(path, model, optimizer, extra={"wanted": wanted})
                each.barrier()
                with convolution(each, loaded, 2, 2000) as (model, optimizer, values):
                    wanted = load_checkpoint(path, model, optimizer)["wanted"]
                    for one, other in zip(values(), wanted, strict=True):
                        assert torch.equal(one, other), (saved, loaded, saves is None, group_bytes)


def fails(each: ps_dist.TorchCollectives, path: Path, odd: int) -> None:
    """A rank's disk is full: all say so, nothing is left, and both the model and the checkpoint are as they were."""
    with running(each) as run:
        run.train(1)
        run.save(path)
        run.train(1)
        values = run.values()
        with pytest.MonkeyPatch.context() as patch:
            if run.rank == odd:
                patch.setattr(os, "write", _full)
            with pytest.raises(TierFailure, match=rf"^rank {odd}: .*No space left on device\)\. What was there"):
                run.save(path, overwrite=True)
        assert run.values() == values  # which all ranks ask for at once
        assert os.listdir(path.parent) == [path.name]
        run.train(1)
        run.load(path)
        assert run.step == 1
        each.barrier()
        run.save(path, overwrite=True)


def _full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuses(each: ps_dist.TorchCollectives, path: Path) -> None:
    """What must be the same on all ranks, and what one of them finds wrong."""
    with running(each) as run:
        run.train(1)
        odd = run.rank == run.ranks - 1
        with pytest.raises(RanksDiverged, match=r"extra\['epoch'\] must be the same on all ranks, found: 3 \(rank 0\)"):
            save_checkpoint(path, run.model, run.optimizer, extra={"epoch": 4 if odd else 3})
        with pytest.raises(RanksDiverged, match=r"tensor 0 of extra and param_groups must be the same on all ranks"):
            save_checkpoint(path, run.model, run.optimizer, extra={"seen": torch.tensor([odd])})
        with pytest.raises(InvalidInput, match=r"^rank 1: extra\['a'\] is a set"):
            save_checkpoint(path, run.model, run.optimizer, extra={"a": {1} if odd else 1})
        lr = run.optimizer.param_groups[0]["lr"]
        run.optimizer.param_groups[0]["lr"] = lr * 2 if odd else lr
        with pytest.raises(RanksDiverged, match=r"what the optimizer's param_groups hold must be the same"):
            run.save(path)
        run.optimizer.param_groups[0]["lr"] = lr
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_folder, "_LOOKS", 2)
            with pytest.raises(InvalidInput, match=r"^rank 1: .*this rank cannot see it: give all ranks the same path"):
                run.save(path.with_name("elsewhere") if odd else path)
        each.barrier()  # rank 0 clears away what it began
        assert not any(path.parent.iterdir())
        each.barrier()
        run.save(path)
        with pytest.raises(InvalidInput, match=r"^rank 0: .*exists already: choose another path"):
            run.save(path)
        each.barrier()
        if run.rank == 0:
            (path / "mine.txt").write_text("")
        with pytest.raises(InvalidInput, match=r"^rank 0: .*what is none of it \('mine.txt'\)"):
            run.save(path, overwrite=True)
        run.save(path.with_name("other"))
        with pytest.raises(RanksDiverged, match="the checkpoint that is loaded must be the same on all ranks"):
            run.load(path.with_name("other") if odd else path)
        run.load(path)


Change = Callable[[Path], object]


def damaged(each: ps_dist.TorchCollectives, folder: Path) -> None:
    """Whatever is wrong with a part, every rank hears which; and nobody trains on what was half loaded."""
    with running(each) as run:
        run.train(1)
        run.save(folder / "a")
        run.train(1)
        run.save(folder / "b")
        values = run.values()
        second = "exp_avg-00002-of-00002.safetensors"
        cases: list[tuple[str, Change, str]] = [
            (second, _flip, "its checksum is .*, so one of these two files is damaged"),
            ("masters-00001-of-00002.safetensors", _flip, "its checksum is .*, so one of these two files is damaged"),
            (second, lambda file: os.truncate(file, file.stat().st_size - 1), "it has .* bytes, expected"),
            (second, Path.unlink, r"it cannot be read \(No such file"),
            (second, lambda file: shutil.copy(folder / "a" / second, file), "it is a part of another save"),
            ("random-00002-of-00002.json", _flip, "its checksum is .*, so one of these"),
            ("buffers-00002-of-00002.safetensors", _flip, "its checksum is .*, so one of these two files is damaged"),
        ]
        for name, change, message in cases:
            file = folder / "b" / name
            before = file.read_bytes()
            each.barrier()
            if run.rank == 0:
                change(file)
            each.barrier()
            with pytest.raises(CheckpointDamaged, match=rf"^rank \d: .*/b/{name}: .*{message}"):
                run.load(folder / "b")
            if "one of these two files" in message:
                with pytest.raises(InvalidInput, match="failed half way"):
                    run.model(torch.zeros(1, 2, dtype=torch.long))
            each.barrier()
            if run.rank == 0:
                file.write_bytes(before)
            each.barrier()
            run.load(folder / "b")
            assert run.values() == values


def _flip(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


def weights(each: ps_dist.TorchCollectives, published: Path, saved: Path) -> None:
    """Published weights, and those of a checkpoint that one process made: each rank takes its part."""
    import safetensors.torch

    wanted = safetensors.torch.load_file(published)
    with running(each, seed=6) as run:
        run.train(1)
        assert load_weights(run.model, published) == ([], [])
        for name, value in run.model.state_dict().items():
            source = wanted["table.weight" if name == "head.weight" else name]
            assert torch.equal(value, source.to(value.dtype)), name
        order = [name for group in run.optimizer.param_groups for name in group["param_names"]]
        for index, value in masters_of(run.optimizer.state_dict(masters=True)).items():
            assert torch.equal(value, wanted[order[index]]), "rounded"
        run.train(1)
        assert load_weights(run.model, saved) == ([], [])
        masters = safetensors.torch.load_file(saved / "masters.safetensors")
        for index, value in masters_of(run.optimizer.state_dict(masters=True)).items():
            assert torch.equal(value, masters[order[index]]), order[index]
        before = run.values()
        with pytest.raises(CheckpointMismatch, match=r"^rank \d: .*'table.weight' and 'head.weight' are one parameter"):
            load_weights(run.model, published.with_name("untied.safetensors"))
        assert run.values() == before
        run.train(1)


def exports(each: ps_dist.TorchCollectives, folder: Path) -> Found:
    """One file of all weights, by rank 0; a full disk there is everybody's error."""
    with running(each, device="checked") as run:
        run.train(1)
        save_weights(folder / "computed.safetensors", run.model)
        save_weights(folder / "masters.safetensors", run.model, masters=True)
        run.save(folder / "a")
        with pytest.MonkeyPatch.context() as patch:
            if run.rank == 0:
                patch.setattr(os, "write", _full)
            with pytest.raises(TierFailure, match=r"^rank 0: .*No space left on device"):
                save_weights(folder / "computed.safetensors", run.model, overwrite=True)
        with pytest.raises(InvalidInput, match=r"^rank 0: .*exists already: choose another name"):
            save_weights(folder / "computed.safetensors", run.model)
        run.train(1)
        run.load(folder / "a")
        return run.values()


LAYERS, WIDE = 6, 1024


def stays_small(each: ps_dist.TorchCollectives, path: Path) -> None:
    """Two chunks (of this rank's shards) are all that saving and loading take besides."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)])
    options = Options(group_bytes=2 * WIDE * WIDE * 2)
    model, optimizer = chunked(model, SGD(lr=0.1, momentum=0.9), collectives=each, options=options)
    for _ in range(2):
        model(torch.ones(1, WIDE)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(path, model, optimizer)
    load_checkpoint(path, model, optimizer)
    shard = 4 * 2 * WIDE * WIDE // each.ranks
    for work in (
        lambda: save_checkpoint(path, model, optimizer, overwrite=True),
        lambda: load_checkpoint(path, model, optimizer),
        lambda: load_weights(model, path),
    ):
        grown = grown_by(work)
        assert grown <= 2 * shard + 2**20, f"{grown:,}"
    release(model)
