"""A rank is killed, raises, leaves, stops or never comes: the others end, and say which it was and of what.

The timeout is ten minutes where they are to end at once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from socket import gethostname
from typing import NamedTuple

import pytest

PROGRAM = Path(__file__).parent / "programs" / "fates.py"
KILLED, FAILED, EXITED, FINE = -9, 1, 3, 0
GONE = rf"rank {{}} on {re.escape(gethostname())}(, which keeps the store,)? ended or cannot be reached"
SILENT = rf"rank {{}} on {re.escape(gethostname())}(, which keeps the store,)? has not answered for \d+ s$"
ABSENT = r"rank {}\b.* (did not join within|ended or cannot be reached|has not answered for) "
RAISED = rf"rank {{}} on {re.escape(gethostname())} raised ValueError: no such token: 7"
WAYS = (
    ("killed_computing:3:0", KILLED, GONE),
    ("killed_sending:2:1", KILLED, GONE),
    ("killed_waiting:3:1", KILLED, GONE),
    ("killed_connecting:3:1", KILLED, GONE),
    ("killed_beside:3:2", KILLED, GONE),
    (
        "killed_beside_its_child:3:0",
        KILLED,
        GONE + r"; rank 0 on .*, which keeps the store, has not answered for [2-9] s$",
    ),
    ("killed_forming:3:1", KILLED, GONE),
    ("stopped:3:1", KILLED, SILENT),
    ("stopped:3:0", KILLED, SILENT),
    ("stopped_forming:3:1", KILLED, SILENT),
    ("raised:2:0", FAILED, RAISED),
    ("raised:3:1", FAILED, RAISED),
    ("raised_in_block:2:1", FAILED, RAISED),
    ("raised_and_closed:2:0", FAILED, RAISED),
    ("exited:2:1", EXITED, rf"rank {{}} on {re.escape(gethostname())} left the group"),
)
"""Case, ranks and the one that is lost; how that one ends; what the others say."""
NEVER_JOINED = (
    *(f"{how}:3:{rank}" for how in ("killed_importing", "killed_meeting", "stopped_meeting") for rank in (0, 1)),
    *("killed_forming:3:0", "stopped_forming:3:0"),  # the others may have met by then, or not yet
)
AWAY = ("held_gil:3:0", "held_gil:3:1", "stopped_and_continued:3:1", "stopped_and_continued:3:0")
UNLIKE = {
    "ps-core": "ps-core",
    "ps-dist": "ps-dist",
    "torch": "torch",
    "byte-order": "the byte order",
    "replicate": "replicate",
    "transport": "transport",
}


class End(NamedTuple):
    """Of one process."""

    status: int
    output: str

    @property
    def error(self) -> str:
        """The last line that names one."""
        return next(line for line in reversed(self.output.splitlines()) if "Error: " in line or "Diverged: " in line)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[End]]:
    """How every process of every case ended, by case and rank; all run at once."""
    folder = tmp_path_factory.mktemp("fates")
    unlike = [f"unlike-{fact}:2:1" for fact in UNLIKE]
    ways = [name for name, _, _ in WAYS]
    names = [*AWAY, *NEVER_JOINED, *ways, *unlike, "caught:2:1", "raised_late:2:0", "disk_failed:2:1", "released:2:1"]
    done = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM, folder, *names],
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    statuses = {(name, rank): status for name, rank, status in json.loads(done.stdout)}
    return {
        name: [
            End(statuses[name, rank], (folder / f"{name.replace(':', '-')}-{rank}.txt").read_text("utf-8"))
            for rank in range(int(name.split(":")[1]))
        ]
        for name in names
    }


@pytest.mark.parametrize(("name", "status", "message"), WAYS, ids=[name for name, _, _ in WAYS])
def test_the_others_end_and_say_why(name: str, status: int, message: str, ends: dict[str, list[End]]) -> None:
    _, ranks, lost = (int(word) if word.isdigit() else 0 for word in name.split(":"))
    for rank, end in enumerate(ends[name]):
        if rank == lost:
            assert end.status == status, end.output
            continue
        assert end.status == FAILED, end.output
        assert f"RanksDiverged: rank {rank} of {ranks}: " in end.error
        found = re.search(message.format(lost), end.error)
        assert found is not None, end.error
        others = {f"rank {other} on " for other in range(ranks)} - {f"rank {lost} on "}
        assert not any(other in end.error[found.start() :] for other in others), "nobody else is named"


@pytest.mark.parametrize("name", NEVER_JOINED)
def test_who_never_joins_is_named(name: str, ends: dict[str, list[End]]) -> None:
    lost = int(name.split(":")[2])
    for rank, end in enumerate(ends[name]):
        if rank == lost:
            assert end.status == KILLED, end.output
            continue
        assert end.status == FAILED, end.output
        said = end.error.partition(f"RanksDiverged: rank {rank} of 3")[2]
        assert re.search(ABSENT.format(lost), said), end.error
        assert f"rank {3 - lost - rank}" not in said, "the third, who is not to blame"


@pytest.mark.parametrize("name", AWAY)
def test_a_rank_that_is_away_for_less_than_the_timeout_is_waited_for(name: str, ends: dict[str, list[End]]) -> None:
    assert [end.status for end in ends[name]] == [FINE] * 3, ends[name]
    assert all("the same bits" in end.output for end in ends[name])


@pytest.mark.parametrize("name", [name for name, status, _ in WAYS if status == FAILED])
def test_the_one_that_raised_says_it_too(name: str, ends: dict[str, list[End]]) -> None:
    lost = ends[name][int(name.split(":")[2])]
    assert "ValueError: no such token: 7" in lost.error
    assert "RanksDiverged" not in lost.output


def test_nobody_hears_of_an_exception_that_was_caught(ends: dict[str, list[End]]) -> None:
    assert [end.status for end in ends["caught:2:1"]] == [FINE, FINE]
    assert "never mind" in ends["caught:2:1"][1].output


def test_who_waits_for_nothing_is_not_disturbed(ends: dict[str, list[End]]) -> None:
    assert [end.status for end in ends["raised_late:2:0"]] == [FAILED, FINE]
    other = ends["raised_late:2:0"][1].output
    assert "done\n" in other  # torch may have said before that the store is gone
    assert "RanksDiverged" not in other


def test_a_disk_that_fails_on_one_rank_ends_the_others_with_its_words(ends: dict[str, list[End]]) -> None:
    other, failed = ends["disk_failed:2:1"]
    assert (other.status, failed.status) == (FAILED, FAILED)
    words = "TierFailure: the disk tier failed: "
    assert words in failed.output
    assert "it was truncated" in failed.output
    assert "RanksDiverged" not in failed.output
    assert re.search(rf"rank 1 on \S+ raised {words}", other.error)


def test_release_frees_memory_without_a_rank_that_ended(ends: dict[str, list[End]]) -> None:
    assert [end.status for end in ends["released:2:1"]] == [FINE, KILLED], ends["released:2:1"]
    said = ends["released:2:1"][0].output
    assert "memory is free\n" in said
    assert re.search(
        r"release\(model\) freed the memory, but parameters from '0\.weight' on are not-a-number, .* rank 1 on ", said
    ), said


@pytest.mark.parametrize("fact", UNLIKE)
def test_what_is_not_alike_is_named_at_the_start(fact: str, ends: dict[str, list[End]]) -> None:
    for rank, end in enumerate(ends[f"unlike-{fact}:2:1"]):
        assert end.status == FAILED
        said = re.search(
            rf"{UNLIKE[fact]} must be the same on all ranks: rank {rank} has (.+), rank {1 - rank} has (.+); ",
            end.error,
        )
        assert said is not None, end.error
        odd = {"replicate": "2", "transport": "nccl"}.get(fact, "other")
        assert said[1 + (rank == 0)].split()[0] == odd, "whatever else it lacks for it"
