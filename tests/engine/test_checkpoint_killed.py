"""Whenever a process that saves is killed, the checkpoint before it, or the new one, is there and whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from _checkpoints import Run
from ps_core.engine import load_checkpoint, save_checkpoint
from ps_core.engine._checkpoint.atomic_folder import AtomicFolder

Found = list[list[int | None]]
"""Of each death, the number that was being saved, and the number that was there afterwards."""


@pytest.fixture(scope="module")
def deaths() -> Iterator[tuple[Found, Found, Found]]:
    """Three series of deaths, in memory where that is a file system: nothing here asks what a power cut would leave."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("_saver.py")), folder, "1"],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        every, random, clearing = json.loads(done.stdout)
        yield every, random, clearing


def test_after_every_call_of_the_system(deaths: tuple[Found, Found, Found]) -> None:
    first = [there for number, there in deaths[0] if number == 1]
    second = [there for number, there in deaths[0] if number == 2]
    for found, before, after in ((first, None, 1), (second, 1, 2)):
        assert len(found) > 30, "a save makes more calls than that"
        turn = found.index(after)
        assert 0 < turn < len(found) - 1
        assert found == [before] * turn + [after] * (len(found) - turn)


def test_at_20_random_instants(deaths: tuple[Found, Found, Found]) -> None:
    there: int | None = 3
    for number, found in deaths[1]:
        assert found in (there, number)
        there = found
    assert len(deaths[1]) == 20


def test_while_clearing_up(deaths: tuple[Found, Found, Found]) -> None:
    there: int | None = 100
    for number, found in deaths[2]:
        assert found in (there, number)
        there = found
    assert {found for _, found in deaths[2]} > {100, there}


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises `KeyboardInterrupt`, as in the foreground: what a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("call", range(1, 5))
def test_ctrl_c_while_folders_change_places_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The new checkpoint is complete then: it gets its name, the old one is removed, and the interrupt comes after."""
    with Run("cpu") as run:
        save_checkpoint(tmp_path / "a", run.model, run.optimizer, extra={"number": 1})
        calls = 0

        def interrupts(function: Callable[..., None]) -> Callable[..., None]:
            def call_it(*arguments: Any, **more: Any) -> None:
                nonlocal calls
                calls += 1
                if calls == call:
                    signal.raise_signal(signal.SIGINT)
                function(*arguments, **more)

            return call_it

        monkeypatch.setattr(os, "rename", interrupts(os.rename))
        monkeypatch.setattr(shutil, "rmtree", interrupts(shutil.rmtree))
        monkeypatch.setattr(AtomicFolder, "recover", lambda _: None)  # which removes folders, too
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path / "a", run.model, run.optimizer, extra={"number": 2}, overwrite=True)
        monkeypatch.undo()
        assert [each.name for each in tmp_path.iterdir()] == ["a"]
        assert load_checkpoint(tmp_path / "a", run.model, run.optimizer) == {"number": 2}
