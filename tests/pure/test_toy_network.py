"""The small network: its gradients are right, its moments pure, its trace honest, and it learns."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from ps_core._errors import InvalidInput
from ps_core._extents import Precision
from ps_core._layout import lay_out
from ps_core._options import Adam
from ps_core._program import Program
from ps_core._reference.floats import singles
from ps_core._reference.oracle import train_unconstrained
from ps_core._reference.toy_network import TEXT, ByteNetwork, Shape, make_trace
from ps_core._reference.training_rules import Call, Training
from ps_core._trace import Phase

SMALL = Shape(layers=2, width=4, hidden=6, tokens=5)


def one_pass(network, weights, *, batch, scale=1.0, training=True):
    """All moments; the loss, the gradients, and what was saved after each."""
    saved, activations, gradients, loss, kept = {}, {}, {}, None, []
    for index, moment in enumerate(network.trace.moments):
        if not training and moment.phase is Phase.BACKWARD:
            break
        call = Call(
            moment=index,
            weights={tensor: weights[tensor] for tensor in moment.reads},
            activations={name: activations[name] for name in moment.takes},
            saved=saved,
            batch=batch,
            loss_scale=scale,
            training=training,
        )
        outcome = network.run(call)
        kept.append((saved, outcome.saved))
        saved = outcome.saved
        activations.update(outcome.activations)
        assert set(outcome.activations) == (set(moment.makes) if training else set())
        assert set(outcome.grads) == set(moment.grads)
        loss = loss if outcome.loss is None else outcome.loss
        for tensor, gradient in outcome.grads.items():
            before = gradients.get(tensor, [0.0] * len(gradient))
            gradients[tensor] = [a + b for a, b in zip(before, gradient, strict=True)]
    return loss, gradients, kept


def trained_a_little(network):
    """Weights that are nowhere zero, so that every path of the gradient counts."""
    return [
        singles([value + 0.1 * ((index * 7 + place) % 5 - 2) for place, value in enumerate(network.initial(index))])
        for index in range(len(network.trace.tensors))
    ]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_agree_with_differences(checkpointing):
    network = ByteNetwork(replace(SMALL, checkpointing=checkpointing))
    weights, batch, eps = trained_a_little(network), network.batch(0, 0, 0), 1e-2
    _, gradients, _ = one_pass(network, weights, batch=batch)
    for tensor, weight in enumerate(weights):
        for place in range(0, len(weight), max(1, len(weight) // 9)):
            losses = []
            for sign in (1, -1):
                moved = [array("f", row) for row in weights]
                moved[tensor][place] += sign * eps
                losses.append(one_pass(network, moved, batch=batch, training=False)[0])
            slope = (losses[0] - losses[1]) / (2 * eps)
            assert gradients[tensor][place] == pytest.approx(slope, abs=2e-3), (tensor, place)


def test_checkpointing_changes_no_bit_and_scaling_only_the_scale():
    plain, checkpointed = (
        ByteNetwork(SMALL),
        ByteNetwork(Shape(layers=2, width=4, hidden=6, tokens=5, checkpointing=True)),
    )
    weights, batch = trained_a_little(plain), plain.batch(3, 1, 2)
    loss, gradients, _ = one_pass(plain, weights, batch=batch)
    assert one_pass(checkpointed, weights, batch=batch)[:2] == (loss, gradients)
    assert one_pass(plain, weights, batch=batch, training=False)[0] == loss
    scaled = one_pass(plain, weights, batch=batch, scale=8.0)[1]
    assert all(
        value == pytest.approx(8 * gradients[tensor][place], rel=1e-4, abs=1e-7)
        for tensor, row in scaled.items()
        for place, value in enumerate(row)
    )


def size(saved) -> int:
    """Bytes of everything a process keeps, each row once."""
    rows: dict[int, int] = {}

    def visit(value):
        if isinstance(value, array):
            rows[id(value)] = 4 * len(value)
        else:
            for item in value.values() if isinstance(value, dict) else value:
                visit(item)

    visit(saved)
    return sum(rows.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nonmodel_bytes_cover_what_is_kept_and_little_more(checkpointing):
    network = ByteNetwork(Shape(checkpointing=checkpointing))
    weights = [network.initial(index) for index in range(len(network.trace.tensors))]
    _, _, kept = one_pass(network, weights, batch=network.batch(0, 0, 0))
    for moment, (before, after) in zip(network.trace.moments, kept, strict=True):
        assert moment.nonmodel_bytes >= size([before, after]), moment.name
        assert moment.nonmodel_bytes <= size([before, after]) + 20_000
    assert all(activation.bytes == 4 * 16 * 16 for activation in network.trace.activations)


def test_the_tide_rises_and_falls():
    levels = [moment.nonmodel_bytes for moment in make_trace(Shape()).moments]
    top = levels.index(max(levels))
    assert levels[0] < levels[1] < levels[2] < levels[top]
    assert levels[-1] < levels[-2] < levels[top]


def test_data_differ_by_iteration_micro_batch_and_process():
    network = ByteNetwork()
    batches = {network.batch(*where) for where in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))}
    assert len(batches) == 4
    assert all(batch in TEXT and len(batch) == 17 for batch in batches)


def test_it_learns():
    network = ByteNetwork(Shape(layers=1, tokens=24))
    program = Program(trace=network.trace, layout=lay_out(network.trace, group_numel=1000), precision=Precision.FP32)
    training = Training(batch=lambda *_: TEXT[:25], iterations=25, optimizer=Adam(lr=0.02))
    losses = train_unconstrained(network, program, training).losses
    assert losses[0] > 3
    assert losses[-1] < 0.5


def test_shapes_are_checked():
    with pytest.raises(InvalidInput):
        Shape(layers=0)
