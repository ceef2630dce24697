"""A small file is as it was or wholly new, also where writing it fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ps_core._atomic_files import sync_folder, write_text_atomically


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    for text in ("first", "another, longer: \u00e9"):
        write_text_atomically(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["settings.json"]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    write_text_atomically(path, "old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync", refuse) if fails == "fsync" else (Path, "replace", refuse)))
    with pytest.raises(OSError, match="No space left") as raised:
        write_text_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    if fails == "fsync":
        assert raised.value.filename == str(path)


def test_an_error_that_names_a_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        write_text_atomically(tmp_path / "missing" / "settings.json", "text")
    assert raised.value.filename == str(tmp_path / "missing" / ".settings.json.new")


def test_text_and_names_are_on_the_disk_before_the_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, list[str]]] = []
    sync = os.fsync

    def watch(number: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{number}"), sorted(os.listdir(tmp_path))))
        sync(number)

    monkeypatch.setattr(os, "fsync", watch)
    write_text_atomically(tmp_path / "a", "text")
    assert synced == [(str(tmp_path / ".a.new"), [".a.new"]), (str(tmp_path), ["a"])]


def test_a_file_is_no_folder_to_sync(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("text")
    with pytest.raises(NotADirectoryError):
        sync_folder(path)
