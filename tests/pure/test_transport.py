"""What accelerators' memory travels by, by a machine's figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core._plan import Gather, Instr, Queue, Tier
from ps_core._simulate.instruction_times import Costs
from ps_core._simulate.machine import MACHINES
from ps_core._simulate.transport import transport
from test_costs import NUMEL, program

PCIE = replace(MACHINES["rtx4090"], host_bandwidth=120e9, host_dram_bandwidth=0.0)
"""Two cards without links of their own, and much host memory bandwidth."""


@pytest.mark.parametrize("name", ["v100", "a100-40", "h100", "h200"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_cards_with_links_of_their_own_use_them(name: str, ranks: int) -> None:
    found = transport(MACHINES[name], ranks=ranks, ranks_per_node=ranks)
    assert (found.by_host, found.bandwidth) == (False, MACHINES[name].collective_bandwidth)


def test_a_byte_by_way_of_the_host_crosses_its_memory_three_times_and_so_does_the_own_shard() -> None:
    links = replace(PCIE, collective_bandwidth=9e9)
    found = transport(links, ranks=2, ranks_per_node=2)
    assert (found.by_host, found.bandwidth) == (True, 120e9 / 2 / 3 / 2)
    assert found.why == "host memory that all processes share at 10 GB/s a process, NCCL at 9"
    four = transport(links, ranks=4, ranks_per_node=4)
    assert (four.by_host, four.bandwidth) == (False, 9e9), "more processes divide host memory"
    assert four.why == "NCCL at 9 GB/s a process, host memory that all processes share at 7.5"
    narrow = transport(replace(links, d2h_bandwidth=8e9), ranks=2, ranks_per_node=2)
    assert narrow.why.endswith("share at 4"), "every byte goes down once"


def test_between_nodes_it_is_nccl() -> None:
    found = transport(replace(PCIE, collective_bandwidth=1e9), ranks=4, ranks_per_node=2)
    assert (found.by_host, found.why) == (False, "NCCL at 1 GB/s a process")


def test_a_plan_is_timed_by_the_way_that_is_used() -> None:
    tiers = Tier("device", 1 << 30), Tier("host", 1 << 30)
    slow, fast = replace(PCIE, collective_bandwidth=1e9), replace(PCIE, collective_bandwidth=11e9)
    took = [
        Costs(program(ranks=2), tiers, each, 2).price((Instr(0, Queue.COLL, Gather(0, 0, 1, 0)),), {0: 512}).seconds[0]
        for each in (slow, fast)
    ]
    assert took[0] == pytest.approx(NUMEL * 2 / 10e9 + slow.latency_s)
    assert took[1] > NUMEL * 2 / 11e9 + fast.latency_s, "NCCL's ring has hops"
