"""Analytic traces: what is touched when, and how many bytes and operations that is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core._errors import InvalidInput
from ps_core._trace import Moment, Phase, Trace
from ps_core._workloads.named_shapes import bert, gpt, shape
from ps_core._workloads.shapes import Family, TransformerShape, tensors
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

TINY = gpt(3, 64, heads=4, vocabulary=96, positions=64)
TINY_BERT = replace(bert(3, 64, 4, name="tiny-bert"), vocabulary=96, positions=64)
TINY_QWEN = TransformerShape(
    name="tiny-qwen",
    family=Family.QWEN3,
    layers=3,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=160,
    vocabulary=96,
    positions=64,
    tied_head=False,
)
SHAPES = (TINY, TINY_BERT, TINY_QWEN, replace(TINY, tied_head=False, layers=1), replace(TINY_BERT, next_sentence=False))
WORK = Workload(batch=2, seq=32)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    checkpointing = draw(st.booleans())
    return Workload(
        batch=draw(st.integers(1, 4)),
        seq=draw(st.integers(1, 64)),
        precision_bytes=draw(st.sampled_from((2, 4))),
        checkpointing=checkpointing,
        offload_checkpoints=checkpointing and draw(st.booleans()),
        chunked_loss=draw(st.booleans()),
        loss_chunk_tokens=draw(st.integers(1, 100)),
        materialised_attention=draw(st.booleans()),
        dropout=draw(st.booleans()),
        fused=draw(st.booleans()),
        gradient_buffers=draw(st.booleans()),
    )


def moment(trace: Trace, name: str) -> Moment:
    return next(moment for moment in trace.moments if moment.name == name)


def touched(trace: Trace, indices: tuple[int, ...]) -> set[str]:
    return {trace.tensors[index].name for index in indices}


def alive(trace: Trace) -> list[int]:
    """Non-model bytes of each moment together with the activations alive in it."""
    made = {a: i for i, m in enumerate(trace.moments) for a in m.makes}
    last = {a: i for i, m in enumerate(trace.moments) for a in m.takes}
    return [
        m.nonmodel_bytes + sum(a.bytes for n, a in enumerate(trace.activations) if made[n] <= i <= last[n])
        for i, m in enumerate(trace.moments)
    ]


@given(st.sampled_from(SHAPES), workloads())
@settings(max_examples=60)
def test_every_tensor_is_read_in_forward_and_gets_its_gradient(found: TransformerShape, work: Workload) -> None:
    trace = analytic_trace(found, work)
    assert trace.tensors == tensors(found)
    assert trace.tokens == work.batch * work.seq
    forward = {index for m in trace.moments if m.phase is Phase.FORWARD for index in m.reads}
    arrivals = [index for m in trace.moments for index in m.grads]
    every = range(len(trace.tensors))
    assert forward == set(every)
    assert set(arrivals) == set(every)
    # Once each; the tied table's arrives in two parts.
    assert len(arrivals) == len(every) + found.tied_head
    assert arrivals.count(0) == 1 + found.tied_head
    assert Trace.from_json(trace.to_json()) == trace


@given(st.sampled_from(SHAPES), workloads())
@settings(max_examples=60)
def test_nonmodel_bytes_rise_with_batch_and_sequence(found: TransformerShape, work: Workload) -> None:
    small = analytic_trace(found, replace(work, seq=min(work.seq, 63)))
    for more in (replace(work, seq=min(work.seq, 63), batch=work.batch + 1), replace(work, seq=min(work.seq, 63) + 1)):
        large = analytic_trace(found, more)
        for low, high in zip(small.moments, large.moments, strict=True):
            assert low.nonmodel_bytes <= high.nonmodel_bytes, low.name
            assert low.flops <= high.flops
        assert small.peak_nonmodel_bytes <= large.peak_nonmodel_bytes


@given(st.sampled_from(SHAPES), workloads())
@settings(max_examples=60)
def test_checkpointing_lowers_the_peak_and_offload_lowers_it_further(found: TransformerShape, work: Workload) -> None:
    plain = analytic_trace(found, replace(work, checkpointing=False, offload_checkpoints=False))
    kept = analytic_trace(found, replace(work, checkpointing=True, offload_checkpoints=False))
    moved = analytic_trace(found, replace(work, checkpointing=True, offload_checkpoints=True))
    assert plain.peak_nonmodel_bytes >= kept.peak_nonmodel_bytes >= moved.peak_nonmodel_bytes
    # Offload moves bytes from non-model data to activations. In forward a block's input is there itself, too.
    for index, (total, now) in enumerate(zip(alive(moved), moved.moments, strict=True)):
        both = len(now.makes) + (now.phase is Phase.FORWARD and now.name.startswith("layer"))
        copies = both * moved.activations[0].bytes
        assert total - copies == alive(kept)[index] == kept.moments[index].nonmodel_bytes


@pytest.mark.parametrize("name", ["gpt-1b", "gpt-18b", "gpt-175b", "bert-large"])
def test_the_peaks_differ_where_it_matters(name: str) -> None:
    work = Workload(batch=8, seq=512, chunked_loss=True)
    peaks = [
        analytic_trace(shape(name), replace(work, checkpointing=kept, offload_checkpoints=moved)).peak_nonmodel_bytes
        for kept, moved in ((False, False), (True, False), (True, True))
    ]
    assert peaks[0] > 2 * peaks[1] > 2 * peaks[2]


def test_order_and_names_of_the_moments() -> None:
    one = replace(TINY, layers=2)
    assert [m.name for m in analytic_trace(one, WORK).moments] == [
        "embedding",
        "layer 0 attention",
        "layer 0 mlp",
        "layer 1 attention",
        "layer 1 mlp",
        "head",
        "head backward",
        "layer 1 recompute",
        "layer 1 mlp backward",
        "layer 1 attention backward",
        "layer 0 recompute",
        "layer 0 mlp backward",
        "layer 0 attention backward",
        "embedding backward",
    ]
    plain = analytic_trace(one, replace(WORK, checkpointing=False))
    assert not [m.name for m in plain.moments if "recompute" in m.name]


def test_a_checkpointed_block_keeps_its_parameters_until_their_gradients_exist() -> None:
    trace = analytic_trace(TINY, WORK)
    attention = moment(trace, "layer 1 attention").reads
    mlp = moment(trace, "layer 1 mlp").reads
    assert moment(trace, "layer 1 recompute").reads == (*attention, *mlp)
    assert moment(trace, "layer 1 recompute").grads == ()
    assert moment(trace, "layer 1 mlp backward").reads == (*attention, *mlp)
    assert moment(trace, "layer 1 mlp backward").grads == mlp
    assert moment(trace, "layer 1 attention backward").reads == attention
    assert moment(trace, "layer 1 attention backward").grads == attention
    plain = analytic_trace(TINY, replace(WORK, checkpointing=False))
    assert moment(plain, "layer 1 mlp backward").reads == mlp


def test_a_tied_table_is_read_by_the_head_and_not_by_its_own_backward() -> None:
    trace = analytic_trace(TINY, WORK)
    table = "transformer.wte.weight"
    assert table in touched(trace, moment(trace, "head").reads)
    assert table in touched(trace, moment(trace, "head backward").reads)
    assert table in touched(trace, moment(trace, "head backward").grads)
    last = moment(trace, "embedding backward")
    assert last.reads == ()
    assert touched(trace, last.grads) == {table, "transformer.wpe.weight"}
    untied = analytic_trace(replace(TINY, tied_head=False), WORK)
    assert touched(untied, moment(untied, "head").reads) == {
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    }


def test_bert_s_embedding_norm_is_read_in_backward() -> None:
    trace = analytic_trace(TINY_BERT, WORK)
    assert touched(trace, moment(trace, "embedding backward").reads) == {
        "bert.embeddings.LayerNorm.weight",
        "bert.embeddings.LayerNorm.bias",
    }


def test_an_offloaded_checkpoint_lives_between_the_moments_before_its_block_s() -> None:
    trace = analytic_trace(TINY, replace(WORK, offload_checkpoints=True))
    assert [a.bytes for a in trace.activations] == [2 * 64 * 64] * 3
    made = [[m.name for m in trace.moments if layer in m.makes] for layer in range(3)]
    assert made == [["embedding"], ["layer 0 mlp"], ["layer 1 mlp"]]
    taken = [[m.name for m in trace.moments if layer in m.takes] for layer in range(3)]
    assert taken == [["layer 1 attention backward"], ["layer 2 attention backward"], ["head backward"]]
    assert analytic_trace(TINY, WORK).activations == ()


# One block of GPT-2 keeps 32 bytes a token and hidden element (its input included) besides statistics.
def test_bytes_of_a_block_follow_the_published_count() -> None:
    tokens, hidden, heads, layers = 64, 64, 4, 3
    plain = analytic_trace(TINY, replace(WORK, checkpointing=False))
    per_block = 32 * tokens * hidden + tokens * (8 + 8 + 4 * heads)
    steps = [moment(plain, f"layer {layer} attention").nonmodel_bytes for layer in range(layers)]
    assert [high - low for low, high in pairwise(steps)] == [per_block] * 2
    kept = analytic_trace(TINY, WORK)
    steps = [moment(kept, f"layer {layer} attention").nonmodel_bytes for layer in range(layers)]
    assert [high - low for low, high in pairwise(steps)] == [2 * tokens * hidden] * 2


# Written out once by hand, so that a slip in any term shows.
def test_every_moment_of_one_block_by_hand() -> None:
    x, wide = 2 * 64 * 64, 2 * 64 * 256
    inputs, stats, sums = 16 * 64, 8 * 64, 4 * 4 * 64
    attention, mlp = 6 * x + stats + sums, x + 2 * wide + stats
    buffer = 2 * 64 * 256
    trace = analytic_trace(replace(TINY, layers=1), WORK)
    logits = 12 * 64 * 96
    assert [m.nonmodel_bytes - inputs for m in trace.moments] == [
        2 * x + 2 * 32 * 64,
        x + 5 * x,
        2 * x + x + 2 * wide,
        x + 2 * x + logits,
        x + 3 * x + logits,
        2 * x + attention + mlp + x,
        2 * x + attention + mlp + x + wide + buffer,
        2 * x + attention + 5 * x + 4 * 64 * (64 + 4) + 2 * 64 * 3 * 64,
        x + 2 * 96 * 64,
    ]


def test_bytes_of_the_options() -> None:
    tokens, scores = 64, 2 * 4 * 2 * 32 * 32
    base = replace(WORK, checkpointing=False)

    def peak(name: str, found: TransformerShape = TINY, **changes: object) -> int:
        return moment(analytic_trace(found, replace(base, **changes)), name).nonmodel_bytes  # type: ignore[arg-type]

    def gain(name: str, **changes: object) -> int:
        return peak(name, **changes) - peak(name)

    assert gain("layer 0 mlp", materialised_attention=True) == scores
    assert gain("layer 0 attention backward", materialised_attention=True) == 3 * scores
    assert gain("embedding", dropout=True) == tokens * 64
    assert gain("layer 0 mlp", dropout=True) == 3 * tokens * 64
    assert gain("layer 0 attention", fused=False) == 0
    assert gain("layer 0 mlp", fused=False) == 3 * 2 * tokens * 256
    assert gain("layer 0 mlp backward", fused=False) == 4 * 2 * tokens * 256
    assert gain("layer 0 mlp backward", gradient_buffers=False) == -2 * 64 * 256
    # A chunk's logits, or the gradients that are made at once: of hidden states, logits, and of the matrix and its sum.
    assert gain("head", chunked_loss=True, loss_chunk_tokens=63) == -12 * 96
    made = 2 * 64 * 64 + 2 * 16 * 96 + (2 + 4) * 96 * 64
    assert gain("head", chunked_loss=True, loss_chunk_tokens=16) == made - 12 * 64 * 96
    assert gain("head", logit_bytes=10) == -2 * 64 * 96
    # The table's gradient and, in fp32, the sum that a chunk's is added to.
    small = replace(base, chunked_loss=True, loss_chunk_tokens=1)
    chunk = moment(analytic_trace(TINY, small), "head backward").nonmodel_bytes
    assert chunk == peak("head backward") - 12 * 64 * 96 + 2 * 96 + (2 + 4) * 96 * 64
    x, queries, keys = 2 * 64 * 64, 2 * 64 * 128, 2 * 64 * 64
    block = x + 2 * x + 2 * queries + 2 * keys + queries + keys + 64 * (8 + 4 * 4 + 4 * 6)
    block += x + 4 * 2 * 64 * 160 + 64 * 8
    assert peak("layer 1 attention", TINY_QWEN) - peak("layer 0 attention", TINY_QWEN) == block
    # Norms in pieces: before the block's two branches (64 wide each), of queries (128) and of keys (64).
    for precision_bytes, piece in ((2, 2 + 4), (4, 4)):
        whole, pieces = (
            peak("layer 0 mlp", TINY_QWEN, precision_bytes=precision_bytes, fused=fused) for fused in (True, False)
        )
        assert pieces - whole == piece * tokens * (64 + 64 + 128 + 64)


@pytest.mark.parametrize("found", [shape("gpt2"), shape("gpt-175b"), shape("bert-base"), TINY_QWEN])
def test_forward_operations_follow_the_standard_formula(found: TransformerShape) -> None:
    work = Workload(batch=2, seq=min(512, found.positions))
    trace = analytic_trace(found, work)
    tokens = work.tokens
    others = ("norm", "ln_", "wpe", "wte", "embed")
    matrices = sum(
        tensor.numel
        for tensor in trace.tensors
        if tensor.name.endswith(".weight") and not any(word in tensor.name.lower() for word in others)
    )
    matrices += found.vocabulary * found.hidden * found.tied_head
    attention = 4.0 * found.layers * tokens * work.seq * found.query_width
    expected = 2.0 * matrices * tokens + attention
    forward = sum(m.flops for m in trace.moments if m.phase is Phase.FORWARD)
    assert forward == pytest.approx(expected, rel=0.01)


def test_backward_doubles_forward_and_recomputation_adds_a_third_run() -> None:
    def flops(work: Workload, phase: Phase) -> float:
        return sum(m.flops for m in analytic_trace(TINY, work).moments if m.phase is phase)

    head = moment(analytic_trace(TINY, WORK), "head").flops
    forward = flops(WORK, Phase.FORWARD)
    assert flops(replace(WORK, checkpointing=False), Phase.BACKWARD) == 2 * forward
    assert flops(WORK, Phase.BACKWARD) == 3 * forward - head
    assert flops(replace(WORK, chunked_loss=True), Phase.BACKWARD) == 3 * forward


def instructions(call: Callable[[], object]) -> int:
    """Count the instructions of Python that a call executes."""
    count = 0

    def traced(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_tracing_takes_as_much_for_every_layer() -> None:
    """For 175B that is 700,000 instructions, some tens of milliseconds: with Python 3.11, 1,430 for each moment."""
    largest = shape("gpt-175b")
    short, half, whole = (
        instructions(partial(analytic_trace, replace(largest, layers=layers), Workload())) for layers in (24, 48, 96)
    )
    assert whole < 1_000_000
    assert whole - half < 2.02 * (half - short)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "batch must be a whole number"),
        ({"seq": True}, "seq must be a whole number"),
        ({"checkpointing": 1}, "checkpointing must be True or False"),
        ({"precision_bytes": 3}, "precision_bytes must be 2 or 4"),
        ({"offload_checkpoints": True, "checkpointing": False}, "needs checkpointing"),
    ],
)
def test_impossible_work_is_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Workload(**options)


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(InvalidInput, match="64 positions, too few for a sequence of 65"):
        analytic_trace(TINY, Workload(seq=65))
