"""What a search chose is found again, and nothing in the folder can make a plan wrong."""

from __future__ import annotations

import json

import pytest

from ps_core._errors import InvalidInput
from ps_core._extents import Precision
from ps_core._layout import lay_out
from ps_core._plan import Tier
from ps_core._planner import plan_cache
from ps_core._planner.plan_cache import find_plan_again
from ps_core._planner.search import Setup
from ps_core._simulate.machine import machine
from ps_core._verify import verify
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

TRACE = analytic_trace(shape("gpt-50m"), Workload(batch=4))
LAYOUT = lay_out(TRACE, group_numel=8_000_000)
A100 = machine("a100-40")
MIB = 2**20
ROOMY = (Tier("device", 4096 * MIB), Tier("host", 4096 * MIB))
SETUP = Setup(quick=True)


@pytest.fixture
def searches(monkeypatch):
    """How often a search was made."""
    made = []

    def counted(*args, **named):
        made.append(args)
        return search(*args, **named)

    search = plan_cache.find_plan
    monkeypatch.setattr(plan_cache, "find_plan", counted)
    return made


def find(folder, tiers=ROOMY, trace=TRACE, setup=SETUP):
    return find_plan_again(trace, tiers, A100, setup=setup, layout=LAYOUT, folder=folder)


def test_the_second_time_nothing_is_searched(tmp_path, searches):
    folder = tmp_path / "made" / "when needed"
    first, again = find(folder), find(folder)
    assert (first, len(searches)) == (again, 1)
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_another_question_is_another_file(tmp_path, searches):
    find(tmp_path)
    find(tmp_path, tiers=(Tier("device", 4095 * MIB), ROOMY[1]))
    find(tmp_path, setup=Setup(quick=True, accumulate=2))
    find(tmp_path, trace=analytic_trace(shape("gpt-50m"), Workload(batch=2)))
    assert len(searches) == len(list(tmp_path.iterdir())) == 4


def test_a_plan_for_tight_memory_is_made_anew(tmp_path, searches, monkeypatch):
    found = find(tmp_path)
    path = next(tmp_path.iterdir())
    path.write_text(json.dumps({"format": plan_cache.FORMAT, "tight": True}))
    tight = find(tmp_path)
    assert len(searches) == 1
    assert (tight.placement, found.placement is None) == (None, False)
    verify(tight.program, tight.plan)
    monkeypatch.setattr(plan_cache, "find_plan", lambda *args, **named: tight)
    path.unlink()
    find(tmp_path)
    assert json.loads(path.read_text()) == {"format": plan_cache.FORMAT, "tight": True}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: "no JSON",
        lambda data: "[]",
        lambda data: json.dumps({**data, "format": "another"}),
        lambda data: json.dumps({**data, "weights": data["weights"][1:]}),
        lambda data: json.dumps({**data, "states": [7] * len(data["states"])}),
        lambda data: json.dumps({**data, "steps": "0"}),
        lambda data: json.dumps({**data, "stepped_in_backward": [len(data["steps"])]}),
        lambda data: json.dumps({**data, "stepped_in_backward": None}),
        lambda data: "\udcff",
    ],
)
def test_a_file_that_is_wrong_costs_a_search(tmp_path, searches, damage):
    tiers = (Tier("device", 1200 * MIB), ROOMY[1])
    first = find(tmp_path, tiers)
    path = next(tmp_path.iterdir())
    path.write_text(damage(json.loads(path.read_text())), "utf-8", "surrogateescape")
    again = find(tmp_path, tiers)
    assert (again, len(searches)) == (first, 2)


def test_another_placement_that_works_is_planned_and_verified(tmp_path, searches):
    find(tmp_path)
    path = next(tmp_path.iterdir())
    rows = len(LAYOUT.groups)
    lower = {"weights": [1] * rows, "states": [1] * rows, "steps": [1] * rows, "stepped_in_backward": []}
    path.write_text(json.dumps({"format": plan_cache.FORMAT, "tight": False, **lower}))
    found = find(tmp_path)
    assert (set(found.placement.states), len(searches)) == ({1}, 1)
    verify(found.program, found.plan)


def test_a_placement_without_room_costs_a_search(tmp_path, searches):
    tiers = (Tier("device", 900 * MIB), ROOMY[1])
    first = find(tmp_path, tiers)
    path = next(tmp_path.iterdir())
    rows = len(LAYOUT.groups)
    everything = {"weights": [0] * rows, "states": [0] * rows, "steps": [0] * rows, "stepped_in_backward": []}
    path.write_text(json.dumps({"format": plan_cache.FORMAT, "tight": False, **everything}))
    assert find(tmp_path, tiers) == first
    assert len(searches) == 2
    assert json.loads(path.read_text())["states"] == list(first.placement.states)


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="plan_cache: cannot write to"):
        find(tmp_path / "file" / "under")


def test_a_choice_above_a_disk_is_found_again_in_fp32(tmp_path, searches):
    """It says which kind its tiers of weights are for: in fp32 the master."""
    beside = (Tier("host", 1500 * MIB), Tier("disk", 4096 * MIB))
    setup = Setup(quick=True, precision=Precision.FP32)
    first, again = (find(tmp_path, tiers=beside, setup=setup) for _ in range(2))
    assert first.placement.weights != first.placement.states
    assert (first, len(searches)) == (again, 1)
