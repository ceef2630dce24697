"""``pstar export``, with an engine that notes what it was asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ps_core import cli


def test_what_the_engine_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def export_checkpoint(checkpoint: str, file: str, *, masters: bool, overwrite: bool) -> None:
        asked.append((checkpoint, file, masters, overwrite))
        Path(file).write_bytes(bytes(1234))

    engine = ModuleType("ps_core.engine")
    engine.export_checkpoint = export_checkpoint  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ps_core.engine", engine)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    file = str(tmp_path / "weights.safetensors")
    assert cli.main(["export", "saved", file]) == 0
    assert cli.main(["export", "saved", file, "--masters", "--overwrite"]) == 0
    assert asked == [("saved", file, False, False), ("saved", file, True, True)]
    assert capsys.readouterr().out == f"{file}: 1,234 bytes\n" * 2


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ((), "pstar export needs torch: pip install torch\n"),
        (("torch",), "needs ps_kernels: in the folder of the clone, pip install packages/ps-kernels\n"),
    ],
)
def test_without_what_it_needs(
    there: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    assert cli.main(["export", "saved", "weights.safetensors"]) == cli.BAD_INPUT
    assert capsys.readouterr().err.endswith(words)
