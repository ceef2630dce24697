"""A checkpoint whose bytes are not those that were written is never loaded in silence."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from _checkpoints import Run, assert_same
from ps_core import CheckpointDamaged, CheckpointMismatch, InvalidInput, TierFailure
from ps_core.engine import check_checkpoint, load_checkpoint, load_weights, save_checkpoint
from ps_core.engine._checkpoint import writer as _writing
from ps_core.engine._checkpoint.atomic_folder import SUMS
from ps_core.engine._checkpoint.safetensors_format import read_table


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Path, dict[str, Any]]]:
    """A run, its checkpoint of several files a section, and what is in it."""
    path = tmp_path_factory.mktemp("damaged") / "a"
    with pytest.MonkeyPatch.context() as patch, Run("emulated") as run:
        patch.setattr(_writing, "FILE_BYTES", 12_000)
        run.train(1)
        save_checkpoint(path, run.model, run.optimizer, extra={"weights": torch.ones(7)})
        yield run, path, run.values()


def check_damaged(whole: tuple[Run, Path, dict[str, Any]], name: str, change: Any) -> None:
    run, path, values = whole
    file = path / name
    before = file.read_bytes()
    change(file)
    try:
        assert not file.exists() or file.read_bytes() != before, "that is no damage"
        with pytest.raises(
            CheckpointDamaged, match=rf"^{path}/.*; take another checkpoint, or copy (this file|both files) anew"
        ):
            load_checkpoint(path, run.model, run.optimizer)
        after = file.read_bytes() if file.exists() else b""
        if name == SUMS and sums_of_weights(before) == sums_of_weights(after):
            check_weights(run, path)
        elif not name.startswith(NOT_OF_WEIGHTS):
            with Run("cpu", spec=None) as other, pytest.raises(CheckpointDamaged):
                load_weights(other.model, path)
    finally:
        file.write_bytes(before)
    load_checkpoint(path, run.model, run.optimizer)
    assert_same(values, run.values())


NOT_OF_WEIGHTS = ("exp_avg", "extra", "random")


def sums_of_weights(sums: bytes) -> list[bytes]:
    """The lines that `load_weights` relies on."""
    return [line for line in sums.splitlines() if not line.startswith(tuple(map(str.encode, NOT_OF_WEIGHTS)))]


def check_weights(run: Run, path: Path) -> None:
    """Weights are refused, or right."""
    with Run("cpu", spec=None) as other, suppress(CheckpointDamaged):
        load_weights(other.model, path)
        found, right = other.model.state_dict(), run.model.state_dict()
        assert all(torch.equal(found[name], right[name]) for name in right)


FILES = ("masters", "exp_avg", "weights", "buffers", "extra", "manifest", "checksums")


def names(path: Path, start: str) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.name.startswith(start))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_flipped_bytes(whole: tuple[Run, Path, dict[str, Any]], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES).flatmap(lambda start: st.sampled_from(names(whole[1], start))))
    size = (whole[1] / name).stat().st_size
    near = st.integers(0, min(600, size - 1)) | st.integers(0, size - 1)  # tables are at the beginning
    flips = data.draw(st.dictionaries(near, st.integers(1, 255), min_size=1, max_size=4))

    def flip(file: Path) -> None:
        text = bytearray(file.read_bytes())
        for place, bits in flips.items():
            text[place] ^= bits
        file.write_bytes(text)

    check_damaged(whole, name, flip)


@pytest.mark.parametrize("start", FILES[:-1])
def test_a_sum_that_is_not_its_files(whole: tuple[Run, Path, dict[str, Any]], start: str) -> None:
    """Also where `load_weights` does not read the file. One digit is the list's damage, not the file's."""
    run, path, _ = whole

    def change(sums: Path) -> None:
        text = sums.read_text("utf-8")
        place = text.index("\n", text.index(start)) - 1
        sums.write_text(text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :], "utf-8")
        for check in (lambda: check_checkpoint(path), lambda: load_checkpoint(path, run.model, run.optimizer)):
            with pytest.raises(
                CheckpointDamaged, match=rf"^{sums}: it says \w+ for {start}.*, which has .*: one digit"
            ):
                check()

    check_damaged(whole, SUMS, change)


@pytest.mark.parametrize("start", FILES[:-1])
def test_a_file_and_its_sum_that_differ(whole: tuple[Run, Path, dict[str, Any]], start: str) -> None:
    """Neither is blamed: nothing tells which of the two is damaged."""
    run, path, _ = whole

    def change(sums: Path) -> None:
        text = sums.read_text("utf-8")
        place = text.index("\n", text.index(start)) - 8
        sums.write_text(text[:place] + "01234567" + text[place + 8 :], "utf-8")
        with pytest.raises(
            CheckpointDamaged, match=rf"/{start}.*: its checksum is \w+, and {SUMS} says 01234567, so one"
        ):
            load_checkpoint(path, run.model, run.optimizer)

    check_damaged(whole, SUMS, change)


def test_a_list_of_what_are_no_checksums(whole: tuple[Run, Path, dict[str, Any]]) -> None:
    run, path, _ = whole

    def change(sums: Path) -> None:
        text = sums.read_text("utf-8").rstrip("\n")
        sums.write_text(text[:-1] + "G\n", "utf-8")
        with pytest.raises(CheckpointDamaged, match=rf"^{sums}: it is not a list of checksums and files"):
            load_checkpoint(path, run.model, run.optimizer)

    check_damaged(whole, SUMS, change)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_files_cut_short_or_grown(whole: tuple[Run, Path, dict[str, Any]], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES).flatmap(lambda start: st.sampled_from(names(whole[1], start))))
    size = (whole[1] / name).stat().st_size
    new = data.draw(st.integers(0, size + 5000).filter(lambda each: each != size))
    check_damaged(whole, name, lambda file: os.truncate(file, new))


@pytest.mark.parametrize("start", FILES)
def test_files_that_are_gone(whole: tuple[Run, Path, dict[str, Any]], start: str) -> None:
    check_damaged(whole, names(whole[1], start)[0], Path.unlink)


def test_files_exchanged(whole: tuple[Run, Path, dict[str, Any]]) -> None:
    """Each sound, of the same size and table, but another's."""
    check_damaged(
        whole, "exp_avg-00001-of-00005.safetensors", lambda file: shutil.copy(str(file).replace("avg", "avg_sq"), file)
    )


