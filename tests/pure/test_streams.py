"""Output that is read, that nobody reads any more, and that is no file."""

from __future__ import annotations

import io
import os

import pytest

from ps_core._broken_pipe import progress, silence, tell


def test_what_is_told_arrives_at_once() -> None:
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as heard, open(writer, "w", encoding="utf-8") as stream:
        tell("a line", stream)
        assert heard.readline() == "a line\n"


def test_a_reader_that_has_gone_is_told_nothing_more() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream:  # whose end would raise, too
        tell("a line", stream)
        tell("another", stream)
        print("and what others write", file=stream, flush=True)


def test_a_stream_that_is_no_file_is_left_alone() -> None:
    stream = io.StringIO()
    silence(stream)
    tell("a line", stream)
    assert stream.getvalue() == "a line\n"


def test_a_stream_that_was_closed_from_the_start_is_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tell("a line", None)
    assert capsys.readouterr() == ("", "")


class Screen(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_progress_is_one_line_that_goes_in_the_end() -> None:
    screen = Screen(terminal=True)
    with progress(screen) as show:
        show("trying a")
        show("trying b")
    assert [each for each in screen.getvalue().split("\r\x1b[K") if each] == ["trying a", "trying b"]
    assert screen.getvalue().endswith("\r\x1b[K")


def test_without_a_terminal_there_is_no_progress() -> None:
    screen = Screen(terminal=False)
    for stream in (screen, None):
        with progress(stream) as show:
            show("trying a")
    assert screen.getvalue() == ""
