"""What must happen, by hand: versions, uses, homes, segments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core._errors import InvalidInput
from ps_core._extents import STATES, Extent, Kind, Precision, SegmentName, Use
from ps_core._layout import lay_out
from ps_core._plan import TIER_STACKS, Queue, Tier, check_tiers, link, worker
from ps_core._program import WIRE_BYTES, Program
from ps_core._trace import Activation, Moment, Phase, Tensor, Trace

F, B = Phase.FORWARD, Phase.BACKWARD
P16, P32, M, V, ACC, FULL, GRAD, ACT = (
    Kind.P16,
    Kind.P32,
    Kind.M,
    Kind.V,
    Kind.ACC,
    Kind.FULL,
    Kind.GRAD,
    Kind.ACT,
)
S = SegmentName

TIED = Trace(
    model="tied",
    tensors=(
        Tensor(name="embedding", numel=640),
        Tensor(name="block", numel=128),
        Tensor(name="frozen", numel=64, trainable=False),
        Tensor(name="unused", numel=64),
    ),
    moments=(
        Moment(name="embed", phase=F, reads=(0,), nonmodel_bytes=100),
        Moment(name="block", phase=F, reads=(1, 2), makes=(0,), nonmodel_bytes=200),
        Moment(name="head", phase=F, reads=(0,), nonmodel_bytes=300, flops=5.0),
        Moment(name="head back", phase=B, reads=(0,), grads=(0,), nonmodel_bytes=300),
        Moment(name="block back", phase=B, reads=(1, 2), grads=(1,), takes=(0,), nonmodel_bytes=200),
        Moment(name="embed back", phase=B, grads=(0,), nonmodel_bytes=100),
    ),
    activations=(Activation(name="x", bytes=100),),
)


def program(ranks=1, **options):
    return Program(trace=TIED, layout=lay_out(TIED, group_numel=1, ranks=ranks), **options)


def uses(made, segment):
    return {visit.name: made.uses(segment, visit) for visit in made.segment_visits(segment)}


def test_gradients_over_weights_and_a_tied_gradient_that_arrives_without_its_payload():
    made = program()
    assert made.overwrites
    assert uses(made, S.MICRO_LAST) == {
        "embed": (Use(Extent(P16, 0), 0, 0),),
        "block": (Use(Extent(P16, 1), 0, 0), Use(Extent(P16, 2), 0, 0), Use(Extent(ACT, 0), None, 0)),
        "head": (Use(Extent(P16, 0), 0, 0),),
        "head back": (Use(Extent(P16, 0), 0, 1),),
        "block back": (Use(Extent(P16, 1), 0, 1), Use(Extent(P16, 2), 0, 0), Use(Extent(ACT, 0), 0, 0)),
        "embed back": (Use(Extent(P16, 0), 1, 2),),
    }
    assert made.completions == ((), (), (), (), (1,), (0,))
    assert (made.stepped, made.last_reads[0], made.last_takes) == ((0, 1), 3, (4,))


def test_evaluation_only_reads_and_stops_before_backward():
    assert uses(program(), S.EVAL) == {
        "embed": (Use(Extent(P16, 0), 0, 0),),
        "block": (Use(Extent(P16, 1), 0, 0), Use(Extent(P16, 2), 0, 0)),
        "head": (Use(Extent(P16, 0), 0, 0),),
    }
    alone = program(training=False)
    assert alone.segments == (S.EVAL,) == alone.iteration()
    assert [visit.grads + visit.makes + visit.takes for visit in alone.visits] == [()] * 6


def test_with_accumulators_gradients_have_bytes_of_their_own():
    made = program(accumulate=2)
    found = uses(made, S.MICRO_FIRST)
    assert found["head back"] == (Use(Extent(P16, 0), 0, 0), Use(Extent(GRAD, 0), None, 1))
    assert found["embed back"] == (Use(Extent(GRAD, 0), 1, 2),)


def test_with_several_processes_moments_read_gathered_groups():
    made = program(ranks=2)
    found = uses(made, S.MICRO_LAST)
    assert found["head back"] == (Use(Extent(FULL, 0), 0, 1),)
    assert (made.compute_weight_of(0), made.local_gradient) == (FULL, Kind.RGRAD)
    assert made.bytes_of(Extent(FULL, 0)) == 2 * made.bytes_of(Extent(P16, 0)) == 2 * 640
    assert made.bytes_of(Extent(Kind.RGRAD, 0)) == 2 * 640  # in fp32


def test_a_group_kept_in_fp32_has_its_master_for_a_weight_and_a_sum_for_its_gradient():
    made = program(ranks=2)
    groups = tuple(replace(group, fp32=group.index == 0) for group in made.layout.groups)
    made = replace(made, layout=replace(made.layout, groups=groups))
    assert uses(made, S.MICRO_LAST)["head back"] == (Use(Extent(FULL, 0), 0, 0), Use(Extent(GRAD, 0), None, 1))
    assert uses(made, S.MICRO_LAST)["block back"][0] == Use(Extent(FULL, 1), 0, 1), "the other goes over its weight"
    assert (made.home_kinds(0), made.home_kinds(1)) == ((P32, M, V, ACC), (P16, P32, M, V))
    assert made.bytes_of(Extent(FULL, 0)) == 2 * made.bytes_of(Extent(P32, 0)) == 2 * 1280
    assert (made.casts(S.PROLOGUE), made.casts(S.SKIP)) == ((1, 3), (1,))


def test_a_group_that_ranks_map_is_gathered_without_bytes():
    copied = program(ranks=2, precision=Precision.FP32)
    groups = tuple(replace(group, common=True) for group in copied.layout.groups)
    mapped = replace(copied, layout=replace(copied.layout, groups=groups))
    assert (copied.gather_bytes(0), mapped.gather_bytes(0)) == (1280, 0)
    assert mapped.sum_bytes(0) == copied.sum_bytes(0) == 1280
    assert (copied.bytes_of(Extent(FULL, 0)), mapped.bytes_of(Extent(FULL, 0))) == (2 * 1280, 128)
    assert mapped.bytes_of(Extent(GRAD, 0)) == copied.bytes_of(Extent(GRAD, 0))


def test_a_payload_that_is_dead_need_not_be_there():
    trace = Trace(
        model="embedding",
        tensors=(Tensor(name="e", numel=64),),
        moments=(Moment(name="f", phase=F, reads=(0,)), Moment(name="b", phase=B, grads=(0,))),
    )
    made = Program(trace=trace, layout=lay_out(trace, group_numel=1))
    assert uses(made, S.MICRO_LAST)["b"] == (Use(Extent(P16, 0), None, 1),)


@pytest.mark.parametrize(
    ("options", "trainable", "frozen"),
    [
        ({}, (P16, P32, M, V), (P16,)),
        ({"accumulate": 2}, (P16, P32, M, V, ACC), (P16,)),
        ({"precision": Precision.FP32}, (P32, M, V, ACC), (P32,)),
        ({"training": False}, (P16,), (P16,)),
    ],
)
def test_what_has_a_home(options, trainable, frozen):
    made = program(**options)
    assert [made.home_kinds(group) for group in range(4)] == [trainable, trainable, frozen, trainable]
    size = sum(made.bytes_of(Extent(kind, 1)) for kind in trainable)
    assert size == 128 * {4: 14, 5: 18, 1: 2}[len(trainable)] + (256 if P16 not in trainable else 0)


@pytest.mark.parametrize("states", range(5))
def test_the_optimizer_has_any_number_of_states(states):
    made = program(states=states)
    assert made.home_kinds(0) == (P16, P32, *STATES[:states])
    assert sum(made.bytes_of(Extent(kind, 1)) for kind in made.home_kinds(1)) == 128 * (6 + 4 * states)
    assert made.exit(S.STEP)[Extent(P32, 0)] == 1
    assert all(made.exit(S.STEP)[Extent(kind, 0)] == 1 for kind in STATES[:states])


@pytest.mark.parametrize("states", [-1, 5])
def test_no_other_number_of_states(states):
    with pytest.raises(InvalidInput, match=f"states must be a whole number of at (least 0|most 4), found {states}"):
        program(states=states)


def states(version, groups=(0, 1, 3)):
    return {Extent(kind, group): version for group in groups for kind in (P32, M, V)}


def weights(*versions):
    return {Extent(P16, group): version for group, version in enumerate(versions) if version is not None}


def test_versions_at_either_end_of_each_segment_with_overwriting():
    made = program()
    fresh = weights(0, 0, 0, 0) | states(0)
    assert made.segments == (S.PROLOGUE, S.MICRO_LAST, S.STEP, S.SKIP, S.EVAL)
    assert made.iteration() == (S.MICRO_LAST, S.STEP)
    assert made.entry(S.PROLOGUE) == weights(None, None, 0, None) | states(0)
    assert made.exit(S.PROLOGUE) == weights(3, 2, 0, 1) | states(0)
    assert made.entry(S.MICRO_LAST) == made.entry(S.EVAL) == made.exit(S.EVAL) == fresh
    assert made.exit(S.MICRO_LAST) == made.entry(S.STEP) == made.entry(S.SKIP) == weights(2, 1, 0, 0) | states(0)
    assert made.exit(S.STEP) == weights(3, 2, 0, 0) | states(1, (0, 1)) | states(0, (3,))
    assert made.exit(S.SKIP) == weights(3, 2, 0, 0) | states(0)
    assert made.casts(S.PROLOGUE) == (0, 1, 3)
    assert made.casts(S.SKIP) == (0, 1)
    assert made.casts(S.STEP) == ()


def test_versions_where_the_last_pass_steps_a_group():
    made = program()
    stepped, skipped = weights(3, 1, 0, 0) | states(1, (0,)) | states(0, (1, 3)), weights(3, 2, 0, 0)
    assert made.entry(S.MICRO_LAST, {0}) == weights(0, 0, 0, 0) | states(0)
    assert made.exit(S.MICRO_LAST, {0}) == made.entry(S.STEP, {0}) == made.entry(S.SKIP, {0}) == stepped
    assert made.exit(S.STEP, {0}) == made.exit(S.STEP)
    assert made.exit(S.SKIP, {0}) == skipped | states(1, (0,)) | states(0, (1, 3))
    assert (made.casts(S.SKIP, {0}), made.casts(S.PROLOGUE, {0})) == ((1,), (0, 1, 3))
    fp32 = program(precision=Precision.FP32)
    assert Extent(ACC, 0) not in fp32.exit(S.MICRO_LAST, {0})
    assert fp32.exit(S.MICRO_LAST, {0})[Extent(ACC, 1)] == 1


@pytest.mark.parametrize(
    ("told", "may"),
    [
        ({}, True),
        ({"precision": Precision.FP32}, True),
        ({"precision": Precision.FP16}, False),
        ({"accumulate": 2}, False),
        ({"copies": 2}, False),
        ({"training": False}, False),
    ],
)
def test_a_pass_may_step_where_nothing_else_decides(told, may):
    assert program(**told).may_step_in_backward is may


def test_versions_with_accumulation():
    made = program(accumulate=3)
    fresh = weights(0, 0, 0, 0) | states(0)
    one, two = ({Extent(ACC, group): count for group in (0, 1)} for count in (1, 2))
    assert made.segments == (S.PROLOGUE, S.MICRO_FIRST, S.MICRO_MID, S.MICRO_LAST, S.STEP, S.SKIP, S.EVAL)
    assert made.iteration() == (S.MICRO_FIRST, S.MICRO_MID, S.MICRO_LAST, S.STEP)
    assert made.entry(S.MICRO_FIRST) == made.entry(S.EVAL) == made.exit(S.SKIP) == fresh
    assert made.exit(S.MICRO_FIRST) == made.entry(S.MICRO_MID) == made.entry(S.MICRO_LAST) == fresh | one
    assert made.exit(S.MICRO_MID) == made.exit(S.MICRO_LAST) == fresh | two
    assert made.entry(S.STEP) == made.entry(S.SKIP) == fresh | one
    assert made.exit(S.STEP) == weights(1, 1, 0, 0) | states(1, (0, 1)) | states(0, (3,))
    assert [made.accumulates_first(name) for name in (S.MICRO_FIRST, S.MICRO_LAST)] == [True, False]
    assert program(accumulate=2).segments[1:3] == (S.MICRO_FIRST, S.MICRO_LAST)


def test_versions_in_single_precision():
    made = program(precision=Precision.FP32)
    fresh = states(0) | {Extent(P32, 2): 0}
    assert made.segments == (S.MICRO_LAST, S.STEP, S.SKIP, S.EVAL)
    assert made.entry(S.MICRO_LAST) == fresh
    assert made.exit(S.MICRO_LAST) == made.entry(S.STEP) == fresh | {Extent(ACC, group): 1 for group in (0, 1)}
    assert made.exit(S.STEP) == fresh | states(1, (0, 1))
    assert made.casts(S.SKIP) == made.casts(S.PROLOGUE) == ()
    assert made.accumulates_first(S.MICRO_LAST)


def test_bytes_are_aligned_and_scratch_is_bounded():
    made = program(ranks=3)
    assert made.bytes_of(Extent(ACT, 0)) == 128
    assert made.bytes_of(Extent(Kind.WIRE, 0)) == made.bytes_of(Extent(FULL, 0)) == 3 * 256 * 2
    large = Trace(model="large", tensors=(Tensor(name="w", numel=10**9),), moments=())
    huge = Program(trace=large, layout=lay_out(large, group_numel=1, ranks=2))
    assert huge.bytes_of(Extent(Kind.WIRE, 0)) == WIRE_BYTES < huge.bytes_of(Extent(FULL, 0))


def test_fragmentation_adds_to_non_model_bytes():
    assert [visit.nonmodel_bytes for visit in program(nonmodel_overhead=0.05).visits[:2]] == [105, 210]


def test_accumulating_less_than_once_is_refused():
    with pytest.raises(InvalidInput, match="accumulate must be a whole number of at least 1, found 0"):
        program(accumulate=0)
    with pytest.raises(InvalidInput, match="accumulate must be a whole number of at most 1024, found 1025"):
        program(accumulate=1025)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"copies": 0}, "copies must be a whole number of at least 1, found 0"),
        ({"states": "x"}, "states must be a whole number of at least 0, found 'x'"),
        ({"accumulate": None}, "accumulate must be a whole number of at least 1, found None"),
        ({"precision": "bf16"}, "precision must be a Precision, found 'bf16'"),
        ({"nonmodel_overhead": float("nan")}, "nonmodel_overhead must be a finite number of at least 0 and at most 10"),
        ({"training": "no"}, "training must be True or False, found 'no'"),
    ],
)
def test_a_program_of_other_values_is_refused(wrong, found):
    with pytest.raises(InvalidInput, match=found):
        program(**wrong)


def test_tiers_links_and_workers():
    for stack in TIER_STACKS:
        check_tiers(tuple(Tier(name, 1) for name in stack))
    with pytest.raises(InvalidInput, match=r"tiers must be one of .*; found 'device-disk'"):
        check_tiers((Tier("device", 1), Tier("disk", 1)))
    three = tuple(Tier(name, 1) for name in TIER_STACKS[-1])
    assert [worker(three, tier) for tier in range(3)] == [Queue.COMPUTE, Queue.CPU, Queue.DISK_W]
    assert [link(*pair) for pair in (("host", "device"), ("device", "host"), ("disk", "host"), ("host", "disk"))] == [
        Queue.H2D,
        Queue.D2H,
        Queue.DISK_R,
        Queue.DISK_W,
    ]
