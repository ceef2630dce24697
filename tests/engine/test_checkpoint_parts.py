"""Which bytes of which process's files are whose: every cut there is, in one process and without a model."""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ps_core._extents import Kind
from ps_core.engine._checkpoint.checkpoint_tensors import entries, layout_of
from ps_core.engine._checkpoint.crc32 import joined
from ps_core.engine._checkpoint.manifest import cut as cut_files
from ps_core.engine._checkpoint.shard_ranges import Layout, cut, plain_order, runs, same_order, spans
from ps_core.engine._parameters.param_state import ParamGroup, ParamState


def section_of(groups: tuple[tuple[int, ...], ...], ranks: int) -> dict[str, tuple[ParamState, Kind]]:
    """Tensors of these sizes, by group, as so many processes cut them, in the engine's own records."""
    found = {}
    for number, sizes in enumerate(groups):
        group = ParamGroup(number, Kind.P32, torch.float32, trainable=True, ranks=ranks)
        for size in sizes:
            name, parameter = f"t{len(found)}", torch.nn.Parameter()
            record = ParamState(
                len(found),
                name,
                parameter,  # type: ignore[arg-type]  # nobody asks for it
                torch.Size((size,)),
                (1,),
                torch.float32,
                size,
                True,
                (torch.nn.Parameter, torch.float32),
            )
            group.add(record)
            found[name] = (record, Kind.P32)
    return found


shapes = st.lists(st.lists(st.integers(0, 700), min_size=1, max_size=5).map(tuple), min_size=1, max_size=3).map(tuple)


@example(groups=((64, 0),), writers=1, readers=1, limit=4)
@given(groups=shapes, writers=st.integers(1, 5), readers=st.integers(1, 5), limit=st.integers(4, 3000))
def test_what_any_number_writes_any_number_reads(
    groups: tuple[tuple[int, ...], ...], writers: int, readers: int, limit: int
) -> None:
    """Each element goes from where it was to where it is wanted, each byte is read once, and sums of runs make sums."""
    section, wanted = section_of(groups, writers), section_of(groups, readers)
    values = {
        name: numpy.random.default_rng(hash(name) % 1000).random(r.numel, "f4") for name, (r, _) in section.items()
    }
    files = cut_files("masters", [(rank, entries(section, rank)) for rank in range(writers)], limit)
    found = {name: numpy.full_like(value, numpy.nan) for name, value in values.items()}
    seen = []
    for file in files:
        seen += [(entry.owner, entry.first, entry.numel, tuple(entry.shape)) for entry in file.entries]
        data = b"".join(values[e.owner][e.first : e.first + e.numel].tobytes() for e in file.entries)
        table = file.table
        rows = list(spans(len(table), file.entries, lambda entry: layout_of(wanted[entry.owner][0])))
        assert all(span.wanted and 0 <= span.reader < readers for span in rows)
        for span in rows:
            part = numpy.frombuffer(data[span.start - len(table) : span.stop - len(table)], "f4")
            found[span.entry.owner][span.first : span.first + part.size] = part
            record, _ = wanted[span.entry.owner]
            shard = range(span.reader * record.group.shard_numel, (span.reader + 1) * record.group.shard_numel)
            if part.size:
                assert record.offset + span.first in shard
                assert record.offset + span.first + part.size - 1 in shard
        pieces = runs(rows)
        assert [start for _, start, _ in pieces[1:]] == [stop for *_, stop in pieces[:-1]], "no gap"
        assert all(one[0] != other[0] for one, other in pairwise(pieces)), "runs are as long as can be"
        sums = [(zlib.crc32(data[a - len(table) : b - len(table)]), b - a) for _, a, b in pieces]
        assert joined([(zlib.crc32(table), len(table)), *sums]) == zlib.crc32(table + data)
    assert all((value == values[name]).all() for name, value in found.items())
    assert {name for name, *_ in seen} == values.keys(), "empty ones too"
    assert sum(count for *_, count, _ in seen) == sum(map(sum, groups))
    whole = [name for name, _, count, shape in seen if count == values[name].size]
    assert len(whole) == len(set(whole)), "what is whole is there once"


@given(
    data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=5), repeat=st.sampled_from([1, 1 << 10])
)
def test_sums_of_pieces_make_the_sum_of_the_whole(data: bytes, cuts: list[int], repeat: int) -> None:
    pieces, start = [], 0
    for stop in [*sorted(min(each, len(data)) for each in cuts), len(data)]:
        pieces.append(data[start:stop] * repeat)
        start = stop
    assert joined((zlib.crc32(each), len(each)) for each in pieces) == zlib.crc32(b"".join(pieces))


@given(offset=st.integers(0, 500), first=st.integers(0, 200), count=st.integers(0, 700), shard=st.integers(1, 300))
def test_cuts_are_at_shard_borders_only(offset: int, first: int, count: int, shard: int) -> None:
    rows = list(cut(Layout(offset, shard), first, count))
    elements = [e for _, start, number in rows for e in range(start, start + number)]
    assert elements == list(range(first, first + count))
    for place, start, number in rows:
        assert {(offset + e) // shard for e in range(start, start + number)} == {place}
    assert [place for place, *_ in rows] == sorted({place for place, *_ in rows})


@given(st.lists(st.integers(1, 4), max_size=4), st.randoms())
def test_orders(shape: list[int], random: object) -> None:
    empty = torch.empty(shape)
    assert plain_order(shape) == empty.stride()
    turned = empty.permute(*reversed(range(len(shape)))) if shape else empty
    assert same_order(turned.shape, plain_order(turned.shape), turned.stride()) == turned.is_contiguous()
