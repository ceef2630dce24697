"""Groups and shards: nothing lost, nothing torn, little wasted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _programs import traces
from ps_core._errors import InvalidInput
from ps_core._layout import lay_out
from ps_core._plan import Tier
from ps_core._planner.search import Setup, find_plan, group_sizes
from ps_core._simulate.machine import machine
from ps_core._trace import Moment, Phase, Tensor, Trace
from ps_core._verify import verify
from ps_core._workloads.named_shapes import published_names, shape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload


@given(traces(), st.integers(1, 2000), st.integers(1, 9))
@settings(max_examples=200)
def test_every_tensor_is_whole_in_one_group_and_shards_are_equal_and_aligned(trace, group_numel, ranks):
    layout = lay_out(trace, group_numel=group_numel, ranks=ranks)
    assert sorted(index for group in layout.groups for index in group.tensors) == list(range(len(trace.tensors)))
    learning = {index for moment in trace.moments for index in moment.grads}
    for group in layout.groups:
        ends = [offset + trace.tensors[index].numel for index, offset in zip(group.tensors, group.offsets, strict=True)]
        assert list(group.offsets) == [0, *ends[:-1]]
        assert group.numel == ends[-1]
        assert group.numel <= group_numel or len(group.tensors) == 1
        assert group.shard_numel % 64 == 0
        assert 0 <= group.shard_numel * ranks - group.numel < 64 * ranks
        assert {trace.tensors[index].trainable for index in group.tensors} == {group.trainable}
        assert len({index in learning for index in group.tensors}) == 1
        assert all(layout.group_of[index] == group.index for index in group.tensors)
    padding = sum(group.shard_numel * ranks - group.numel for group in layout.groups)
    assert layout.padding_numel == padding == layout.padded_numel - trace.parameters


@given(traces(), st.integers(1, 2000), st.integers(2, 9))
@settings(max_examples=60)
def test_groups_do_not_depend_on_the_number_of_processes(trace, group_numel, ranks):
    alone, shared = (lay_out(trace, group_numel=group_numel, ranks=count) for count in (1, ranks))
    assert [group.tensors for group in alone.groups] == [group.tensors for group in shared.groups]


def test_groups_follow_first_use_and_end_where_moments_do():
    names = {name: index for index, name in enumerate(["late", "a1", "a2", "b1", "b2", "unused"])}
    tensors = tuple(Tensor(name=name, numel=10) for name in names)
    moments = [
        Moment(name="a", phase=Phase.FORWARD, reads=(1, 2)),
        Moment(name="b", phase=Phase.FORWARD, reads=(3, 4)),
        Moment(name="late", phase=Phase.FORWARD, reads=(0, 1)),
        Moment(name="backward", phase=Phase.BACKWARD, grads=(0, 1, 2, 3, 4)),
    ]
    trace = Trace(model="m", tensors=tensors, moments=tuple(moments))
    groups = lay_out(trace, group_numel=30).groups
    assert [group.tensors for group in groups] == [(1, 2), (3, 4, 0), (5,)]
    assert [group.tensors for group in lay_out(trace, group_numel=15).groups] == [(1,), (2,), (3,), (4,), (0,), (5,)]


@pytest.mark.parametrize("ranks", [1, 8, 32])
@pytest.mark.parametrize("name", published_names())
def test_at_least_98_percent_of_what_is_stored_is_used_at_every_published_size(name, ranks):
    trace = analytic_trace(shape(name), Workload(batch=1, seq=128))
    for numel in group_sizes(trace, Setup(ranks=ranks)):
        layout = lay_out(trace, group_numel=numel, ranks=ranks)
        assert layout.utilisation >= 0.98


@pytest.mark.parametrize("trainable", [True, False])
def test_a_group_of_nothing_but_an_empty_tensor_is_planned(trainable):
    tensors = Tensor(name="a", numel=300), Tensor(name="nothing", numel=0, trainable=trainable)
    grads = (0, 1) if trainable else (0,)
    moments = Moment(name="f", phase=Phase.FORWARD, reads=(0, 1)), Moment(name="b", phase=Phase.BACKWARD, grads=grads)
    trace = Trace(model="m", tensors=tensors, moments=moments)
    layout = lay_out(trace, group_numel=300 if not trainable else 1)
    assert [group.shard_numel for group in layout.groups] == [320, 64]
    tiers = Tier("device", 4096), Tier("host", 2**16)
    planned = find_plan(trace, tiers, machine("v100"), setup=Setup(), layout=layout)
    verify(planned.program, planned.plan)


def test_an_empty_trace_has_an_empty_layout():
    layout = lay_out(Trace(model="m", tensors=(), moments=()), group_numel=1)
    assert (layout.groups, layout.utilisation) == ((), 1.0)


@pytest.mark.parametrize("bad", [{"group_numel": 0}, {"group_numel": 1, "ranks": 0}])
def test_sizes_below_one_are_refused(bad):
    with pytest.raises(InvalidInput, match="at least 1"):
        lay_out(Trace(model="m", tensors=(), moments=()), **bad)
