"""How long one instruction takes on a machine.

[Note: cost model]
Matrix work takes the machine's achieved rate, plus an overhead a moment. Three more costs are known for some traces and
machines. Attention has a rate of its own, plus a time for each query. Other operators take a time for each element that
they read or write. Each hyperbolic tangent takes a time. Everything else is bytes over a bandwidth, plus a latency.
Bytes are counted once in each direction, per element (16-bit weights; fp32 in brackets):

    Step        gradient in 2 [4], P32, M, V in and out 24, weight out 2 [part of P32's]: 28; 30 with an accumulator
                (by two of `Program.states`; each more or less is 8)
    Norm        the gradient: 2, or 4 where it is an accumulator
    Cast        4 in, 2 out
    Accumulate  gradient in 2 [4], accumulator out 4 and, unless it starts, in 4
    Shift       its bytes in and out
    Run         each activation that the moment makes or takes, in and out: it is copied into its slot, or out of it
    Gather      what a rank receives, (p-1)/p of the gathered bytes, at the slower of a GPU's link to its neighbours and
                its node's adapters together (a shard comes to each node once), and a ring's hops; the link is the
                faster of two, see `transport`
    ReduceScatter    the same bytes at the GPU's link, or those of other nodes at its part of the node's adapters, which
                ever takes longer: each rank's gradients come by themselves, to be added in rank order

Ranks of a node divide host memory and disk bandwidth evenly. A rank's cores and links share its part of host memory.
Cores stream at most ``host_bandwidth``. Cores and links together get ``host_dram_bandwidth``, which may be more. If a
segment copies both up and down, each direction gets a share by its bytes, but at least half. CPU work in a segment
takes at least as long as its bytes and all the segment's copied bytes. That is right for a pipelined step, and cautious
otherwise.

On an emulated accelerator one thread does everything, so nothing is shared. A copy takes a link's time, and takes the
thread as long as its bytes take in memory. A moment also reads weights from memory, writes gradients to memory, and
copies these to the plan's places. A tensor's first read, or first gradient, in a pass takes a fixed time: operators,
views, hooks. So does everything else: steps and norms a kernel's call, copies, slots and shifts the engine's own work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ps_core._extents import Precision
from ps_core._plan import (
    Accumulate,
    Cast,
    Copy,
    Decide,
    Gather,
    Instr,
    Norm,
    Op,
    Queue,
    ReduceScatter,
    Release,
    Reserve,
    Run,
    Shift,
    Step,
    Tier,
)
from ps_core._program import Program
from ps_core._simulate.cluster import LINK_HOP_S, NODE_HOP_S, ring_s
from ps_core._simulate.machine import Machine
from ps_core._simulate.transport import transport
from ps_core._trace import Phase, Trace

COUNTED = (Step, Norm, Accumulate, Cast)
"""Instructions that take a processor a minimum time: each calls a kernel for every tensor or group."""

MOVES = (Copy, Reserve, Release, Shift)
"""Instructions that take a minimum time however few the bytes."""

_LAUNCHED = (*COUNTED, Shift)
"""Instructions that launch an operator."""


class Work(NamedTuple):
    """A segment's instructions with their costs."""

    seconds: list[float]
    copied_bytes: list[int]
    """Bytes copied over links, by queue."""
    wire_bytes: int
    """Bytes that one rank receives from the others; as many are sent."""
    network_bytes: int
    """Those of them that cross from another node: a gathered shard once for all ranks of a node."""
    evictions: int
    """Copies to a slower tier."""
    thread_s: list[float]
    """Seconds of each instruction on the one thread of an emulated accelerator."""
    launching_s: float
    """Seconds of the host thread to launch the segment's work on an accelerator."""


