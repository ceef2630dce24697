"""From GPUs, nodes and memory to what one process may use."""

from __future__ import annotations

from typing import Any

import pytest

from ps_core._errors import InvalidInput
from ps_core._plan import Tier, check_tiers
from ps_core._simulate.cluster import LINK_HOP_S, NODE_HOP_S, Cluster, ring_s, tree_s

GIB = 2**30


def floor(count: float) -> int:
    return int(count) // 128 * 128


def test_one_gpu_keeps_its_named_reserves() -> None:
    cluster = Cluster(device_memory=32 * GIB, host_memory=240 * GIB)
    assert cluster.tiers() == (
        Tier("device", floor(32 * GIB - 0.6e9)),
        Tier("host", floor(240 * GIB - 4e9 - 2.5e9)),
    )


def test_ranks_of_a_node_divide_host_and_disk() -> None:
    cluster = Cluster(gpus=16, nodes=2, device_memory=40 * GIB, host_memory=1000 * GIB, disk=4096 * GIB)
    assert cluster.ranks_per_node == 8
    tiers = cluster.tiers()
    check_tiers(tiers)
    assert tiers == (
        Tier("device", floor(40 * GIB - 1.2e9)),
        Tier("host", floor((1000 * GIB - 4e9 - 8 * 2.5e9) / 8)),
        Tier("disk", 512 * GIB),
    )


def test_reserves_can_be_set() -> None:
    cluster = Cluster(
        gpus=2, device_memory=1024, host_memory=4096, device_reserve=0, host_reserve=1024, host_reserve_per_rank=512
    )
    assert cluster.tiers() == (Tier("device", 1024), Tier("host", 1024))


def test_tiers_that_are_not_there() -> None:
    assert [tier.name for tier in Cluster(device_memory=GIB, host_memory=0).tiers()] == ["device"]
    assert [tier.name for tier in Cluster(device_memory=0, host_memory=64 * GIB).tiers()] == ["host"]
    both = Cluster(device_memory=0, host_memory=64 * GIB, disk=GIB)
    assert [tier.name for tier in both.tiers()] == ["host", "disk"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpus": 0}, "gpus must be a whole number of at least 1, found 0"),
        ({"nodes": 0}, "nodes must be a whole number of at least 1, found 0"),
        ({"copies": 0}, "copies must be a whole number of at least 1, found 0"),
        ({"gpus": 6, "copies": 4}, "6 GPUs cannot have 4 copies of a model, of equally many each"),
        ({"gpus": 6, "nodes": 4}, "6 GPUs cannot be spread evenly over 4 nodes"),
        ({"device_memory": -1}, "device_memory must be a whole number of at least 0, found -1"),
        ({"device_reserve": -1}, "device_reserve must be a whole number of at least 0, found -1"),
        ({"device_memory": float("nan")}, "device_memory must be a whole number of at least 0, found nan"),
        ({"host_memory": float("inf")}, "host_memory must be a whole number of at least 0, found inf"),
        ({"device_memory": "20GiB"}, "device_memory must be a whole number of at least 0, found '20GiB'"),
        ({"disk": 10**400}, "disk must be a whole number of at most 4611686018427387904, found a whole number of 1329"),
        ({"gpus": 2.0}, "gpus must be a whole number of at least 1, found 2.0"),
        ({"nonmodel_overhead": 10**400}, "nonmodel_overhead must be a finite number of at least 0 and at most 10"),
        (
            {"nonmodel_overhead": None},
            "nonmodel_overhead must be a finite number of at least 0 and at most 10, found None",
        ),
        ({"nonmodel_overhead": -0.1}, "nonmodel_overhead must be"),
        ({"nonmodel_overhead": float("nan")}, "nonmodel_overhead must be"),
        ({"device_memory": 0, "host_memory": 0}, "needs device memory or host memory"),
        ({"host_memory": 0, "disk": 1}, "a disk is reached through host memory"),
    ],
)
def test_impossible_clusters_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        Cluster(**{"device_memory": 32 * GIB, "host_memory": 64 * GIB, **change})


def test_a_reserve_larger_than_the_memory_leaves_nothing() -> None:
    device, host = Cluster(device_memory=GIB // 2, host_memory=64 * GIB).tiers()
    assert device.capacity_bytes == 0 < host.capacity_bytes
    device, host = Cluster(gpus=8, device_memory=8 * GIB, host_memory=16 * GIB).tiers()
    assert host.capacity_bytes == 0 < device.capacity_bytes


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "ring", "tree"),
    [(1, 1, (0, 0), (0, 0)), (8, 8, (7, 0), (3, 0)), (16, 8, (14, 1), (3, 1)), (48, 6, (40, 7), (3, 3))],
)
def test_hops(ranks: int, ranks_per_node: int, ring: tuple[int, int], tree: tuple[int, int]) -> None:
    """Within nodes and between them; a number that is no power of two takes as many doublings as the next one."""
    hops = (LINK_HOP_S, NODE_HOP_S)
    assert ring_s(ranks, ranks_per_node) == pytest.approx(sum(a * b for a, b in zip(ring, hops, strict=True)))
    assert tree_s(ranks, ranks_per_node) == pytest.approx(sum(a * b for a, b in zip(tree, hops, strict=True)))


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("device", 1e6, "capacity_bytes of tier 'device' must be a whole number of at least 0, found 1000000.0"),
        ("host", -1, "capacity_bytes of tier 'host' must be a whole number of at least 0, found -1"),
        ("disk", 10**5000, "must be a whole number of at most 4611686018427387904, found a whole number of 16610 bits"),
        (0, 128, "a tier's name must be device, host or disk; found 0"),
    ],
    ids=["float", "negative", "5000 digits", "name"],
)
def test_a_tier_that_makes_no_sense_is_refused(name: Any, size: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        Tier(name, size)
