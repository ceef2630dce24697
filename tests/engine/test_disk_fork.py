"""A forked copy of the process has the model but not its disk tier: refused at once, and the file is left alone."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import _models as models
from _cases import finish, next_token, tokens
from _reference import SEED
from ps_core import AdamW, InvalidInput
from ps_core.engine import chunked, release
from test_disk_cut import DEVICES, STEPS, language, made, step, weights

REFUSED = "InvalidInput: this is process {child}, a copy (fork) of process {parent}, whose model has a disk tier"
PATIENCE_S = 100
"""So long a child may take before it counts as hanging."""


def in_child(work: Callable[[], object]) -> str:
    """What becomes of this work in a forked copy of the process, with the copy's number in place of ``child``."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            told = "done"
            try:
                work()
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
            os.write(writer, told.replace(str(os.getpid()), "{child}").encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        if not select.select([reader], [], [], PATIENCE_S)[0]:
            os.kill(child, signal.SIGKILL)
            return "it hangs"
        return os.read(reader, 10_000).decode()
    finally:
        os.close(reader)
        os.waitpid(child, 0)


USES: dict[str, Callable[[Any, Any], object]] = {
    "forward": lambda model, _: model(torch.zeros(1, 4, dtype=torch.long)),
    "read a parameter": lambda model, _: model.head.weight.sum(),
    "step": lambda model, optimizer: step(model, optimizer, 0),
    "optimizer.step": lambda _, optimizer: optimizer.step(),
    "state_dict": lambda model, _: model.state_dict(),
    "optimizer.state_dict": lambda _, optimizer: optimizer.state_dict(masters=True),
    "load_state_dict": lambda model, _: model.load_state_dict(dict.fromkeys(model.state_dict())),
    "release": lambda model, _: release(model),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("where", ["cpu", "emulated, host thread"])
def test_a_copy_that_uses_the_model_is_refused(where: str, use: str, tmp_path: Path) -> None:
    with language(where, tmp_path) as (model, optimizer):
        step(model, optimizer, 0)
        told = in_child(lambda: USES[use](model, optimizer))
        assert told.startswith(REFUSED.format(child="{child}", parent=os.getpid())), told
        assert 'get_context("spawn")' in told


@pytest.mark.parametrize("where", DEVICES)
def test_a_copy_that_drops_the_model_leaves_it_alone(where: str, tmp_path: Path) -> None:
    """Between steps, and with a backward pass to come, when reads and writes may be under way."""
    with language(where, tmp_path) as (model, optimizer):
        right = [step(model, optimizer, index) for index in range(STEPS)]
        expected = weights(model)
    kept = list(made(where, tmp_path))

    def drop() -> None:
        gone = weakref.ref(kept[0])
        kept.clear()
        gc.collect()
        assert gone() is None

    for index in range(STEPS):
        assert in_child(drop) == "done"
        loss = next_token(kept[0], *tokens(index))
        if index == STEPS - 1:
            assert in_child(lambda: (kept.clear(), gc.collect())) == "done"
        loss.backward()
        finish(kept[1])
        assert torch.equal(loss.detach(), right[index])
        del loss
    assert all(torch.equal(value, expected[name]) for name, value in weights(kept[0]).items())
    release(kept[0])


class Rows(Dataset[Tensor]):
    """Holds on to the model, as a dataset that was made from a trainer does; it uses the model if told to."""

    def __init__(self, model: Any, *, use: bool) -> None:
        self.model, self.use = model, use

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        if self.use:
            self.model.head.weight.sum()
        return tokens(index)[0][0]


@pytest.mark.parametrize("where", DEVICES)
def test_workers_of_a_data_loader(where: str, tmp_path: Path) -> None:
    with language(where, tmp_path) as (model, optimizer):
        right = [step(model, optimizer, index) for index in range(2)]
    with language(where, tmp_path) as (model, optimizer):
        for index in range(2):
            rows = Rows(model, use=False)
            found = list(DataLoader(rows, num_workers=2, multiprocessing_context="fork", timeout=PATIENCE_S))
            assert torch.equal(found[1][0], tokens(1)[0][0])
            assert torch.equal(step(model, optimizer, index), right[index])
        asked = DataLoader(Rows(model, use=True), num_workers=1, multiprocessing_context="fork", timeout=PATIENCE_S)
        with pytest.raises(InvalidInput, match=r"a copy \(fork\) of process"):
            list(asked)


PROGRAM = """
import os, sys
from pathlib import Path
import torch
from test_disk_cut import STEPS, made, step
from ps_core.engine import release

model, optimizer = made(sys.argv[1], Path(sys.argv[2]))
step(model, optimizer, 0)
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    step(model, optimizer, 1)
    print("went on")
"""


@pytest.mark.parametrize("where", ["cpu", "emulated, host thread"])
def test_a_copy_ends_as_any_process(where: str, tmp_path: Path) -> None:
    """With all that Python does at exit, in the copy first and then in the process itself."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, where, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["went", "on"]


def test_without_a_disk_tier_a_copy_has_a_model_of_its_own() -> None:
    torch.manual_seed(SEED)
    model, optimizer = chunked(models.Language(), AdamW(lr=1e-2), device="cpu", precision="bf16")
    loss = step(model, optimizer, 0)
    expected = weights(model)

    def read() -> None:
        assert all(torch.equal(value, expected[name]) for name, value in weights(model).items())

    assert in_child(read) == "done"
    assert bool(loss.isfinite())
    release(model)
