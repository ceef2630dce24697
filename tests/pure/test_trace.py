"""Traces: what they refuse, and the way to JSON and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from _programs import traces
from ps_core._errors import InvalidInput
from ps_core._trace import Activation, Amounts, Moment, Phase, Tensor, Trace

F, B = Phase.FORWARD, Phase.BACKWARD
A = Tensor(name="a", numel=3)
FROZEN = Tensor(name="frozen", numel=2, trainable=False)


def trace(*moments, tensors=(A, FROZEN), activations=(), tokens=0):
    return Trace(model="m", tensors=tensors, moments=moments, activations=activations, tokens=tokens)


def moment(name="x", phase=F, **more):
    return Moment(name=name, phase=phase, **more)


@given(traces())
@settings(max_examples=60)
def test_json_gives_the_trace_back(made):
    assert Trace.from_json(made.to_json()) == made


def test_a_file_of_an_earlier_version_says_no_precision():
    made = trace(moment())
    data = json.loads(made.to_json())
    assert data.pop("precision") == ""
    assert Trace.from_json(json.dumps(data)) == made
    in_bf16 = Trace(model="m", tensors=(A,), moments=(), precision="bf16")
    assert json.loads(in_bf16.to_json())["precision"] == "bf16"
    assert Trace.from_json(in_bf16.to_json()) == in_bf16


def test_sums():
    made = trace(moment(nonmodel_bytes=7), moment(nonmodel_bytes=9))
    assert (made.parameters, made.peak_nonmodel_bytes) == (5, 9)
    assert trace().peak_nonmodel_bytes == 0


def test_what_moments_compute_adds_up():
    one = moment(flops=8.0, attention_flops=3.0, elements=5.0, tanhs=1.0)
    other = moment(flops=4.0, elements=2.0, queries=6.0, queries_backward=7.0)
    assert one.amounts == Amounts(flops=8.0, attention_flops=3.0, elements=5.0, tanhs=1.0)
    assert one.amounts.plus(other.amounts) == Amounts(
        flops=12.0, elements=7.0, attention_flops=3.0, queries=6.0, queries_backward=7.0, tanhs=1.0
    )


X = Activation(name="x", bytes=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: trace(tokens=-1), "tokens must be a whole number"),
        (lambda: Trace(model="m", tensors=(), moments=(), precision=None), "expected a text, found None"),
        (lambda: trace(tensors=(Tensor(name="a", numel=-1),)), "numel of 'a' must be a whole number of at least 0"),
        (lambda: trace(tensors=(Tensor(name=3, numel=1),)), "expected a text"),
        (lambda: trace(tensors=(A, A)), "two tensors have the same name"),
        (lambda: trace(tensors=(Tensor(name="a", numel=1, trainable=1),)), "must be true or false"),
        (lambda: trace(moment(reads=(2,))), "reads of 'x' names 2, but there are 2"),
        (lambda: trace(moment(reads=(True,))), "names True"),
        (lambda: trace(moment(reads=(0, 0))), "names 0 twice"),
        (lambda: trace(moment(phase="backward", grads=(0,))), "phase of 'x' must be a Phase, found 'backward'"),
        (lambda: trace(moment(phase=None)), "phase of 'x' must be a Phase, found None"),
        (lambda: trace(moment(nonmodel_bytes=-1)), "nonmodel_bytes of 'x'"),
        (lambda: trace(moment(nonmodel_bytes=True)), "nonmodel_bytes of 'x'"),
        (lambda: trace(moment(flops=-1.0)), "flops of 'x'"),
        (lambda: trace(moment(flops=float("nan"))), "flops of 'x'"),
        (lambda: trace(moment(flops="1")), "flops of 'x'"),
        (lambda: trace(moment(flops=1e308)), "flops of 'x' .* at most 1e[+]30, found 1e[+]308"),
        (lambda: trace(moment(tanhs=1e31)), "tanhs of 'x' .* at most 1e[+]30, found 1e[+]31"),
        (
            lambda: trace(moment(flops=10**400)),
            "flops of 'x' must be a finite number of at least 0 and at most 1e[+]30, found a whole number",
        ),
        (
            lambda: trace(moment(nonmodel_bytes=10**400)),
            "nonmodel_bytes of 'x' must be a whole number of at most 46116",
        ),
        (lambda: trace(moment(flops=1.0, attention_flops=2.0)), "attention_flops of 'x' must be a part of its 1 flops"),
        (lambda: trace(moment(elements=-1.0)), "elements of 'x'"),
        (lambda: trace(moment(grads=(0,))), "has gradients"),
        (lambda: trace(moment(phase=B), moment()), "comes after a backward one"),
        (lambda: trace(moment(phase=B, grads=(1,))), "a gradient arrives for the frozen 'frozen'"),
        (lambda: trace(moment(phase=B, makes=(0,)), activations=(X,)), "makes activations that outlive it"),
        (lambda: trace(moment(makes=(0,)), activations=(X,)), "made once and taken at least once"),
        (lambda: trace(moment(phase=B, takes=(0,)), activations=(X,)), "made once and taken at least once"),
        (lambda: trace(activations=(Activation(name="x", bytes=0),)), "bytes of 'x'"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(make, words):
    with pytest.raises(InvalidInput, match=words):
        make()


GOOD = json.loads(trace(moment(reads=(0,)), moment(phase=B, grads=(0,))).to_json())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "nonsense",
        json.dumps(GOOD | {"format": "other"}),
        json.dumps({key: value for key, value in GOOD.items() if key != "tensors"}),
        json.dumps(GOOD | {"extra": 1}),
        json.dumps(GOOD | {"model": 3}),
        json.dumps(GOOD | {"moments": [{"name": "x", "phase": "sideways"}]}),
        json.dumps(GOOD | {"moments": [{"name": "x"}]}),
        json.dumps(GOOD | {"moments": [{"name": "x", "phase": "forward", "reads": 3}]}),
        json.dumps(GOOD | {"moments": 3}),
        json.dumps(GOOD | {"moments": ["x"]}),
        json.dumps(GOOD | {"tensors": [{"name": "a", "numel": "many"}]}),
        "[" * 100_000,
    ],
)
def test_a_damaged_document_gets_one_clear_line(text):
    with pytest.raises(InvalidInput) as caught:
        Trace.from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": 1}, "the trace has an unknown 'extra'"),
        ({"tensors": 3}, "tensors must be a list, found 3"),
        ({"tensors": {"a": 1}}, "tensors must be a list, found {'a': 1}"),
        ({"tensors": ["x"]}, r"tensors\[0\] must be an object, found 'x'"),
        ({"tensors": [*GOOD["tensors"], {"name": "c"}]}, r"tensors\[2\] lacks 'numel'"),
        ({"tensors": [{"name": "c", "numel": 1, "color": 1}]}, r"tensors\[0\] has an unknown 'color'"),
        ({"activations": [[]]}, r"activations\[0\] must be an object, found \[\]"),
        ({"activations": [{"bytes": 1}]}, r"activations\[0\] lacks 'name'"),
        ({"moments": None}, "moments must be a list, found None"),
        ({"moments": [7]}, r"moments\[0\] must be an object, found 7"),
        ({"moments": [{"name": "x"}]}, r"moments\[0\] lacks 'phase'"),
        ({"moments": [{"phase": "forward"}]}, r"moments\[0\] lacks 'name'"),
        ({"moments": [{"name": "x", "phase": "sideways"}]}, r"phase of moments\[0\] must be .*, found 'sideways'"),
        ({"moments": [{"name": "x", "phase": []}]}, r"phase of moments\[0\] must be forward or backward, found \[\]"),
        (
            {"moments": [{"name": "x", "phase": "forward", "reads": 3}]},
            r"reads of moments\[0\] must be a list, found 3",
        ),
        ({"moments": [{"name": "x", "phase": "forward", "makes": "01"}]}, r"makes of moments\[0\] must be a list"),
    ],
)
def test_a_damaged_document_is_told_where_in_its_own_words(change, words):
    with pytest.raises(InvalidInput, match=f"not a trace: {words}"):
        Trace.from_json(json.dumps(GOOD | change))


@pytest.mark.parametrize("key", ["model", "tensors", "moments", "activations", "tokens"])
def test_what_a_document_lacks_is_named(key):
    with pytest.raises(InvalidInput, match=f"not a trace: the trace lacks '{key}'"):
        Trace.from_json(json.dumps({each: value for each, value in GOOD.items() if each != key}))


def test_a_document_cut_anywhere_is_refused():
    text = json.dumps(GOOD)
    for end in range(len(text)):
        with pytest.raises(InvalidInput):
            Trace.from_json(text[:end])
