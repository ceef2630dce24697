"""All weights in one file: from a model under management, and from a checkpoint without one."""

from __future__ import annotations

import os
import re
import stat
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from _checkpoints import TIERS, Net, Run, assert_same
from _states import masters_of
from ps_core import CheckpointDamaged, InvalidInput, cli
from ps_core.engine import check_checkpoint, export_checkpoint, load_weights, save_checkpoint, save_weights
from ps_core.engine._checkpoint import writer as _writing


def weights_of(run: Run, *, masters: bool) -> dict[str, torch.Tensor]:
    """Of each tensor one name, as a plain file of them would have it."""
    found = {name: value.clone() for name, value in run.model.state_dict().items() if name != "head.weight"}
    if masters:
        kept = masters_of(run.optimizer.state_dict(masters=True))
        names = [name for group in run.optimizer.param_groups for name in group["param_names"]]
        found |= {names[index]: value for index, value in kept.items()}
    return found


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("tiers", TIERS)
def test_one_file_of_a_model_or_of_its_checkpoint(
    tmp_path: Path, tiers: str, masters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_writing, "FILE_BYTES", 12_000)
    with Run(tiers) as run:
        run.train(1)
        wanted = weights_of(run, masters=masters)
        save_weights(tmp_path / "new" / "a.safetensors", run.model, masters=masters)
        save_checkpoint(tmp_path / "saved", run.model, run.optimizer)
    export_checkpoint(tmp_path / "saved", tmp_path / "b.safetensors", masters=masters)
    for file in (tmp_path / "new" / "a.safetensors", tmp_path / "b.safetensors"):
        found = safetensors.torch.load_file(file)
        assert found.keys() == wanted.keys()
        assert_same(wanted, {name: found[name] for name in wanted})
    with Run("cpu", seed=6) as run:
        assert load_weights(run.model, tmp_path / "b.safetensors") == ([], [])
        assert_same(wanted, weights_of(run, masters=masters))
    assert sorted(each.name for each in tmp_path.rglob("*.safetensors") if each.parent.name != "saved") == [
        "a.safetensors",
        "b.safetensors",
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run("cpu") as run:
        run.train(1)
        save_checkpoint(tmp_path / "saved", run.model, run.optimizer)
        wanted = weights_of(run, masters=True)
    file = tmp_path / "model.safetensors"
    assert cli.main(["export", str(tmp_path / "saved"), str(file), "--masters"]) == 0
    assert capsys.readouterr().out == f"{file}: {file.stat().st_size:,} bytes\n"
    found = safetensors.torch.load_file(file)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    assert cli.main(["export", str(tmp_path / "saved"), str(file)]) == cli.BAD_INPUT
    assert "exists already: choose another name, or give overwrite=True" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "saved"), str(file), "--overwrite"]) == 0
    assert safetensors.torch.load_file(file)["table.weight"].dtype is torch.bfloat16
    assert cli.main(["export", str(tmp_path / "nowhere"), str(file), "--overwrite"]) == cli.BAD_INPUT


def test_two_that_save_to_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused; it would take the first one's place half-written."""
    file, real = tmp_path / "a.safetensors", os.fsync
    with Run("cpu") as run:
        save_checkpoint(tmp_path / "saved", run.model, run.optimizer)

        def meanwhile(descriptor: int) -> None:
            monkeypatch.setattr(os, "fsync", real)
            with pytest.raises(InvalidInput, match=r"a\.safetensors is being saved to by another process: wait for it"):
                export_checkpoint(tmp_path / "saved", file, masters=True)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", meanwhile)
        save_weights(file, run.model)
        wanted = run.model.state_dict()
    found = safetensors.torch.load_file(file)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.safetensors", "saved"]


def test_what_a_killed_save_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".a.safetensors.ps-partial").mkdir()
    (tmp_path / ".a.safetensors.ps-partial" / "a.safetensors").write_text("half")
    (tmp_path / ".b.safetensors.ps-partial").write_text("half, of an older version")
    with Run("cpu") as run:
        save_weights(tmp_path / "a.safetensors", run.model)
        save_weights(tmp_path / "b.safetensors", run.model)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_damage_and_places_that_cannot_be(tmp_path: Path) -> None:
    with Run("cpu") as run:
        save_checkpoint(tmp_path / "saved", run.model, run.optimizer)
        with pytest.raises(InvalidInput, match=r"is a folder: name a file, as in .*saved/model.safetensors"):
            save_weights(tmp_path / "saved", run.model)
        with pytest.raises(InvalidInput, match="not under management"):
            save_weights(tmp_path / "a.safetensors", Net())
        run.model(run.batch()).backward()
        with pytest.raises(InvalidInput, match=r"gradients .* wait for a step, and cannot be saved"):
            save_weights(tmp_path / "a.safetensors", run.model)
    file = tmp_path / "saved" / "masters.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    (tmp_path / "a.safetensors").write_text("precious")
    with pytest.raises(
        CheckpointDamaged, match=r"masters.safetensors: its checksum is .*, so one of these two files is damaged"
    ):
        export_checkpoint(tmp_path / "saved", tmp_path / "a.safetensors", overwrite=True)
    assert (tmp_path / "a.safetensors").read_text() == "precious"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.safetensors", "saved"]