def test_what_was_half_loaded_is_not_trained(whole: tuple[Run, Path, dict[str, Any]]) -> None:
    run, path, values = whole
    file = path / names(path, "exp_avg_sq")[-1]
    before = file.read_bytes()
    run.train(1)
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        with pytest.raises(CheckpointDamaged, match="its checksum is"):
            load_checkpoint(path, run.model, run.optimizer)
    finally:
        file.write_bytes(before)
    message = (
        r"load_checkpoint\(.*\) failed half way, so that parameters are a mixture of old and new: load a sound one"
    )
    for attempt in (
        lambda: run.train(1),
        lambda: save_checkpoint(path, run.model, run.optimizer, overwrite=True),
        lambda: load_weights(run.model, path),
    ):
        with pytest.raises(InvalidInput, match=message):
            attempt()
    load_checkpoint(path, run.model, run.optimizer)
    assert_same(values, run.values())
    run.train(1)


def test_a_newer_format_is_not_damage(whole: tuple[Run, Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    from ps_core.engine._checkpoint import manifest as _checkpoint_manifest

    run, path, _ = whole
    monkeypatch.setattr(_checkpoint_manifest, "READABLE", (0, 3))
    with pytest.raises(CheckpointMismatch, match=r"of version 2, expected .* of version 0 or 3: .*\(ps-core"):
        load_checkpoint(path, run.model, run.optimizer)


# Disks that fail.


@pytest.mark.parametrize("failing", ["write", "fsync", "rename", "mkdir"])
def test_a_disk_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Run("cpu") as run:
        save_checkpoint(tmp_path / "a", run.model, run.optimizer, extra={"number": 1})
        run.train(1)
        values = run.values()
        with monkeypatch.context() as patch:
            patch.setattr(os, failing, fail)
            with pytest.raises(TierFailure, match=r"No space left on device\)\. What was there before is as it was"):
                save_checkpoint(tmp_path / "a", run.model, run.optimizer, overwrite=True)
        assert_same(values, run.values())
        assert [each.name for each in tmp_path.iterdir() if "ready" not in each.name] == ["a"]
        run.train(1)
        number = load_checkpoint(tmp_path / "a", run.model, run.optimizer).get("number")
        assert number == 1
        assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["masters", "manifest"])
def test_files_that_cannot_be_read(
    whole: tuple[Run, Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, path, _ = whole

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if name == "masters":
        monkeypatch.setattr(os, "preadv", fail)
    else:
        monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(CheckpointDamaged, match=r"it cannot be read \(Input/output error\)"):
        load_checkpoint(path, run.model, run.optimizer)
    monkeypatch.undo()
    load_checkpoint(path, run.model, run.optimizer)


@pytest.mark.parametrize("when", ["asked", "used"])
def test_file_systems_without_direct_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Some refuse the flag, some the transfer."""
    control, refused = fcntl.fcntl, []

    def refuse(file: int, *_: Any) -> None:
        if when == "used" and control(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(file)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def set_flags(file: int, command: int, flags: int = 0) -> int:
        if when == "asked" and flags & os.O_DIRECT:
            refused.append(file)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(file, command, flags)

    write, read = os.write, os.preadv
    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    monkeypatch.setattr(os, "write", lambda *given: refuse(*given) or write(*given))
    monkeypatch.setattr(os, "preadv", lambda *given: refuse(*given) or read(*given))
    with Run("cpu") as run:
        run.train(1)
        values = run.values()
        save_checkpoint(tmp_path / "a", run.model, run.optimizer)
        saved = len(refused)
        run.train(1)
        load_checkpoint(tmp_path / "a", run.model, run.optimizer)
        assert_same(values, run.values())
        assert len(refused) > saved > 0, "there was nothing to refuse"


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with Run("cpu") as run:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", interrupt)
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tmp_path / "a", run.model, run.optimizer)
        assert list(tmp_path.iterdir()) == []
        save_checkpoint(tmp_path / "a", run.model, run.optimizer)
        run.train(1)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_tables_without_a_checksum(whole: tuple[Run, Path, dict[str, Any]], data: st.DataObject) -> None:
    """What others wrote: a table is as the format wants it, or an error; and never anything else."""
    path = whole[1] / names(whole[1], "masters")[0]
    text = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(text[:8], "little")
    changes = data.draw(st.dictionaries(st.integers(0, length - 1), st.integers(0, 255), max_size=5))
    for place, value in changes.items():
        text[place] = value
    kept = data.draw(st.integers(0, len(text)) | st.just(len(text)))
    broken = whole[1].parent / "broken.safetensors"
    broken.write_bytes(text[:kept])
    try:
        start, entries = read_table(broken)
    except CheckpointDamaged:
        return
    assert start + sum(entry.nbytes for entry in entries) == kept
