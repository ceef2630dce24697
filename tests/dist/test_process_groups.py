"""Which connection of a process takes down torch's default process group."""

from __future__ import annotations

from ps_dist._process_groups import DefaultGroup


def test_the_last_connection_takes_it_down_whoever_made_it() -> None:
    default = DefaultGroup()
    default.add("first", made_here=True)
    default.add("second", made_here=False)
    assert not default.remove("first")
    default.add("third", made_here=False)
    assert not default.remove("third")
    assert default.remove("second")


def test_each_group_is_taken_down_once() -> None:
    default = DefaultGroup()
    for name in ("one", "another"):
        default.add(name, made_here=True)
        assert default.remove(name)
    assert not default.remove("another")


def test_what_the_program_made_is_left_to_it() -> None:
    default = DefaultGroup()
    default.add("first", made_here=False)
    default.add("second", made_here=False)
    assert not default.remove("first")
    assert not default.remove("second")
