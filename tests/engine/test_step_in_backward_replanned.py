"""Steps within backward where the pass, or the plan after it, is another one than before: the same bits."""

from __future__ import annotations

import pytest
import torch

from _cases import next_token, tokens
from _early_steps import DEVICES, SIZES, keep_plans, managed, stream_states, trained
from _fake_cuda import FakeRuntime
from _runs import let_go
from ps_core._planner.placement import Placement
from ps_core._planner.scores import Scorer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", SIZES)
@pytest.mark.parametrize("streams", [False, True], ids=["by the processor", "also on the device"])
def test_the_weights_of_a_kept_graph_are_left_to_the_step(
    streams: bool, precision: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in use, so that their gradients stay in tensors of their own."""
    if streams:
        stream_states(monkeypatch)
    found = []
    with FakeRuntime(1) as runtime:
        for told in (("cpu", None, "after_backward"), (DEVICES[device](runtime), SIZES[precision][1], "in_backward")):
            model, optimizer = managed(told[0], precision, *told[1:])
            for index in range(6):
                loss = next_token(model, *tokens(index))
                loss.backward(retain_graph=index == 3)
                optimizer.step()
                optimizer.zero_grad()
            found.append([value.clone() for value in model.state_dict().values()])
            let_go(model)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("streams", [False, True], ids=["by the processor", "also on the device"])
def test_a_kept_gradient_that_is_not_finite_changes_nothing_of_its_group(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if streams:
        stream_states(monkeypatch)
    model, optimizer = managed("emulated", "bf16", "110KiB", checkpointing=False)
    for index in range(3):
        next_token(model, *tokens(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    name = "blocks.0.narrow.weight"
    before = model.state_dict()[name].clone()
    model.get_parameter(name).register_hook(lambda grad: grad * float("nan"))
    loss = next_token(model, *tokens(3))
    loss.backward(retain_graph=True)
    with pytest.raises(FloatingPointError, match="no step can be skipped: load a checkpoint"):
        optimizer.step()
    assert torch.equal(model.state_dict()[name], before)
    let_go(model)


@pytest.mark.parametrize("device", ["checked", "late"])
@pytest.mark.parametrize("parts", [(16, 0), (16, 3), (0, 16)])
def test_another_plan_may_follow_between_backward_and_the_step(
    parts: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of gradients that were on the device only, and were used up there, need not be anywhere."""
    place, made = Scorer.placement, keep_plans(monkeypatch)

    def placement(self: Scorer, resident: int, streamed: int, early: bool = False) -> Placement:
        return place(self, resident if made else 0, parts[bool(made)], within=True)

    monkeypatch.setattr(Scorer, "placement", placement)
    right, _ = trained("cpu", "fp32", None, "after_backward")
    with FakeRuntime(1) as runtime:
        on = DEVICES[device](runtime)
        missing = iter([0, 0, 0, 1])  # bytes that the device missed, as asked before each pass and each step
        monkeypatch.setattr(type(on), "take_failed_bytes", lambda _: next(missing, 0))
        got, _ = trained(on, "fp32", "200KiB", "in_backward")
    assert all(map(torch.equal, right, got))
    assert [bool(each.plan.stepped_in_backward) for each in made] == [part > 0 for part in parts]
