"""The first pass of ranks that share a model: by a plan where every rank can foresee it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from _one_process import adds_like
from _threads import Together, run
from _zero_cases import states
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, offloaded, release, statistics
from ps_core.engine._execution import pass_estimates
from ps_core.engine._tracing.batch_shape import describe_call
from test_planned_ranks import Experts, Pass, one_pass


class Unforeseen(Experts):
    """Looks at a value where the pass says that it fails, which fake tensors do not have; it does not fail."""

    def forward(self, x: torch.Tensor, done: Pass, held: list[torch.Tensor]) -> torch.Tensor:
        if done.fails:
            float(x.sum())
        return super().forward(x, Pass(done.chosen), held)


class Twofold(Experts):
    """Uses another expert when it runs than when it is foreseen."""

    def forward(self, x: torch.Tensor, done: Pass, held: list[torch.Tensor]) -> torch.Tensor:
        foreseen = isinstance(x, torch._subclasses.FakeTensor)
        return super().forward(x, Pass((3,)) if foreseen and done.fails else Pass(done.chosen), held)


def trained(each: Together, kind: type[Experts], first: tuple[Pass, ...], precision: str, kib: int | None) -> Any:
    """Three steps beside one process; per step the planned passes, divergences and questions."""
    fronts: list[tuple[nn.Module, Any]] = []
    for together in (each, None):
        device = "cpu" if kib is None or together is None else "emulated"
        budget = Budget(host=2**24) if device == "cpu" else Budget(device=(kib or 0) * 2**10, host=2**24)
        options = Options(group_bytes=16 * 18 * (4 if precision == "fp32" else 2), poison=device != "cpu")
        fronts.append(
            chunked(
                kind(),
                AdamW(lr=1e-2),
                device=device,
                budget=budget,
                precision=precision,
                accumulation_steps=1 if together else 2,
                collectives=together,
                options=options,
            )
        )
    (model, optimizer), (single, reference) = fronts
    rows = []
    for step in range(3):
        parts = first if not step else [Pass((0, 1))] * 2
        one_pass(model, step, each.rank, parts[each.rank], [])

        def alone(part: int, step: int = step, parts: Any = parts) -> None:
            one_pass(single, step, part, Pass(parts[part].chosen), [])

        adds_like(each.mesh, single, reference, alone, 2, rounds=precision != "fp32")
        for front in (optimizer, reference):
            front.step()
            front.zero_grad()
        found, wanted = states(optimizer), states(reference)
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), step
        told = statistics(model)
        rows.append((told.planned_passes, told.divergences, each.asked > 0))
    assert all(tier.peak_bytes <= tier.budget_bytes for tier in statistics(model).tiers.values())
    release(model)
    release(single)
    return rows


@pytest.mark.parametrize("kib", [None, 12, 40])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_follow_a_plan_in_their_first_pass_already(precision: str, kib: int | None) -> None:
    found, meeting = run(2, trained, Experts, (Pass((0, 1)), Pass((1, 2))), precision, kib)
    assert found == [[(1, 0, False), (2, 0, False), (3, 0, False)]] * 2
    assert "the recorded pass" not in meeting.log, "the estimate held"


@pytest.mark.parametrize("kib", [None, 12])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_one_rank_cannot_foresee_its_pass_the_first_one_follows_no_plan(precision: str, kib: int | None) -> None:
    first = (Pass((0, 1)), Pass((1, 2), fails=True))
    found, _ = run(2, trained, Unforeseen, first, precision, kib)
    assert found == [[(0, 0, True), (1, 0, True), (2, 0, True)]] * 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wrong_estimate_is_planned_anew_from_the_pass_that_ran(precision: str) -> None:
    first = (Pass((0, 1)), Pass((0, 1), fails=True))
    found, meeting = run(2, trained, Twofold, first, precision, 40)
    assert [rows[-1] for rows in found] == [(3, 0, False)] * 2
    assert meeting.log.count("the recorded pass") == 1


@pytest.mark.parametrize(
    ("first", "estimates"),
    [((Pass((0, 1)), Pass((0, 1))), 1), ((Pass((0, 1)), Pass((1, 2))), 2)],
    ids=["alike", "unlike"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank_estimates_for_all_that_make_the_same_call(
    monkeypatch: pytest.MonkeyPatch, first: tuple[Pass, Pass], estimates: int, precision: str
) -> None:
    done = []
    real = pass_estimates.estimate_first_pass

    def counted(*args: Any, **told: Any) -> Any:
        done.append(args[1])
        return real(*args, **told)

    monkeypatch.setattr(pass_estimates, "estimate_first_pass", counted)
    found, meeting = run(2, trained, Experts, first, precision, 12)
    assert found == [[(1, 0, False), (2, 0, False), (3, 0, False)]] * 2
    assert "the recorded pass" not in meeting.log, "the estimate held on both ranks"
    assert len(done) == estimates


class Offloading(nn.Sequential):
    """Keeps the input of each recomputed layer in host memory, and returns a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            with offloaded(layer, x):
                x = checkpoint(layer, x, use_reentrant=False)
        return x.float().square().mean()


