"""What one instruction costs, by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from ps_core._errors import InvalidInput
from ps_core._extents import Extent, Kind, Precision
from ps_core._layout import lay_out
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
from ps_core._simulate.engine_timing import Issuing
from ps_core._simulate.instruction_times import Costs
from ps_core._simulate.machine import MACHINES, Machine
from ps_core._trace import Moment, Phase, Tensor, Trace

# Powers of two, so that every quotient below is exact.
MACHINE = Machine(
    name="powers",
    memory_bytes=1,
    host_memory_bytes=1,
    matmul_flops=2.0**10,
    matmul_flops_fp32=2.0**9,
    device_bandwidth=2.0**8,
    h2d_bandwidth=2.0**4,
    d2h_bandwidth=2.0**5,
    host_bandwidth=2.0**7,
    disk_read_bandwidth=2.0**3,
    disk_write_bandwidth=2.0**2,
    collective_bandwidth=2.0**6,
    internode_bandwidth=2.0**1,
    latency_s=0.25,
    moment_overhead_s=0.5,
)
NUMEL = 256
DEVICE_HOST = (Tier("device", 2**20), Tier("host", 2**20))
WEIGHT = Extent(Kind.P16, 0)


def program(*, ranks: int = 1, precision: Precision = Precision.BF16, accumulate: int = 1, states: int = 2) -> Program:
    trace = Trace(
        model="one",
        tensors=(Tensor(name="w", numel=NUMEL * ranks),),
        moments=(
            Moment(name="f", phase=Phase.FORWARD, reads=(0,), flops=2.0**12),
            Moment(name="b", phase=Phase.BACKWARD, reads=(0,), grads=(0,), flops=2.0**13),
        ),
    )
    layout = lay_out(trace, group_numel=NUMEL * ranks, ranks=ranks)
    return Program(trace=trace, layout=layout, precision=precision, accumulate=accumulate, states=states)


def seconds(
    op: Op,
    queue: Queue,
    of: Program,
    *,
    tiers: tuple[Tier, ...] = DEVICE_HOST,
    ranks_per_node: int = 1,
    machine: Machine = MACHINE,
) -> float:
    work = Costs(of, tiers, machine, ranks_per_node).price((Instr(0, queue, op),), {0: 512})
    return work.seconds[0]


def test_moments() -> None:
    assert seconds(Run(0, (0,), 0), Queue.COMPUTE, program()) == 4 + 0.5
    assert seconds(Run(1, (0,), 0), Queue.COMPUTE, program(precision=Precision.FP32)) == 16 + 0.5


def test_launching_a_moment_takes_a_time_for_each_operator_and_tensor() -> None:
    """A tensor counts where a phase first reads it, and where it first gets a gradient, which is copied."""
    base = program()
    forward, backward = base.trace.moments
    moments = (replace(forward, launches=3.0), replace(forward, launches=2.0), replace(backward, launches=7.0))
    longer = replace(base, trace=replace(base.trace, moments=moments))
    slow = replace(MACHINE, launch_s=0.5, tensor_overhead_s=4.0)
    costs = Costs(longer, DEVICE_HOST, slow, 1, accelerator=True)
    runs = [Run(place, (0,), 0) for place in range(3)]
    assert [costs.launching_s(run) for run in runs] == [1.5 + 4.0, 1.0, 3.5 + 0.5 + 2 * 4.0]
    assert [costs.launching_s(op) for op in (Norm(0, 0), Shift(0, 0), Release(0))] == [0.5, 0.5, 0]
    instrs = (*(Instr(place, Queue.COMPUTE, runs[place]) for place in (0, 1)), Instr(2, Queue.CPU, Norm(0, 0)))
    assert costs.price(instrs, {0: 512}).launching_s == 6.5
    assert Costs(longer, DEVICE_HOST, slow, 1).price(instrs, {0: 512}).launching_s == 0, "nothing is launched"


def test_reserving_is_free() -> None:
    assert seconds(Reserve(0, 0, 0, 128), Queue.H2D, program()) == 0
    assert seconds(Release(0), Queue.COMPUTE, program()) == 0


@pytest.mark.parametrize(
    ("queue", "alone", "of_four"),
    [
        (Queue.H2D, 512 / 16, 512 / 16),
        (Queue.D2H, 512 / 32, 512 / 32),
        (Queue.DISK_R, 512 / 8, 512 / 2),
        (Queue.DISK_W, 512 / 4, 512 / 1),
    ],
)
def test_copies(queue: Queue, alone: float, of_four: float) -> None:
    op = Copy(WEIGHT, 0, 0, 1, 512)
    assert seconds(op, queue, program(ranks=4)) == alone + 0.25
    assert seconds(op, queue, program(ranks=4), ranks_per_node=4) == of_four + 0.25


def test_a_copy_is_no_faster_than_its_share_of_host_memory() -> None:
    slow = replace(MACHINE, host_bandwidth=16.0)
    for queue in (Queue.H2D, Queue.D2H):
        assert seconds(Copy(WEIGHT, 0, 0, 1, 512), queue, program(ranks=4), ranks_per_node=4, machine=slow) == 128.25
    slow = replace(MACHINE, host_bandwidth=1.0)
    for queue in (Queue.DISK_R, Queue.DISK_W):
        assert seconds(Copy(WEIGHT, 0, 0, 1, 512), queue, program(), machine=slow) == 512.25


def test_links_may_get_what_cores_cannot_stream() -> None:
    """Memory that gives more than its cores take slows neither copies nor, as far as it reaches, the cores."""
    narrow = replace(MACHINE, host_bandwidth=16.0)
    up = Instr(0, Queue.H2D, Copy(WEIGHT, 0, 0, 1, 512))
    norm = Instr(1, Queue.CPU, Norm(0, 2))
    took = [
        Costs(program(), DEVICE_HOST, replace(narrow, host_dram_bandwidth=dram), 1).price((up, norm), {}).seconds
        for dram in (0.0, 16.0, 1e9)
    ]
    alone = Costs(program(), DEVICE_HOST, narrow, 1).price((norm,), {}).seconds[0]
    assert took[0] == took[1] == [512 / 16 + 0.25, alone + 512 / 16]
    assert took[2] == [512 / MACHINE.h2d_bandwidth + 0.25, alone]


def test_copies_up_and_down_share_host_memory() -> None:
    narrow = replace(MACHINE, host_bandwidth=16.0)
    up = Instr(0, Queue.H2D, Copy(WEIGHT, 0, 0, 1, 3072))
    down = Instr(1, Queue.D2H, Copy(WEIGHT, 0, 1, 0, 1024))
    priced = Costs(program(), DEVICE_HOST, narrow, 1).price((up, down, Instr(2, Queue.H2D, Release(1))), {})
    assert priced.seconds == [3072 / 12 + 0.25, 1024 / 8 + 0.25, 0]
    assert Costs(program(), DEVICE_HOST, narrow, 1).price((up,), {}).seconds == [3072 / 16 + 0.25]
    assert Costs(program(), DEVICE_HOST, MACHINE, 1).price((up, down), {}).seconds == [3072 / 16 + 0.25, 32.25]


def test_collectives_cross_the_slower_link() -> None:
    ops: tuple[Op, ...] = (Gather(0, 0, 1, 0), ReduceScatter(0, 0, 1, 2, 0))
    for op in ops:
        sent = 3 * NUMEL * 2
        one, two = 0.25 + ring_s(4, 4), 0.25 + ring_s(4, 2)
        assert seconds(op, Queue.COLL, program(ranks=4), ranks_per_node=4) == sent / 64 + one
        abroad = 2 * NUMEL * 2 / 2  # of the other node's ranks, whose gradients come one by one
        crossing = sent / 4 if isinstance(op, Gather) else abroad
        assert seconds(op, Queue.COLL, program(ranks=4), ranks_per_node=2) == crossing + two
        fp32 = program(ranks=4, precision=Precision.FP32)
        assert seconds(op, Queue.COLL, fp32, ranks_per_node=4) == 2 * sent / 64 + one


def test_what_crosses_between_nodes() -> None:
    """A gathered shard once for all ranks of a node; each rank's gradients by themselves."""
    for per_node, gathered, summed in ((4, 0, 0), (2, 2 / 2, 2), (1, 3, 3)):
        for op, shards in ((Gather(0, 0, 1, 0), gathered), (ReduceScatter(0, 0, 1, 2, 0), summed)):
            work = Costs(program(ranks=4), DEVICE_HOST, MACHINE, per_node).price((Instr(0, Queue.COLL, op),), {0: 512})
            assert (work.wire_bytes, work.network_bytes) == (3 * NUMEL * 2, shards * NUMEL * 2)


