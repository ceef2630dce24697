"""Errors that say what to do, and sizes as people write them."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core import _errors
from ps_core._errors import DoesNotFit, IllegalTransition, InvalidInput, PatrickStarError
from ps_core._units import align_up, format_bytes, format_count, meant_as_gib, parse_bytes


def test_every_error_is_one_of_ours_and_in_the_drawing():
    drawn = _errors.__doc__ or ""
    errors = [item for item in vars(_errors).values() if isinstance(item, type)]
    assert len(errors) == 12
    assert all(issubclass(error, PatrickStarError) and error.__name__ in drawn for error in errors)
    assert issubclass(InvalidInput, ValueError)


@pytest.mark.parametrize(
    "error",
    [
        DoesNotFit(tier="device", moment="head", needed_bytes=5, available_bytes=3, proven=True, remedies=("more",)),
        DoesNotFit(tier="device", moment="head", needed_bytes=5, available_bytes=3, proven=True, depends_on_batch=True),
        IllegalTransition(subject="weight", state="FREE", event="step", expected=("fetch",)),
        InvalidInput("no such size"),
    ],
)
def test_errors_can_be_copied_and_sent_to_another_process(error):
    error.add_note("in a worker")
    for found in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert vars(found) == vars(error)
        assert found.args == error.args


def test_does_not_fit_says_where_how_much_and_what_to_try():
    error = DoesNotFit(
        tier="device", moment="head", needed_bytes=2048, available_bytes=1024, proven=True, remedies=("batch 2", "more")
    )
    assert str(error) == (
        "does not fit: device needs 2,048 bytes at 'head', more than the 1,024 bytes it has\n"
        "  try: batch 2\n  try: more"
    )
    near = DoesNotFit(tier="host", moment="m", needed_bytes=1, available_bytes=1, proven=False)
    assert "within one extent of" in str(near)


@pytest.mark.parametrize("depends_on_batch", [False, True])
def test_libraries_take_what_a_smaller_batch_helps_for_out_of_memory(depends_on_batch):
    """By the words that Accelerate and Lightning look for, which people do not see."""
    error = DoesNotFit(
        tier="device",
        moment="head",
        needed_bytes=2,
        available_bytes=1,
        proven=True,
        remedies=("half the batch",),
        depends_on_batch=depends_on_batch,
    )
    assert isinstance(error, RuntimeError)
    (argument,) = error.args
    assert ("CUDA out of memory." in argument) is depends_on_batch
    assert str(error).endswith("more than the 1 bytes it has\n  try: half the batch")


def test_an_illegal_transition_names_what_would_be_legal():
    error = IllegalTransition(subject="w", state="FREE", event="pre_forward", expected=("allocate",))
    assert str(error) == "w: 'pre_forward' cannot happen in state FREE; legal here: allocate"
    assert "legal here: nothing" in str(IllegalTransition(subject="w", state="FREE", event="x", expected=()))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("20GiB", 20 * 2**30),
        ("20 gib", 20 * 2**30),
        ("20GB", 20 * 10**9),
        ("1.5KiB", 1536),
        (" 0.5 TB ", 5 * 10**11),
        ("7B", 7),
        ("24G", 24 * 2**30),
        ("1.5m", 3 * 2**19),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "20Gb?",
        "",
        "GiB",
        "-1",
        "1e9",
        "20 XB",
        "24X",
        "G",
        "9" * 30,
        2**70,
        pytest.param(10**5000, id="5000 digits"),
        -5,
        True,
        2.5,
        None,
    ],
)
def test_what_is_no_size_is_refused_in_one_line(text):
    with pytest.raises(InvalidInput) as caught:
        parse_bytes(text)
    assert "\n" not in str(caught.value)


@given(st.integers(0, 2**60))
def test_whole_numbers_are_read_exactly(size):
    assert parse_bytes(str(size)) == parse_bytes(size) == size


PRINTED = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5 << 20: "5.0 MiB", 3 << 40: "3.00 TiB", -2048: "-2.0 KiB"}


@pytest.mark.parametrize(("size", "text"), PRINTED.items())
def test_printed_sizes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12"), (1500, "1.5K"), (124_439_808, "124M"), (18_330_923_008, "18.3B"), (10**12, "1T")]
)
def test_printed_counts(count, text):
    assert format_count(count) == text


def test_alignment():
    assert [align_up(count) for count in (0, 1, 128, 129)] == [0, 128, 128, 256]
    assert align_up(5, 4) == 8


@pytest.mark.parametrize(
    ("size", "meant"),
    [(24, "24GiB"), (" 24 ", "24GiB"), (4095, "4095GiB"), (4096, ""), (0, ""), ("24B", ""), ("1.5", ""), (None, "")],
)
def test_small_numbers_without_a_unit(size, meant):
    assert meant_as_gib(size) == meant
