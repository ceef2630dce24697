"""Random programs under random budgets, with steps behind backward, within it, or undone: the same bits as resident.

The worker's thread is delayed at random; so are copies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import _models as models
from _cases import next_token, tokens
from _fake_cuda import FakeRuntime
from _runs import HOST, let_go
from checked_device.device import CheckedDevice
from ps_core import SGD, AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from test_host_worker import late_device
from test_speculative_steps import same, undecided, values

LIMITS = (1e-3, 1e9)
ACTIONS = ("nothing", "evaluation", "state dict", "loaded weights", "rate", "larger batch", "frozen")
"""Actions between two steps."""
BEFORE_STEP = ("nothing", "not finite", "gradient read", "no gradients", "another pass", "evaluation", "rate")
"""Actions between backward and its step, where that step can be undone."""


@dataclass(frozen=True)
class Program:
    """A model, and what is done with it."""

    precision: str
    layers: int
    tied: bool
    checkpointing: bool
    momentum: bool
    steps: list[tuple[bool, str, str]]
    """For each step: is it clipped, what comes before it, and what behind it."""

    def model(self) -> models.Language:
        return models.Language(layers=self.layers, tied=self.tied, checkpointing=self.checkpointing)

    def run(self, device: Any, budget: Budget, options: Options, *, clips: bool) -> tuple[list[Tensor], int, int]:
        """Train; return all that can be read, and how many groups were stepped within backward, and undone."""
        torch.manual_seed(0)
        model, optimizer = chunked(
            self.model(),
            SGD(lr=0.1, momentum=0.9) if self.momentum else AdamW(lr=0.01),
            device=device,
            precision=self.precision,
            budget=budget,
            options=options,
            max_grad_norm=LIMITS[1] if clips else None,
        )
        logs: list[Tensor] = []
        early, engine = 0, hooks_of(model).engine
        try:
            for index, (clipped, before, behind) in enumerate(self.steps):
                logs.append(self._pass(model, optimizer, index, spoilt=clips and before == "not finite"))
                early += len(engine.stepping.groups) + undecided(model)
                if clips:
                    logs += act(model, optimizer, before, index)
                    optimizer.max_grad_norm = LIMITS[not clipped]
                optimizer.step()
                if clips:
                    norm = optimizer.last_norm or 0.0
                    logs.append(torch.tensor([norm, optimizer.last_skipped, optimizer.loss_scale]))
                optimizer.zero_grad()
                logs += act(model, optimizer, behind, index)
            logs += values(model, optimizer)
            return logs, early, statistics(model).undone_group_steps
        finally:
            let_go(model)

    def _pass(self, model: Any, optimizer: Any, index: int, *, spoilt: bool) -> Tensor:
        loss = next_token(model, *tokens(index))
        optimizer.scale(loss * float("nan") if spoilt else loss).backward()
        return loss.detach()


def act(model: Any, optimizer: Any, action: str, index: int) -> list[Tensor]:
    """Do something between passes, or between backward and the step."""
    if action == "evaluation":
        with torch.no_grad():
            return [next_token(model, *tokens(50 + index))]
    if action == "state dict":
        return values(model, optimizer)
    if action == "gradient read":
        return [model.blocks[0].wide.weight.grad.clone()]
    if action == "loaded weights":
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    if action == "rate":
        optimizer.param_groups[0]["lr"] *= 0.5
    if action == "no gradients":
        optimizer.zero_grad()
    if action == "another pass":
        optimizer.scale(next_token(model, *tokens(70 + index))).backward()
    if action == "frozen":
        bias = model.blocks[0].wide.bias
        bias.requires_grad_(not bias.requires_grad)
    if action == "larger batch":
        with torch.no_grad():
            return [next_token(model, *tokens(90 + index, batch=8))]
    return []


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A few steps; most of them with nothing in between, so that early steps come and hold."""
    often = st.sampled_from(["nothing"] * 4)
    one = st.tuples(
        st.sampled_from([False, False, False, True]),
        st.one_of(often, st.sampled_from(BEFORE_STEP)),
        st.one_of(often, st.sampled_from(ACTIONS)),
    )
    return Program(
        draw(st.sampled_from(["bf16", "bf16", "fp16", "fp32"])),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.lists(one, min_size=4, max_size=8)),
    )


@dataclass(frozen=True)
class Place:
    """A device and its memory, on which a program runs."""

    device_share: float
    """Of the bytes that the model's data take."""
    host_share: float
    late: bool
    """True: a thread works, late at random; False: copies and work are delayed, and their order is checked."""
    seed: int

    def run(self, program: Program, options: Options, *, clips: bool) -> tuple[list[Tensor], int, int]:
        """Run a program, with more memory as long as it does not fit."""
        each = 16 if program.precision == "fp32" else 14
        data = each * sum(parameter.numel() for parameter in program.model().parameters())
        bytes_of = {"device": int(self.device_share * data), "host": int(self.host_share * data)}
        for _ in range(30):
            runtime = FakeRuntime(self.seed)
            with runtime:
                device = late_device(runtime, self.seed) if self.late else CheckedDevice(check=True, seed=self.seed)
                try:
                    return program.run(device, Budget(**bytes_of), options, clips=clips)
                except DoesNotFit as error:
                    tier = error.tier if error.tier in bytes_of else "host"
                    bytes_of[tier] = bytes_of[tier] * 9 // 8
        raise AssertionError(f"{bytes_of} are not enough")


seen: Counter[str] = Counter()


@settings(max_examples=24)
@given(
    program=programs(),
    step=st.sampled_from(["speculative", "speculative", "speculative", "in_backward", "after_backward"]),
    place=st.builds(
        Place, st.floats(0.3, 0.8), st.sampled_from([0.8, 1.2, 3.0, 3.0]), st.booleans(), st.integers(0, 99)
    ),
    group_bytes=st.sampled_from([1024, 4096, 9000]),
    poison=st.booleans(),
)
def check_a_program(program: Program, step: str, place: Place, group_bytes: int, poison: bool) -> None:
    clips = step != "in_backward"
    if not clips and program.precision == "fp16":
        program = replace(program, precision="bf16")
    expected, _, _ = program.run("cpu", Budget(host=HOST), Options(group_bytes=group_bytes), clips=clips)
    options = Options(group_bytes=group_bytes, step=step, poison=poison)
    got, early, undone = place.run(program, options, clips=clips)
    assert same(expected, got)
    seen[step] += early > 0
    seen["undone"] += undone > 0


def test_random_programs() -> None:
    check_a_program()
    assert min(seen["speculative"], seen["in_backward"], seen["undone"]) >= 2, seen
