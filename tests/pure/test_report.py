"""The tide: what is counted, and how it is drawn."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _plans import ORIGINS, random_plan
from _programs import TINY
from ps_core._extents import Precision, SegmentName
from ps_core._plan import Plan, Run, Tier
from ps_core._planner.search import Setup, find_plan
from ps_core._program import Program
from ps_core._simulate.clock import peak_bytes
from ps_core._simulate.machine import MACHINES
from ps_core._trace import Activation, Moment, Phase, Tensor, Trace
from ps_core.report import CATEGORIES, GLYPHS, LETTERS, Category, Column, Tide, tide, tide_svg, tide_text

SVG = "{http://www.w3.org/2000/svg}"


def network(layers: int = 3, numel: int = 64 * 1024) -> Trace:
    forward = [
        Moment(name=f"f{i}", phase=Phase.FORWARD, reads=(i,), makes=(i,), nonmodel_bytes=1000) for i in range(layers)
    ]
    backward = [
        Moment(name=f"b{i}", phase=Phase.BACKWARD, reads=(i,), grads=(i,), takes=(i,), nonmodel_bytes=3000)
        for i in reversed(range(layers))
    ]
    return Trace(
        model="net <&>",
        tensors=tuple(Tensor(name=f"w{i}", numel=numel) for i in range(layers)),
        moments=(*forward, *backward),
        activations=tuple(Activation(name=f"a{i}", bytes=512) for i in range(layers)),
    )


def resident(precision: Precision = Precision.BF16, accumulate: int = 1, ranks: int = 1) -> tuple[Program, Plan]:
    setup = Setup(ranks=ranks, precision=precision, accumulate=accumulate, group_numel=64 * 1024)
    found = find_plan(network(), (Tier("device", 2**24),), MACHINES["t4"], setup=setup)
    return found.program, found.plan


def by_category(column: Column) -> dict[Category, int]:
    return dict(zip(CATEGORIES, column.bytes, strict=True))


def test_a_resident_model_by_hand() -> None:
    found = tide(*resident())
    assert [(column.name, column.phase) for column in found.columns] == [
        *((f"f{i}", "forward") for i in (0, 1, 2)),
        *((f"b{i}", "backward") for i in (2, 1, 0)),
        *((f"step of group {i}", "update") for i in (0, 1, 2)),
    ]
    weight = 2 * 64 * 1024
    rows = [by_category(column) for column in found.columns]
    assert [row[Category.STATES] for row in rows] == [3 * 6 * weight] * 9
    assert [row[Category.WEIGHTS] for row in rows] == [weight * count for count in (3, 3, 3, 2, 1, 0, 0, 1, 2)]
    assert [row[Category.GRADIENTS] for row in rows] == [weight * count for count in (0, 0, 0, 1, 2, 3, 3, 2, 1)]
    assert [row[Category.CHECKPOINTS] for row in rows] == [512 * count for count in (1, 2, 3, 3, 2, 1, 0, 0, 0)]
    assert [row[Category.NONMODEL] for row in rows] == [1000] * 3 + [3000] * 3 + [0] * 3
    assert {row[Category.BUFFERS] for row in rows} == {0}
    assert (found.model, found.tier, found.budget_bytes) == ("net <&>", "device", 2**24)


def test_gathered_groups_and_accumulators_have_their_own_colours() -> None:
    rows = [by_category(column) for column in tide(*resident(ranks=2)).columns]
    assert rows[0][Category.BUFFERS] >= 2 * 64 * 1024
    assert rows[5][Category.GRADIENTS] >= 64 * 1024
    rows = [by_category(column) for column in tide(*resident(accumulate=2)).columns]
    assert all(row[Category.GRADIENTS] >= 3 * 4 * 64 * 1024 for row in rows)
    assert all(row[Category.WEIGHTS] == 3 * 2 * 64 * 1024 for row in rows)
    rows = [by_category(column) for column in tide(*resident(Precision.FP32)).columns]
    assert all(row[Category.WEIGHTS] == 3 * 4 * 64 * 1024 for row in rows)
    assert all(row[Category.STATES] == 3 * 8 * 64 * 1024 for row in rows)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(ORIGINS))
def test_every_moment_is_drawn_and_none_above_the_peak(seed: int, origin: str) -> None:
    program, plan = random_plan(random.Random(seed), origin, TINY)
    found = tide(program, plan)
    last = SegmentName.MICRO_LAST if program.training else SegmentName.EVAL
    runs = [instr.op for instr in plan.segment(last).instrs if isinstance(instr.op, Run)]
    drawn = [column for column in found.columns if column.phase != "update"]
    assert [column.name for column in drawn] == [program.visits[run.visit].name for run in runs]
    nonmodel = CATEGORIES.index(Category.NONMODEL)
    assert [column.bytes[nonmodel] for column in drawn] == [run.nonmodel_bytes for run in runs]
    assert found.peak_bytes <= peak_bytes(program, plan)[plan.tiers[0].name] <= found.budget_bytes
    assert tide_text(found)
    ElementTree.fromstring(tide_svg(found))


def picture(*totals: int, budget: int = 100, phase: str = "forward") -> Tide:
    columns = tuple(Column(f"m{i}", phase, (0, total, 0, 0, 0, 0)) for i, total in enumerate(totals))
    return Tide(model="m", tier="device", budget_bytes=budget, columns=columns)


def chart(text: str) -> list[str]:
    return [line[12:] for line in text.splitlines()[2:] if len(line) > 11 and line[11] in "|│"]


def test_bars_are_as_high_as_their_bytes() -> None:
    rows = chart(tide_text(picture(0, 50, 100), width=3, height=21, ascii_only=True))
    heights = [sum(row[place : place + 1] == "W" for row in rows) for place in range(3)]
    assert heights == [0, 10, 20]
    assert sum("budget" in row for row in rows) == 1


def test_narrow_charts_keep_the_peak_and_wide_ones_repeat() -> None:
    narrow = chart(tide_text(picture(*([10] * 50), 100, *([10] * 50)), width=10, height=21, ascii_only=True))
    assert sum("W" in row for row in narrow) == 20
    wide = chart(tide_text(picture(10, 10), width=10, height=21, ascii_only=True))
    assert wide[-1].startswith("W" * 10)


def test_a_budget_far_above_leaves_the_chart() -> None:
    text = tide_text(picture(10, 20, budget=1000), ascii_only=True)
    assert not any("budget" in row for row in chart(text))
    assert "peak 20 B of 1000 B" in text
    assert "far above" in tide_svg(picture(10, 20, budget=1000))
    assert "far above" not in tide_svg(picture(40, 50))


def test_nothing_to_draw_is_drawn() -> None:
    empty = picture()
    assert "nothing runs" in tide_text(empty)
    ElementTree.fromstring(tide_svg(empty))
    assert tide_text(picture(0, 0)).count("\n") > 10


def test_text_uses_only_plain_letters_on_request() -> None:
    found = tide(*resident())
    plain = tide_text(found, ascii_only=True)
    assert plain.isascii()
    assert all(glyph in tide_text(found) for glyph in (GLYPHS[Category.STATES], GLYPHS[Category.GRADIENTS]))
    assert f"{LETTERS[Category.STATES]} optimizer states" in plain
    assert "gathered groups" not in plain
    assert "at 'b" in plain or "at 'f" in plain
    assert max(map(len, tide_text(found).splitlines())) < 100


def test_phases_are_named_below() -> None:
    text = tide_text(tide(*resident()))
    line = next(line for line in text.splitlines() if "backward" in line and "peak" not in line)
    assert line.split() == ["forward", "|backward", "|update"]
    cramped = replace(picture(1, 2), columns=(Column("a", "forward", (1,) * 6), Column("b", "backward", (1,) * 6)))
    assert "fobac" not in tide_text(cramped, width=72)
    assert "forwback" in tide_text(cramped, width=8).replace(" ", "")


def test_the_picture_stands_alone() -> None:
    svg = tide_svg(tide(*resident()))
    root = ElementTree.fromstring(svg)
    assert "<script" not in svg
    assert not re.search(r"(href|src|@import|url\()", svg)
    assert svg.count("http") == 1  # the namespace
    assert "prefers-color-scheme: dark" in svg
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for wanted in ("forward", "backward", "update", "moments of one step", "bytes in use", "weights", "non-model"):
        assert wanted in texts
    assert any(text and text.startswith("budget ") for text in texts)
    assert root.find(f"{SVG}title") is not None
    assert root.get("role") == "img"
    assert "net &lt;&amp;&gt;" in svg


def test_areas_stack_to_the_columns() -> None:
    root = ElementTree.fromstring(tide_svg(picture(50, 100)))
    paths = list(root.iter(f"{SVG}path"))
    assert len(paths) == 1
    points = [tuple(map(float, pair.split())) for pair in paths[0].get("d", "")[1:-1].split("L")]
    base, heights = max(y for _, y in points), sorted({y for _, y in points})
    assert (base - heights[0]) == pytest.approx(2 * (base - heights[1]), abs=0.05)
    assert min(x for x, _ in points) == 100
    assert max(x for x, _ in points) == 920
