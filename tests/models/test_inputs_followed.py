"""Every `InvalidInput` of ps-models that names what to do: it is provoked, followed, and that works.

The cases are in the modules that are imported here; the last test reads the sources.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import _inputs_library  # noqa: F401 - has cases
import _inputs_train  # noqa: F401 - has cases
import ps_models
from _inputs_of_train import TABLE, prepare

TESTS = Path(__file__).resolve().parents[1]
ELSEWHERE = {"train/_ranks.py:check": "models/test_train_ranks.py"}
"""Where several processes are needed: the test that follows it."""
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries' own dependencies


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("files") / "files"
    base.mkdir()
    prepare(base)
    return base


@pytest.mark.parametrize("part", TABLE.cases)
def test_what_an_error_says_works(part: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "here"
    shutil.copytree(files, place)
    monkeypatch.chdir(place)
    TABLE.cases[part]()


def test_every_error_has_a_case() -> None:
    TABLE.check(Path(ps_models.__file__).parent, elsewhere=ELSEWHERE)
    assert all((TESTS / path).is_file() for path in ELSEWHERE.values())