class Costs:
    """Compute the costs of a program's instructions on a machine; see [Note: cost model]."""

    def __init__(
        self,
        program: Program,
        tiers: tuple[Tier, ...],
        machine: Machine,
        ranks_per_node: int,
        *,
        accelerator: bool = False,
    ) -> None:
        """Begin; ``accelerator``: one works while the host thread launches.

        Then the caller slows the processor's work while copies use host memory.
        """
        self._accelerator = accelerator
        host = machine.host_bandwidth / ranks_per_node
        self._memory = memory = machine.host_memory_bandwidth / ranks_per_node
        disk_read = machine.disk_read_bandwidth / ranks_per_node
        disk_write = machine.disk_write_bandwidth / ranks_per_node
        fast = machine.device_bandwidth if tiers[0].name == "device" else host
        self._latency = machine.latency_s
        self._overhead = machine.moment_overhead_s
        self._played = machine.played_copy_bandwidth
        self._instruction, self._tensor = machine.instruction_overhead_s, machine.tensor_overhead_s
        self._move = machine.move_overhead_s
        fp32 = program.precision is Precision.FP32
        copied = machine.played_copy_bandwidth or fast / 2
        self._computing = [
            machine.computing_s(moment, fp32=fp32)
            + sum(
                program.trace.activations[index].bytes / copied + machine.latency_s
                for index in (*moment.makes, *moment.takes)
            )
            for moment in program.trace.moments
        ]
        self._launch_s = machine.launch_s * accelerator
        self._launching_s = list(self._of_launching(program.trace)) if accelerator else []
        self._rates = {
            Queue.COMPUTE: fast,
            Queue.H2D: min(machine.h2d_bandwidth, memory),
            Queue.D2H: min(machine.d2h_bandwidth, memory),
            Queue.DISK_R: min(disk_read, memory),
            Queue.DISK_W: min(disk_write, memory),
            Queue.COLL: fast,
            Queue.CPU: host,
        }
        ranks = program.ranks
        link, adapter, ring = machine.collective_bandwidth, machine.internode_bandwidth, True
        if tiers[0].name == "device" and not machine.played_copy_bandwidth:
            chosen = transport(machine, ranks=ranks, ranks_per_node=ranks_per_node)
            link, ring = chosen.bandwidth, not chosen.by_host
        self._link = link
        self._gather = min(link, adapter * ranks_per_node) if ranks > ranks_per_node else link
        self._adapter = adapter
        self._shards = [group.shard_numel for group in program.layout.groups]
        groups = range(len(self._shards))
        elements = [program.element_bytes(group) for group in groups]
        self._sent = {
            Gather: [program.gather_bytes(group) for group in groups],
            ReduceScatter: [program.sum_bytes(group) for group in groups],
        }
        self._across = [program.across_bytes(group) for group in groups]
        abroad = max(0, ranks - ranks_per_node)
        self._elements, self._abroad = elements, {Gather: abroad / ranks_per_node, ReduceScatter: abroad}
        self._nodes = nodes = ranks * program.copies > ranks_per_node
        self._between = adapter if nodes else link
        self._copies_hops_s = 2 * (NODE_HOP_S if nodes else LINK_HOP_S)  # parts go there, and sums come back
        self._sharded = program.sharded
        self._around = list(self._around_products(program, elements)) if self._played else []
        self._norm = [2 if program.overwritten(group) else 4 for group in groups]
        weights = [size % 4 for size in elements]  # 2 bytes in 16 bits; in fp32 the weight is the master
        states = 8 * (1 + program.states)
        self._step = [states + norm + weight for norm, weight in zip(self._norm, weights, strict=True)]
        self._hops_s = ring_s(ranks, min(ranks, ranks_per_node)) if ring else 0.0
        self._accumulate = [4 + (4 if program.sharded else size) for size in elements]

    def _of_launching(self, trace: Trace) -> Iterator[float]:
        """Yield what each moment takes the host thread: operators, a copy of each gradient, and its tensors."""
        for moment, first in zip(trace.moments, _first_uses(trace), strict=True):
            yield (moment.launches + len(moment.grads)) * self._launch_s + first * self._tensor

    def _around_products(self, program: Program, elements: list[int]) -> Iterator[float]:
        """Yield, for an emulated accelerator, what each moment takes for its tensors, beside the work on
        activations.
        """
        trace, owner = program.trace, program.layout.group_of
        for moment, first in zip(trace.moments, _first_uses(trace), strict=True):
            sizes = [trace.tensors[index].numel * elements[owner[index]] for index in moment.reads]
            sizes += [2 * trace.tensors[index].numel * elements[owner[index]] for index in moment.grads]
            yield first * self._tensor + sum(sizes) / self._played

    def price(self, instrs: tuple[Instr, ...], slot_bytes: dict[int, int]) -> Work:
        """Return the seconds of every instruction, and what they move. ``slot_bytes`` is needed for shifts."""
        seconds: list[float] = []
        copied, evictions, wire, network, cpu_bytes = [0] * len(Queue), 0, 0, 0.0, 0
        rates, latency, note = self._rates, self._latency, seconds.append
        for instr in instrs:
            op, queue = instr.op, instr.queue
            if isinstance(op, Reserve | Release):
                note(0.0)
            elif isinstance(op, Copy):
                copied[queue] += op.bytes
                evictions += queue is Queue.D2H or queue is Queue.DISK_W
                note(op.bytes / rates[queue] + latency)
            elif isinstance(op, Run):
                note(self._computing[op.visit] + self._overhead)
            elif isinstance(op, Gather | ReduceScatter):
                sent, gathers = self._sent[type(op)][op.group], isinstance(op, Gather)
                wire += sent
                abroad = self._shards[op.group] * self._elements[op.group] * self._abroad[type(op)]
                network += abroad
                taken = sent / self._gather if gathers else max(sent / self._link, abroad / self._adapter)
                if not gathers and self._across[op.group]:
                    across = self._across[op.group]
                    wire += across
                    network += across * self._nodes
                    taken += across / self._between + self._copies_hops_s
                note(taken + latency + self._hops_s)
            elif isinstance(op, Decide):
                note(latency if self._sharded else 0.0)
            else:
                count = self._memory_bytes(op, slot_bytes)
                cpu_bytes += count * (queue is Queue.CPU)
                note(count / rates[queue] + latency)
        if self._played:
            thread_s = self._of_the_thread(instrs, seconds, slot_bytes)
            return Work(seconds, copied, wire, int(network), evictions, thread_s, 0.0)
        self._slow_copies(instrs, seconds, copied)
        if not self._accelerator:
            self._slow_cpu(instrs, seconds, cpu_bytes, sum(copied))
        launching_s = sum(self.launching_s(instr.op) for instr in instrs if instr.queue is Queue.COMPUTE)
        return Work(seconds, copied, wire, int(network), evictions, [], launching_s)

    def launching_s(self, op: Op) -> float:
        """Return the seconds of the host thread to launch the compute queue's work on an accelerator."""
        if not self._accelerator:
            return 0.0
        if isinstance(op, Run):
            return self._launching_s[op.visit]
        return self._launch_s * isinstance(op, _LAUNCHED)

    def copying_s(self, size: int) -> float:
        """Return the seconds that the processor takes to copy so many bytes within host memory."""
        return 2 * size / self._rates[Queue.CPU] + self._latency

    def _of_the_thread(
        self, instrs: tuple[Instr, ...], seconds: list[float], slot_bytes: dict[int, int]
    ) -> list[float]:
        """Return the thread's seconds for each instruction; increase those of moments, which do more then."""
        found: list[float] = []
        for place, instr in enumerate(instrs):
            op = instr.op
            if isinstance(op, Run):
                seconds[place] += self._around[op.visit]
            elif isinstance(op, Shift):
                seconds[place] = slot_bytes[op.slot] / self._played
            taken = op.bytes / self._played if isinstance(op, Copy) else seconds[place]
            taken += self._instruction * isinstance(op, COUNTED) + self._move * isinstance(op, MOVES)
            found.append(taken)
        return found

    def _memory_bytes(self, op: Step | Norm | Cast | Accumulate | Shift, slot_bytes: dict[int, int]) -> int:
        if isinstance(op, Shift):
            return 2 * slot_bytes[op.slot]
        numel = self._shards[op.group]
        if isinstance(op, Step):
            return numel * self._step[op.group]
        if isinstance(op, Norm):
            return numel * self._norm[op.group]
        if isinstance(op, Cast):
            return numel * 6
        return numel * (self._accumulate[op.group] + (0 if op.first else 4))

    def _slow_copies(self, instrs: tuple[Instr, ...], seconds: list[float], copied: list[int]) -> None:
        both = copied[Queue.H2D] + copied[Queue.D2H]
        slower = {}
        for queue in (Queue.H2D, Queue.D2H):
            rate = self._memory * max(0.5, copied[queue] / both) if both else self._rates[queue]
            if rate < self._rates[queue]:
                slower[queue] = rate
        if not slower:
            return
        for place, instr in enumerate(instrs):
            if instr.queue in slower and isinstance(instr.op, Copy):
                seconds[place] = instr.op.bytes / slower[instr.queue] + self._latency

    def _slow_cpu(self, instrs: tuple[Instr, ...], seconds: list[float], cpu_bytes: int, copied_bytes: int) -> None:
        if not cpu_bytes or not copied_bytes:
            return
        alone, together = cpu_bytes / self._rates[Queue.CPU], (cpu_bytes + copied_bytes) / self._memory
        more = max(0.0, together / alone - 1)
        for place, instr in enumerate(instrs):
            if instr.queue is Queue.CPU and seconds[place]:
                seconds[place] += (seconds[place] - self._latency) * more


def _first_uses(trace: Trace) -> Iterator[int]:
    """Yield for each moment how many tensors it is the first of its phase to read, or to give a gradient."""
    seen: set[tuple[Phase, int, bool]] = set()
    for moment in trace.moments:
        uses = {(moment.phase, index, False) for index in moment.reads}
        uses |= {(moment.phase, index, True) for index in moment.grads}
        yield len(uses - seen)
        seen |= uses
