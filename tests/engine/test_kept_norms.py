"""Gradients are measured into the same memory at each step, so that no small tensor splits the heap's free blocks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ps_kernels
from _runs import let_go
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._gradients import gradient_store
from ps_core.engine._parameters.state_transitions import GradientPlace

WIDTH = 160
"""On ``cpu`` in fp32, a gradient of ``WIDTH`` x ``WIDTH`` elements is measured alone, and smaller ones together."""
ALL = (0, 1, 2, 3, 4)


class Experts(nn.Module):
    """Layers, of which a pass uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in ALL)

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        for index in used:
            x = self.layers[index](x)
        return x.float().square().mean()


def trained(
    device: str, precision: str, used: Sequence[Sequence[int]], *, inference: int = 0
) -> tuple[list[dict[int, int]], list[float | None]]:
    """Return where each gradient's numbers lie at each step, and the norms of all; the weights stay as they are.

    The first ``inference`` steps are in PyTorch's inference mode.
    """
    torch.manual_seed(0)
    budget = Budget(host="64MiB") if device == "cpu" else Budget(device="64MiB", host="64MiB")
    rule = AdamW(lr=0.0, weight_decay=0.0)
    model, optimizer = chunked(Experts(), rule, device=device, precision=precision, budget=budget)
    engine = hooks_of(model).engine
    places, norms = [], []
    try:
        for number, layers in enumerate(used):
            model(torch.ones(2, WIDTH), layers).backward()
            with torch.inference_mode(number < inference):
                rows = [each for group in engine.groups for each in group.tensors]
                given = [each for each in rows if each.gradient is not GradientPlace.NONE]
                parts = engine.gradients.norm_parts(given)
                places.append({each.index: part.data_ptr() for each, part in zip(given, parts, strict=True)})
                optimizer.step()
            norms.append(optimizer.last_norm)
            optimizer.zero_grad()
    finally:
        let_go(model)
    return places, norms


@pytest.mark.parametrize("inference", [0, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_each_step_measures_into_the_same_memory(device: str, precision: str, inference: int) -> None:
    places, norms = trained(device, precision, [ALL] * 5, inference=inference)
    assert len(places[2]) == 2 * len(ALL)
    assert places[2:] == [places[2]] * 3, "from the first pass by the plan on"
    assert norms == [norms[0]] * 5, "earlier sums of squares do not stay"


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_memory_for_ever_other_parameters_is_not_kept(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = [ALL, (0,), (1, 2), (2, 3), (1,), (0, 3, 4), (4, 2)] * 2
    _, kept = trained(device, "fp32", used)
    monkeypatch.setattr(gradient_store, "_MOST_KEPT", 5)
    measured = list[gradient_store.NormMeasurement]()
    begin = gradient_store.NormMeasurement.__init__

    def note(self: gradient_store.NormMeasurement, *, keeps: bool) -> None:
        begin(self, keeps=keeps)
        measured.append(self)

    monkeypatch.setattr(gradient_store.NormMeasurement, "__init__", note)
    _, few_kept = trained(device, "fp32", used)
    assert few_kept == kept
    assert [sum(len(rows) for _, rows in each._kept.values()) <= 5 for each in measured] == [True]


@pytest.mark.parametrize("fails", [False, True])
def test_a_measurement_that_fails_leaves_no_result(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation moves gradients on the disk from the weights to sums, and measures them again."""
    torch.manual_seed(0)
    layers, parameters = [nn.Linear(136, 136) for _ in range(4)], 4 * 136 * 137
    budget = Budget(
        device=int(parameters * 9.6) + 150_000,
        host=int(parameters * 5.6) + 250_000,
        disk="64MiB",
        disk_dir=str(tmp_path),
    )
    model, optimizer = chunked(
        nn.Sequential(*layers),
        AdamW(lr=0.0, weight_decay=0.0),
        max_grad_norm=1.0,
        device="emulated",
        precision="bf16",
        budget=budget,
        options=Options(group_bytes=20_000),
    )
    measure, raised = ps_kernels.sumsq_finite, []

    def fail_once(*args: Any, **told: Any) -> None:
        if not raised:
            raised.append(True)
            raise MemoryError
        measure(*args, **told)

    norms = []
    try:
        for step in range(4):
            model(torch.ones(4, 136).bfloat16()).float().square().mean().backward()
            if step == 3:
                if fails:
                    monkeypatch.setattr(ps_kernels, "sumsq_finite", fail_once)
                with pytest.raises(MemoryError) if fails else nullcontext(), torch.no_grad():
                    model(torch.ones(4, 136).bfloat16())
            optimizer.step()
            norms.append(optimizer.last_norm)
            optimizer.zero_grad()
    finally:
        let_go(model)
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-6)
