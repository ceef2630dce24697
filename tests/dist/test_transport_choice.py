"""What memory of CUDA devices travels by: NCCL where it works, tried first; gloo, played by itself, plays it here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import _transport_choice_cases as cases
from _crew import Crew, crew
from ps_core import Budget, InvalidInput
from ps_core._simulate.machine import MACHINES
from ps_core.engine import _chunked, chunked
from ps_core.engine._sharding import join_ranks as joining
from ps_dist import _process_groups, _transport
from ps_dist._abandonable_call import AbandonableCall
from ps_dist._error_text import FAILED_ELSEWHERE, failed_ranks
from ps_dist._mesh import Mesh
from ps_dist._process_groups import DefaultGroup, ProcessGroups
from ps_dist._timeouts import Timeouts
from ps_dist._transport import TransportChoice, why_not_nccl

HOST = "what processes send from CUDA devices goes by way of the host's memory: "


# The decision.


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[1, 7]], None),
        ([[1, 7], [1, 8], [1, 9]], None),
        ([[0, 7]], "torch was built without NCCL on rank 0"),
        ([[1, 7], [0, 8], [0, 9]], "torch was built without NCCL on ranks 1, 2"),
        ([[1, 7], [1, 8], [1, 7]], "ranks 0, 2 share a card; expected one for each process (call"),
        ([[0, 7], [1, 7]], "torch was built without NCCL on rank 0"),
    ],
)
def test_when_it_need_not_be_tried(rows: list[list[float]], words: str | None) -> None:
    found = why_not_nccl(rows)
    assert found == words or (words is not None and found is not None and found.startswith(words))


def test_cards_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a name that a part of a card (MIG) has for itself, on whatever computer."""

    def found(name: str) -> list[float]:
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda where: SimpleNamespace(uuid=name))
        return _transport.own_card(torch.device("cuda", 0))

    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert found("a") == found("a")
    assert found("a") != found("b")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert why_not_nccl([found("a")]) == "torch was built without NCCL on rank 0"


def test_who_is_failed_ranks() -> None:
    assert failed_ranks(["", "OSError: gone", ""]) == "rank 1: OSError: gone"
    assert failed_ranks([FAILED_ELSEWHERE, "", "no"]) == "rank 2: no", "not who only gave up"
    assert failed_ranks(["late", FAILED_ELSEWHERE, "late"]) == "ranks 0, 2: late"
    assert failed_ranks([FAILED_ELSEWHERE, ""]) == f"rank 0: {FAILED_ELSEWHERE}"


# Something that may never come back.


def test_what_an_attempt_says() -> None:
    def raises(words: str) -> None:
        raise OSError(words)

    assert AbandonableCall(lambda: 7).wait(60) == ""
    assert AbandonableCall(lambda: raises("no\nmore")).wait(60) == "OSError: no"
    assert AbandonableCall(lambda: raises("")).wait(60) == "OSError"
    nccl = "OSError: NCCL error in: a.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO): no shared memory"
    assert AbandonableCall(lambda: raises(cases.ERROR)).wait(60) == nccl
    over = Event()
    stuck = AbandonableCall(over.wait)
    assert stuck.wait(0) == "did not end within 0 s"
    assert stuck.wait(60, lambda: "in vain") == "in vain"
    over.set()
    assert stuck.wait(60, lambda: "") == ""


def test_an_interpreter_that_ends_begins_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    done: list[int] = []
    monkeypatch.setattr("ps_dist._abandonable_call.Thread.start", start)
    assert AbandonableCall(lambda: done.append(1)).wait(0) == ""
    assert done == [1]


# The trial.


def test_it_is_taken_where_it_works(each_crew: Crew) -> None:
    for transport in (None, "nccl"):
        assert each_crew.run(cases.choose, transport) == [(None, "nccl", 0)] * each_crew.ranks


def test_it_is_not_tried_where_gloo_was_asked_for(two: Crew) -> None:
    assert two.run(cases.choose, "gloo", "raises") == [(None, "shared", 0)] * 2