def test_what_is_exported_into_a_checkpoint_is_not_lost(tmp_path: Path) -> None:
    """Also by a name that a file of a checkpoint may have."""
    saved = tmp_path / "saved"
    with Run("cpu") as run:
        save_checkpoint(saved, run.model, run.optimizer)
        export_checkpoint(saved, saved / "momentum_buffer.safetensors")
        with pytest.raises(InvalidInput, match=r"what is none of it \('momentum_buffer.safetensors'\)"):
            save_checkpoint(saved, run.model, run.optimizer, overwrite=True)
    assert safetensors.torch.load_file(saved / "momentum_buffer.safetensors")


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with Run("cpu") as run:
        save_checkpoint(tmp_path / "saved", run.model, run.optimizer)
        for write in (
            partial(save_weights, tmp_path / "pipe", run.model),
            partial(export_checkpoint, tmp_path / "saved", tmp_path / "pipe"),
        ):
            with pytest.raises(InvalidInput, match="pipe is a device, a pipe or a socket, which a file would replace"):
                write(overwrite=True)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_permissions_are_kept_where_files_are_overwritten(tmp_path: Path) -> None:
    """A folder or file that only its owner can read is still private when it is overwritten."""
    saved, file = tmp_path / "saved", tmp_path / "model.safetensors"
    with Run("cpu") as run:
        save_checkpoint(saved, run.model, run.optimizer)
        save_weights(file, run.model)
        for folder_mode, file_mode in ((0o700, 0o600), (0o2775, 0o664)):
            saved.chmod(folder_mode)
            file.chmod(file_mode)
            save_checkpoint(saved, run.model, run.optimizer, overwrite=True)
            assert stat.S_IMODE(saved.stat().st_mode) == folder_mode
            for write in (partial(save_weights, file, run.model), partial(export_checkpoint, saved, file)):
                write(overwrite=True)
                assert stat.S_IMODE(file.stat().st_mode) == file_mode


@pytest.mark.parametrize("how", ["itself", "relative", "symlink", "hard link", "kept elsewhere"])
@pytest.mark.parametrize("name", ["masters.safetensors", "manifest.json", "checksums.sfv"])
def test_a_file_of_the_checkpoint_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, name: str
) -> None:
    saved, target = tmp_path / "saved", tmp_path / "a.safetensors"
    with Run("cpu") as run:
        save_checkpoint(saved, run.model, run.optimizer)
        if how == "itself":
            target = saved / name
        elif how == "relative":
            monkeypatch.chdir(tmp_path)
            target = Path("saved") / ".." / "saved" / name
        elif how == "symlink":
            target.symlink_to(saved / name)
        elif how == "hard link":
            target.hardlink_to(saved / name)
        else:
            (saved / name).rename(target)
            (saved / name).symlink_to(target)
        before = sorted(tmp_path.rglob("*"))
        said = (
            rf"{re.escape(str(target))} is '{name}' of the checkpoint .*saved, which would be lost: name another file"
        )
        for overwrite in (True, False):
            with pytest.raises(InvalidInput, match=said):
                export_checkpoint(saved, target, overwrite=overwrite)
        if how not in ("hard link", "kept elsewhere"):  # these are other files, as far as their names tell
            with pytest.raises(
                InvalidInput, match=rf"{name} is '{name}' of the checkpoint .*saved, which would be lost"
            ):
                save_weights(target, run.model, overwrite=True)
    check_checkpoint(saved)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_of_a_damaged_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with Run("cpu") as run:
        save_checkpoint(saved, run.model, run.optimizer)
        (saved / "checksums.sfv").write_bytes(b"\xff")
        with pytest.raises(InvalidInput, match=r"is 'manifest.json' of the checkpoint"):
            save_weights(saved / "manifest.json", run.model, overwrite=True)
        save_weights(saved / "more.safetensors", run.model)
        save_weights(saved / "more.safetensors", run.model, overwrite=True)