def test_a_sum_across_copies_receives_a_part_from_each_copy_and_then_the_others() -> None:
    """Two copies of two processes: gathers stay within a node of two, sums do not."""
    copies = replace(program(ranks=2), copies=2)
    within, across = NUMEL * 2, NUMEL // 2 * 4 + NUMEL // 2 * 2
    gather, total = Gather(0, 0, 1, 0), ReduceScatter(0, 0, 1, 2, 0)
    one = within / 64 + 0.25 + ring_s(2, 2)
    assert seconds(gather, Queue.COLL, copies, ranks_per_node=2) == one
    between, near = one + (across / 2 + 2 * NODE_HOP_S), one + (across / 64 + 2 * LINK_HOP_S)
    assert seconds(total, Queue.COLL, copies, ranks_per_node=2) == pytest.approx(between, rel=1e-12)
    assert seconds(total, Queue.COLL, copies, ranks_per_node=4) == pytest.approx(near, rel=1e-12)
    fp32 = replace(copies, precision=Precision.FP32)
    assert fp32.across_bytes(0) == NUMEL // 2 * (4 + 4)


@pytest.mark.parametrize(("per_node", "told"), [(5, "12 processes cannot"), (6, "a copy of 4 processes neither")])
def test_nodes_that_do_not_divide_the_processes_are_refused(per_node: int, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        Issuing(replace(program(ranks=4), copies=3), DEVICE_HOST, MACHINE, per_node)


def test_deciding_costs_a_message_where_there_is_somebody_to_ask() -> None:
    assert seconds(Decide(0), Queue.COLL, program()) == 0
    assert seconds(Decide(0), Queue.COLL, program(ranks=2)) == 0.25


def test_a_step_counts_each_state() -> None:
    bytes_of = [seconds(Step(0, (0,)), Queue.CPU, program(states=states)) for states in range(5)]
    assert [later - sooner for sooner, later in pairwise(bytes_of)] == [8 * NUMEL / 128] * 4


@pytest.mark.parametrize(
    ("precision", "accumulate", "step", "norm", "start", "add"),
    [
        (Precision.BF16, 1, 28, 2, 6, 10),
        (Precision.FP16, 2, 30, 4, 6, 10),
        (Precision.FP32, 1, 28, 4, 8, 12),
        (Precision.FP32, 3, 28, 4, 8, 12),
    ],
)
def test_memory_bound_work_counts_bytes(
    precision: Precision, accumulate: int, step: int, norm: int, start: int, add: int
) -> None:
    of = program(precision=precision, accumulate=accumulate)
    rows: tuple[tuple[Op, int], ...] = (
        (Step(0, (0, 1, 2, 3)), step),
        (Norm(0, 0), norm),
        (Accumulate(0, 0, 1, True), start),
        (Accumulate(0, 0, 1, False), add),
        (Cast(0, 1, 0), 6),
        (Shift(0, 128), 2 * 512 // NUMEL),
    )
    for op, each in rows:
        assert seconds(op, Queue.COMPUTE, of) == each * NUMEL / 256 + 0.25
        assert seconds(op, Queue.CPU, of) == each * NUMEL / 128 + 0.25
        assert seconds(op, Queue.CPU, of, ranks_per_node=1, tiers=(Tier("host", 2**20),)) == each * NUMEL / 128 + 0.25
        assert seconds(op, Queue.COMPUTE, of, tiers=(Tier("host", 2**20),)) == each * NUMEL / 128 + 0.25
        assert seconds(op, Queue.DISK_W, of) == each * NUMEL / 4 + 0.25


def test_the_cpu_shares_host_memory_with_the_copies_of_its_segment() -> None:
    instrs = (
        Instr(0, Queue.CPU, Step(0, (0, 1, 2, 3))),
        Instr(1, Queue.D2H, Copy(WEIGHT, 1, 0, 1, 28 * NUMEL)),
        Instr(2, Queue.H2D, Copy(WEIGHT, 1, 1, 0, 28 * NUMEL)),
        Instr(3, Queue.CPU, Release(0)),
    )
    work = Costs(program(), DEVICE_HOST, MACHINE, 1).price(instrs, {})
    alone = 28 * NUMEL / 128
    assert work.seconds == [alone * 3 + 0.25, 28 * NUMEL / 32 + 0.25, 28 * NUMEL / 16 + 0.25, 0]
    assert work.copied_bytes == [0, 28 * NUMEL, 28 * NUMEL, 0, 0, 0, 0]
    assert (work.evictions, work.wire_bytes) == (1, 0)


def test_wire_bytes_are_what_a_rank_sends() -> None:
    instrs = (
        Instr(0, Queue.COLL, Gather(0, 0, 1, 0)),
        Instr(1, Queue.COLL, ReduceScatter(0, 1, 2, 0, 1)),
        Instr(2, Queue.DISK_W, Copy(WEIGHT, 1, 0, 1, 512)),
    )
    work = Costs(program(ranks=4), DEVICE_HOST, MACHINES["v100"], 4).price(instrs, {})
    assert work.wire_bytes == 2 * 3 * NUMEL * 2
    assert work.evictions == 1
