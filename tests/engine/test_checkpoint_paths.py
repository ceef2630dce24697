"""Paths that no file can have: of a checkpoint, or of a file of weights."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from _checkpoints import Run
from ps_core import InvalidInput, TierFailure, cli
from ps_core.engine import (
    check_checkpoint,
    export_checkpoint,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    save_weights,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Path]]:
    """A run, and a folder with its checkpoint and links that lead nowhere."""
    path = tmp_path_factory.mktemp("paths")
    (path / "loop").symlink_to("loop")
    (path / "one").symlink_to("two")
    (path / "two").symlink_to("one")
    with Run("cpu") as run:
        run.train(1)
        save_checkpoint(path / "saved", run.model, run.optimizer)
        yield run, path


LONG = "n" * 300
PATHS: dict[str, Callable[[Path], Any]] = {
    "a link to itself": lambda place: place / "loop",
    "below a link to itself": lambda place: str(place / "loop" / "a"),
    "two links": lambda place: place / "one" / "a",
    "a long name": lambda place: place / LONG,
    "below a long name": lambda place: place / LONG / "a",
    "a long path": lambda place: place / Path(*["n" * 200] * 30),
    "no character": lambda place: f"{place}/a\0b",
    "half a character": lambda place: f"{place}/\ud800",
    "bytes": lambda place: os.fsencode(place / "a"),
    "None": lambda place: None,
    "a number": lambda place: 5,
}


@pytest.mark.parametrize("kind", PATHS)
def test_paths_that_no_file_can_have_are_named(place: tuple[Run, Path], kind: str) -> None:
    run, folder = place
    path = PATHS[kind](folder)
    before = sorted(folder.rglob("*"))
    for call in (
        lambda: save_checkpoint(path, run.model, run.optimizer),
        lambda: save_checkpoint(path, run.model, run.optimizer, overwrite=True),
        lambda: load_checkpoint(path, run.model, run.optimizer),
        lambda: load_weights(run.model, path),
        lambda: check_checkpoint(path),
        lambda: save_weights(path, run.model, overwrite=True),
        lambda: export_checkpoint(path, folder / "new.safetensors"),
        lambda: export_checkpoint(folder / "saved", path, overwrite=True),
    ):
        with pytest.raises(InvalidInput) as caught:
            call()
        assert str(caught.value).startswith(f"{str(path)!r} cannot be the path of a checkpoint or a file of weights: ")
    assert sorted(folder.rglob("*")) == before
    run.train(1)


@pytest.mark.parametrize("name", ["loop", LONG])
def test_the_export_command_names_paths_that_no_file_can_have(
    place: tuple[Run, Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place[1]
    assert cli.main(["export", str(path / name), str(path / "new.safetensors")]) == cli.BAD_INPUT
    assert cli.main(["export", str(path / "saved"), str(path / name)]) == cli.BAD_INPUT
    assert capsys.readouterr().err.count(f"{str(path / name)!r} cannot be the path") == 2


def test_a_name_that_leaves_no_room_for_those_of_a_save(place: tuple[Run, Path]) -> None:
    """The folders of an unfinished save have longer names. A checkpoint with such a name can be read."""
    run, folder = place
    path = folder / ("n" * 250)
    with pytest.raises(TierFailure, match=r"could not be written \(File name too long\)"):
        save_checkpoint(path, run.model, run.optimizer)
    with pytest.raises(InvalidInput, match="there is no checkpoint at"):
        load_checkpoint(path, run.model, run.optimizer)
    (folder / "saved").rename(path)
    try:
        load_checkpoint(path, run.model, run.optimizer)
        load_weights(run.model, path)
        export_checkpoint(path, folder / "new.safetensors")
    finally:
        path.rename(folder / "saved")


def test_the_root_is_no_file_of_weights(place: tuple[Run, Path]) -> None:
    with pytest.raises(InvalidInput, match="/ is a folder: name a file, as in /model"):
        save_weights("/", place[0].model)


def test_a_folder_above_checkpoints_is_answered_with_the_newest(place: tuple[Run, Path], tmp_path: Path) -> None:
    """As the folder of a training, which has its checkpoints in a folder of it."""
    run, above = place[0], tmp_path / "run"
    for when, name in enumerate(("step-2", "step-10", "step-9")):
        save_checkpoint(above / "checkpoints" / name, run.model, run.optimizer)
        os.utime(above / "checkpoints" / name / "manifest.json", (when, when))
    (above / "checkpoints" / ".step-11.ps-partial").mkdir()
    (above / "checkpoints" / ".step-11.ps-partial" / "manifest.json").write_text('{"format": "ps-core checkpoint"')
    (above / "step-12").mkdir()
    (above / "step-12" / "manifest.json").write_text("{}")
    named = re.escape(f"; the newest checkpoint below it is {above / 'checkpoints' / 'step-9'}")
    for use in (load_checkpoint, check_checkpoint, load_weights):
        arguments: Any = (run.model, above) if use is load_weights else (above,)
        more: Any = (run.model, run.optimizer) if use is load_checkpoint else ()
        with pytest.raises(InvalidInput, match=named):
            use(*arguments, *more)
    with pytest.raises(InvalidInput, match=named):
        export_checkpoint(above, tmp_path / "new.safetensors")
