"""Links that the CPU holds to a rate, for benchmarks."""

from __future__ import annotations

import pytest

from ps_core._plan import Queue
from slow_links import SlowDevice, ThrottledLinks


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def test_links_have_a_rate_each_way_and_waits_sleep() -> None:
    clock = Clock()
    links = ThrottledLinks(1000.0, clock, clock.sleep)
    links.copy(Queue.H2D, 500)
    first = links.ready_s(Queue.H2D)
    links.copy(Queue.H2D, 1500)
    links.copy(Queue.D2H, 1000)
    links.copy(Queue.DISK_W, 10**9)
    assert [links.ready_s(queue) for queue in (Queue.H2D, Queue.D2H, Queue.DISK_W)] == [102.0, 101.0, 0.0]
    links.wait(Queue.COMPUTE, first)
    assert clock.slept_s == [0.5]
    links.wait(Queue.COMPUTE, first)
    links.wait(Queue.D2H, 102.0)  # streams wait without the host
    assert clock.slept_s == [0.5]
    links.copy(Queue.D2H, 250)
    assert links.ready_s(Queue.D2H) == 102.25
    links.wait(Queue.CPU, links.ready_s(Queue.D2H))
    assert clock.now_s == 102.25
    clock.now_s = 110.0
    links.copy(Queue.H2D, 1000)  # an idle link begins when asked
    links.synchronize()
    assert clock.now_s == 111.0


def test_a_device_held_to_a_rate_takes_that_long() -> None:
    clock = Clock()
    device = SlowDevice(ThrottledLinks(2**19, clock, clock.sleep))
    arena, host = device.arena(1 << 20), device.host(1 << 20)
    host.fill_(3)
    device.copy(Queue.H2D, arena[: 1 << 19], host[: 1 << 19])
    device.copy(Queue.D2H, host[1 << 19 :], arena[1 << 19 :])  # the other direction, at the same time
    device.wait(Queue.COMPUTE, device.record(Queue.H2D))
    assert clock.slept_s == [1.0]
    assert int(arena[: 1 << 19].min()) == 3
    device.copy(Queue.H2D, arena, host)
    device.synchronize()
    assert clock.slept_s == [1.0, 2.0]


def test_rates_are_positive() -> None:
    with pytest.raises(ValueError, match="bytes_per_s: expected a rate above 0, found 0"):
        ThrottledLinks(0)