def offloads(each: Together) -> tuple[int, int]:
    model = Offloading(*(nn.Linear(64, 64) for _ in range(5)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    told: dict[str, Any] = {"budget": Budget(device=80 * 2**10, host=2**23), "precision": "bf16"}
    model, optimizer = chunked(model, AdamW(), device="emulated", collectives=each, **told)
    seeded = torch.Generator().manual_seed(each.rank)
    for _ in range(2):
        model(torch.randn(16, 64, generator=seeded).requires_grad_()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = statistics(model)
    release(model)
    return found.planned_passes, found.replans


def test_the_estimate_of_another_rank_has_its_offloaded_activations() -> None:
    found, meeting = run(2, offloads)
    assert found == [(2, 0)] * 2
    assert "the recorded pass" not in meeting.log, "the estimate held on both ranks"


@dataclass
class Config:
    """An argument of a call."""

    width: int = 1
    made_by: object = field(init=False)


def looped() -> Config:
    found = Config()
    found.made_by = found
    return found


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (torch.ones(2), torch.zeros(2), True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), False),
        (torch.ones(2), torch.ones(2).requires_grad_(), False),
        ({"x": [1, None, "y"]}, {"x": [1, None, "y"]}, True),
        ({"x": 1}, {"x": 1.0}, False),
        ({"x": 1}, {"y": 1}, False),
        ([1], (1,), False),
        (Pass((1, 2)), Pass((1, 2)), True),
        (Pass((1, 2)), Pass((2, 1)), False),
    ],
)
def test_which_calls_are_alike(one: object, other: object, alike: bool) -> None:
    model = nn.Linear(2, 2)
    assert describe_call(model, (one,), {}) != ""
    assert (describe_call(model, (one,), {}) == describe_call(model, (other,), {})) is alike


def test_models_that_differ_in_mode_attributes_or_buffers_make_other_calls() -> None:
    models = [nn.Sequential(nn.BatchNorm1d(2)) for _ in range(4)]
    models[1].eval()
    models[2][0].rank = 1
    models[3].register_buffer("more", torch.ones(3))
    assert len({describe_call(model, (), {}) for model in models}) == 4
    assert describe_call(models[0], (), {}) == describe_call(nn.Sequential(nn.BatchNorm1d(2)), (), {})


@pytest.mark.parametrize(
    "value",
    [object(), Config(), looped(), Config, 10**5000, {1, 2}],
    ids=["object", "unset", "loop", "class", "digits", "set"],
)
def test_a_call_whose_arguments_are_unknown_is_like_no_other(value: object) -> None:
    assert describe_call(nn.Linear(2, 2), (1, [value]), {}) == ""


def breaks_off(each: Together, ranks: tuple[int, ...], estimates: Any) -> list[int]:
    """A pass that the user interrupts while it is estimated; then two steps."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    model, optimizer = chunked(Mean(model), AdamW(), device="cpu", collectives=each, precision="bf16")
    estimates.breaks[each.rank] = each.rank in ranks
    if estimates.breaks[each.rank]:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 8))
    found = []
    for _ in range(2):
        model(torch.ones(2, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(statistics(model).planned_passes)
    release(model)
    return found


class Mean(nn.Module):
    """A model that returns a loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).float().square().mean()


def test_an_interrupt_while_rank_0_estimates_leaves_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Estimates:
        breaks: ClassVar[dict[int, bool]] = {}

    real = pass_estimates.estimate_first_pass

    def estimate(*args: Any, **told: Any) -> Any:
        if Estimates.breaks.pop(0, False):
            raise KeyboardInterrupt
        return real(*args, **told)

    monkeypatch.setattr(pass_estimates, "estimate_first_pass", estimate)
    assert run(2, breaks_off, (0,), Estimates)[0] == [[1, 2]] * 2
