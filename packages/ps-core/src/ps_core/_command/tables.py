"""Compute what a token table in host memory costs: its bytes, its transfers, and their seconds.

[Note: a table on the host]
No plan contains the table, as in the engine. Its bytes are charged to the host from the start. Everything else waits
for its work. So its bytes, seconds and memory are added to a plan's prediction. Per element, ``e`` bytes each:

    held            weight e, master and states 12 (in fp32 the weight is the master), the gradient in transfer e;
                    4 more where gradients are summed (accumulation, fp32): 16, or 20; by other optimizers' states
                    4 more or less for each
    a lookup        ids of 8 bytes down; rows gathered, copied for the link, and sent up
    its gradient    rows down and copied; a dense gradient emptied (e) and added to (rows three times), measured, and
                    written over the weight (e, 2e); or read and summed (e + 4, later 8), the sum measured once (4)
    the step        as any other on the CPU, and before all others

Bytes of memory traffic take `Machine.host_bandwidth`, those of a link its own; each wait takes a latency. A dense
gradient of more than `_KEPT_BYTES` is memory that the system allocates anew each time. One thread clears it page by
page, at `_FRESH_BANDWIDTH`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ps_core._layout import SHARD_ALIGNMENT_NUMEL
from ps_core._plan import Tier
from ps_core._simulate.clock import Prediction
from ps_core._simulate.machine import Machine
from ps_core._units import align_up

_KEPT_BYTES = 32 * 2**20
"""The largest piece of freed memory that glibc keeps for reuse."""
_FRESH_BANDWIDTH = 4e9
"""Bytes a second of new pages: 4 KiB in a microsecond on usual computers; a virtual machine took three."""
UP, DOWN, CPU = "host->device", "device->host", "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTable:
    """A table in host memory, and what it costs; see [Note: a table on the host]."""

    numel: int
    width: int
    tokens: int
    """Tokens that are looked up in one micro-batch."""
    element_bytes: int
    accumulate: int
    states: int = 2
    """Number of fp32 states that the optimizer keeps for each element."""

    @property
    def sums(self) -> bool:
        """Return True if gradients are summed in fp32."""
        return self.element_bytes == 4 or self.accumulate > 1

    @property
    def held_bytes(self) -> int:
        """Return the bytes that stay in host memory."""
        return align_up(self.numel, SHARD_ALIGNMENT_NUMEL) * (8 + 4 * self.states + 4 * self.sums)

    @property
    def rows_bytes(self) -> int:
        """Return the bytes of one lookup's rows."""
        return self.tokens * self.width * self.element_bytes

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Return the bytes that one step moves over each link."""
        return {UP: self.accumulate * self.rows_bytes, DOWN: self.accumulate * (self.rows_bytes + 8 * self.tokens)}

    def left(self, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
        """Return the tiers without the table's part of the host's; a negative size if the table does not fit."""
        return tuple(
            replace(tier, capacity_bytes=tier.capacity_bytes - self.held_bytes * (tier.name == "host"))
            for tier in tiers
        )

    def seconds(self, machine: Machine) -> tuple[float, float, float]:
        """Return the seconds of a step's lookups, gradients and update, each waited for."""
        host, rows, wait = machine.host_bandwidth, self.rows_bytes, machine.latency_s
        up, down = (min(rate, host) for rate in (machine.h2d_bandwidth, machine.d2h_bandwidth))
        lookups = self.accumulate * (8 * self.tokens / down + 4 * rows / host + rows / up + 2 * wait)
        each, more = self.element_bytes, self.accumulate - 1
        empty = min(host, _FRESH_BANDWIDTH) if self.numel * each > _KEPT_BYTES else host
        dense = self.accumulate * (each + 4) + 4 * more + 4 if self.sums else 3 * each
        gradients = self.accumulate * (rows / down + 5 * rows / host + wait + self.numel * each / empty)
        gradients += self.numel * dense / host
        update = (
            self.numel * (8 * (1 + self.states) + (4 if self.sums else each) + (0 if each == 4 else 2)) / host + wait
        )
        return lookups, gradients, update

    def added_to(self, told: Prediction, machine: Machine) -> Prediction:
        """Return a prediction with the table's costs added."""
        lookups, gradients, update = self.seconds(machine)
        more, moved = lookups + gradients + update, self.moved_bytes
        links = {UP: machine.h2d_bandwidth, DOWN: machine.d2h_bandwidth}
        busy = {name: moved[name] / min(rate, machine.host_bandwidth) for name, rate in links.items()}
        busy[CPU] = more - sum(busy.values())
        return replace(
            told,
            step_time_s=told.step_time_s + more,
            bound_step_time_s=told.bound_step_time_s + more,
            forward_s=told.forward_s + lookups,
            backward_s=told.backward_s + gradients,
            update_s=told.update_s + update,
            stalled_s=told.stalled_s + more,
            busy_s={name: count + busy.get(name, 0.0) for name, count in told.busy_s.items()},
            moved_bytes={name: count + moved.get(name, 0) for name, count in told.moved_bytes.items()},
            peak_bytes={name: count + self.held_bytes * (name == "host") for name, count in told.peak_bytes.items()},
        )
