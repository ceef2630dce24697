"""A payload read after its last gradient: the gradient goes over it there, and not before."""

from __future__ import annotations

import pytest

from ps_core._extents import Extent, Kind, Precision, SegmentName, Use
from ps_core._layout import lay_out
from ps_core._program import Program
from ps_core._trace import Moment, Phase, Tensor, Trace

F, B = Phase.FORWARD, Phase.BACKWARD
TRACE = Trace(
    model="read again",
    tensors=(Tensor(name="w", numel=8), Tensor(name="still", numel=8, trainable=False)),
    moments=(
        Moment(name="forward", phase=F, reads=(0, 1)),
        Moment(name="gradient", phase=B, reads=(0,), grads=(0,)),
        Moment(name="read again", phase=B, reads=(0, 1)),
    ),
)


def program(precision=Precision.BF16, **options):
    return Program(trace=TRACE, layout=lay_out(TRACE, group_numel=8), precision=precision, **options)


def test_the_last_read_is_the_last_gradient_moment_where_gradients_overwrite():
    made = program()
    weight = Extent(Kind.P16, 0)
    assert made.gradient_visits == ((1, 2), ())
    assert made.uses(SegmentName.MICRO_LAST, made.visits[1])[0] == Use(weight, 0, 1)
    assert made.uses(SegmentName.MICRO_LAST, made.visits[2])[0] == Use(weight, 1, 2)
    assert made.exit(SegmentName.MICRO_LAST)[weight] == 2


@pytest.mark.parametrize(
    "made", [program(accumulate=2), program(Precision.FP32), program(training=False)], ids=["acc", "fp32", "eval"]
)
def test_nothing_changes_where_gradients_have_bytes_of_their_own(made):
    assert made.visits[2].grads == ()
