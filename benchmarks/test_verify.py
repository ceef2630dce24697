"""What checking a plan costs: the same for every instruction, however long the plan."""

from __future__ import annotations

from typing import Any

import pytest

from ps_core._layout import lay_out
from ps_core._plan import Plan, Tier
from ps_core._planner.make_plan import make_plan
from ps_core._planner.placement import filled
from ps_core._planner.tier_division import make_frame
from ps_core._program import Program
from ps_core._trace import Activation, Moment, Phase, Tensor, Trace
from ps_core._verify import verify

HIDDEN = 12288
TIERS = (Tier("device", 80 * 2**30), Tier("host", 20 * 2**40))


def deep(layers: int, ranks: int) -> tuple[Program, Plan]:
    """A network of layers of width 12,288, nearly all of it below the compute tier."""
    numbers = range(layers)
    forward = [
        Moment(name=f"f{layer}", phase=Phase.FORWARD, reads=(layer,), makes=(layer,), nonmodel_bytes=2**33 + layer)
        for layer in numbers
    ]
    backward = [
        Moment(
            name=f"b{layer}",
            phase=Phase.BACKWARD,
            reads=(layer,),
            grads=(layer,),
            takes=(layer,),
            nonmodel_bytes=2**33 + 2 * layer,
        )
        for layer in reversed(numbers)
    ]
    trace = Trace(
        model=f"{layers} layers",
        tensors=tuple(Tensor(name=f"w{layer}", numel=12 * HIDDEN**2) for layer in numbers),
        moments=(*forward, *backward),
        activations=tuple(Activation(name=f"x{layer}", bytes=4 * 1024 * HIDDEN * 2) for layer in numbers),
    )
    program = Program(trace=trace, layout=lay_out(trace, group_numel=12 * HIDDEN**2, ranks=ranks))
    return program, make_plan(make_frame(program, TIERS, filled(program, TIERS, resident=2)))


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("layers", [96, 384])
@pytest.mark.benchmark(group="verify")
def test_verify(benchmark: Any, layers: int, ranks: int) -> None:
    program, plan = deep(layers, ranks)
    benchmark.extra_info["instructions"] = sum(len(segment.instrs) for segment in plan.segments)
    benchmark(verify, program, plan)