@pytest.mark.parametrize(
    ("fault", "deadline_s", "words"),
    [
        ("raises", 60, "rank {}: RuntimeError: NCCL error in: a.cpp:77, unhandled system error (run with "
                       "NCCL_DEBUG=INFO): no shared memory"),
        ("spoilt", 60, "rank {}: RuntimeError: a gather delivered [1, 77] and messages [1, 2], expected [1, 2] twice"),
        ("hangs", 0, "ranks 0, 1: did not end within 0 s"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at_rank", [0, 1])
def test_where_it_fails_on_one_all_go_by_way_of_the_host(
    two: Crew, fault: str, deadline_s: float, words: str, at_rank: int
) -> None:
    why = f"NCCL failed on {words.format(at_rank)} (NCCL_DEBUG=INFO tells more)"
    assert two.run(cases.choose, None, fault, at_rank, deadline_s) == [(HOST + why, "shared", 1)] * 2
    refused = f"InvalidInput: transport='nccl': {why}; or leave transport out"
    assert two.run(cases.choose, "nccl", fault, at_rank, deadline_s) == [(refused, "shared", 1)] * 2


def test_one_process_keeps_its_memory_on_its_card() -> None:
    with crew(1) as one:
        one.run(cases.alone)


def test_connections_are_made_and_taken_down(two: Crew) -> None:
    two.run(cases.connects)


def test_asked_for_it_is_tried_at_once(two: Crew) -> None:
    for message in two.run(cases.asked_for):
        assert message.startswith("transport='nccl': NCCL failed on ranks 0, 1: ")
        assert message.endswith("(NCCL_DEBUG=INFO tells more); or leave transport out")


def test_cards_that_processes_share(monkeypatch: pytest.MonkeyPatch) -> None:
    class Joined:
        mesh = Mesh(1, 3, 1)

        def all_values(self, values: list[float], what: str) -> list[list[float]]:
            return [[1.0, 1.0, 0.0], values, values]

    monkeypatch.setattr(_transport, "own_card", lambda where: [1.0, 5.0])
    joined, cards, where = Joined(), SimpleNamespace(), torch.device("cuda", 0)
    shared: Any = TransportChoice("nccl", cards, None, 60)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="transport='nccl': ranks 1, 2 share a card; expected one for each process"):
        shared(joined, where)
    by_itself: Any = TransportChoice(None, cards, None, 60)  # type: ignore[arg-type]
    assert by_itself(joined, where).startswith(f"{HOST}ranks 1, 2 share a card; ")
    assert by_itself(joined, where) is None


# When it is decided.


class Decides:
    """Collectives that write down what they are asked."""

    rank, ranks, copy, local_ranks, card, processes = 0, 2, 0, 2, None, 2
    host_memory, why_not_shared = None, ""

    def __init__(self, process: int) -> None:
        self.process = process
        self.asked: list[str] = []

    def agree(self, name: str, value: str) -> None:
        self.asked.append(name)

    def all_values(self, values: Sequence[float], what: str = "") -> list[list[float]]:
        self.asked.append(what)
        return [list(values)]

    def reach(self, where: torch.device, why_by_host: str) -> str:
        self.asked.append(f"reach {where}{why_by_host and ': '}{why_by_host}")
        return "a slow way"


class Asked(Exception):
    """How much memory is free."""


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("kind", ["cpu", "emulated", "cuda"])
def test_it_is_decided_for_cuda_alone_and_before_memory_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, process: int
) -> None:
    def free(*anything: Any) -> Any:
        raise Asked

    caplog.set_level("INFO", "ps_core")
    monkeypatch.setattr(_chunked, "tier_budgets", free)
    if kind == "cuda":
        device = SimpleNamespace(name="cuda", torch_device=torch.device("cuda", 3), machine=MACHINES["a100-40"])
        monkeypatch.setattr(_chunked, "resolve_device", lambda *given, **how: device)
        monkeypatch.setattr(joining.torch.cuda, "device_count", lambda: 8)
    together: Any = Decides(process)
    budget = Budget(device="1MiB", host="1MiB") if kind == "emulated" else Budget()
    with pytest.raises(Asked):
        chunked(nn.Linear(2, 2), None, device=kind, budget=budget, collectives=together)
    said = ["which process has which device", "reach cuda:3"] if kind == "cuda" else []
    assert together.asked == ["the kind of device", *said]
    assert caplog.messages == (["a slow way"] if kind == "cuda" and process == 0 else [])


def test_another_card_than_the_one_that_is_connected() -> None:
    together: Any = Decides(0)
    together.card = 1
    device: Any = SimpleNamespace(name="cuda", torch_device=torch.device("cuda", 0))
    with pytest.raises(
        InvalidInput, match=r"device='cuda:0': collectives were connected for cuda:1; expected the same"
    ):
        joining.GroupJoin(together).check(device)


def test_cards_whose_links_are_slower_than_host_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the machine that the user names; else by the one that is most like the card."""
    file = tmp_path / "slow.toml"
    file.write_text('base = "rtx4090"\nname = "slow links"\ncollective_bandwidth = 1e9\n')
    monkeypatch.setattr(joining.torch.cuda, "device_count", lambda: 8)
    device: Any = SimpleNamespace(name="cuda", torch_device=torch.device("cuda", 0), machine=MACHINES["rtx4090"])
    together: Any = Decides(1)
    joining.GroupJoin(together).check(device, str(file))
    joining.GroupJoin(together).check(device)
    why = "host memory that all processes share at 4.17 GB/s a process, NCCL at 1 (slow links)"
    assert [said for said in together.asked if said.startswith("reach")] == [f"reach cuda:0: {why}", "reach cuda:0"]


@pytest.mark.parametrize(
    ("transport", "slow", "wanted"),
    [(None, (0, 1), "shared"), (None, (0,), "nccl"), (None, (1,), "nccl"), ("nccl", (0, 1), "nccl")],
)
def test_host_memory_is_used_if_it_is_faster_for_all(
    two: Crew, transport: str | None, slow: tuple[int, ...], wanted: str
) -> None:
    for words, used, dropped in two.run(cases.choose_by_rates, transport, slow):
        assert words == (f"{HOST}links are slow" if wanted == "shared" else None)
        assert (used, dropped) == (wanted, 0)


# Groups.


class Group:
    """Torch's."""

    def __init__(self, aborts: Event) -> None:
        self._aborts = aborts

    def abort(self) -> None:
        assert self._aborts.wait(60)


@pytest.mark.parametrize("stuck", [False, True])
def test_what_cannot_be_let_go_of_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    aborts = Event()
    destroyed: list[Any] = []
    monkeypatch.setattr(_process_groups, "dist", SimpleNamespace(
        new_group=lambda backend, timeout: Group(aborts), is_initialized=lambda: True,
        destroy_process_group=lambda group=None: destroyed.append(group),
    ))  # fmt: skip
    monkeypatch.setattr(_process_groups, "_DROP_S", 0.0 if stuck else 60.0)
    groups = ProcessGroups(Timeouts(timeout_s=60), DefaultGroup(), made_default=True)
    cards = groups.connect_nccl()
    if not stuck:
        aborts.set()
    groups.abort_nccl()
    groups.destroy()
    assert destroyed == ([groups.host] if stuck else [cards, groups.host, None]), "the default one waits for all"
    aborts.set()
