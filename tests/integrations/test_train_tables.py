"""``pstar-train --data`` reads what the real package datasets writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets", reason="datasets is not installed")
pyarrow: Any = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

from ps_core import InvalidInput
from ps_models.train import TrainOptions
from ps_models.train._data import corpus

pytestmark = pytest.mark.filterwarnings("ignore")  # of the package's own dependencies
PAIRS = [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(30)]


def written(folder: Path, ending: str, rows: list[dict[str, Any]]) -> Path:
    """A table, as the package datasets, too, writes it."""
    table, path = pyarrow.Table.from_pylist(rows), folder / f"a{ending}"
    if ending == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return path
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_table_is_read_as_the_same_json_lines(ending: str, tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in PAIRS), "utf-8")
    found = [corpus(TrainOptions(data=(str(path),), seq=8)) for path in (lines, written(tmp_path, ending, PAIRS))]
    assert found[0].digest == found[1].digest
    assert found[0].samples is not None
    assert len(found[0].samples[0]) > 20


def test_a_row_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    rows = [{"text": "words", "answer": ""}, {"text": None, "answer": "b"}]
    with pytest.raises(
        InvalidInput, match=r"--data: row 2 of .*a\.parquet' is a row with 'text', 'answer'; allowed is"
    ):
        corpus(TrainOptions(data=(str(written(tmp_path, ".parquet", rows)),)))


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"words")
    with pytest.raises(InvalidInput, match=r"--data: cannot read .*a\.parquet'.*allowed is a table that the package"):
        corpus(TrainOptions(data=(str(tmp_path / "a.parquet"),)))
