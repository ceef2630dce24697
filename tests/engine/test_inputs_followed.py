"""Every `InvalidInput` of the engine that names what to do: it is provoked, followed, and that works.

The cases are in the modules that are imported here; the last test reads the sources. `test_remedies_followed.py` and
`test_does_not_fit.py` do the same for the other errors.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import _inputs_models  # noqa: F401 - has cases
import _inputs_optimizers  # noqa: F401 - has cases
import _inputs_saving  # noqa: F401 - has cases
import ps_core.engine
from _inputs import TABLE

TESTS = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "_devices/disk/file.py:check_process": "engine/test_disk_fork.py",
    "_devices/host_worker.py:check_process": "engine/test_host_worker.py",
    "_memory/tier_store.py:check_process": "dist/_share_cases.py",
    "_execution/pass_threads.py:_two_threads": "engine/test_two_threads.py",
    "_checkpoint/atomic_folder.py:find": "dist/_checkpoint_cases.py",
    "_sharding/join_ranks.py:_check_cards": "dist/test_transport_choice.py",
    "_devices/cuda/device.py:wait": "engine/test_cuda.py",
    "_devices/host_pool.py:_arena": "engine/test_cuda.py",
}
"""Where several processes, threads or cards are needed: the test that follows it."""


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("part", TABLE.cases)
def test_what_an_error_says_works(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    TABLE.cases[part]()


def test_every_error_has_a_case() -> None:
    TABLE.check(Path(ps_core.engine.__file__).parent, others=("refuse", "_refusal"), elsewhere=ELSEWHERE)
    assert all((TESTS / path).is_file() for path in ELSEWHERE.values())
