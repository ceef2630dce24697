"""The optimizer's face: groups, schedulers, loss scale, and the errors that teach."""

from __future__ import annotations

import copy
import math
import pickle
import signal
from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler

from _fake_engine import FakeEngine, gradients, model
from _twins import ADAM, ADAMW, MOMENTUM, NO_DECAY, Spec, assert_near, steps, twin, with_groups
from ps_core import SGD, AdamW, Group, InvalidInput
from ps_core.engine._gradients.loss_scale import LossScale
from ps_core.engine._optim.group_step import clip_factor
from ps_core.engine._optim.kernel_rule import Settings, StepRule

# ---- groups and settings ----


def test_one_group_has_torchs_keys_and_order() -> None:
    for spec in (ADAMW, ADAM, MOMENTUM):
        plain = model()
        expected = twin(spec, plain).param_groups
        optimizer = FakeEngine(managed := model()).optimizer(spec)
        (group,) = optimizer.param_groups
        assert group.keys() - {"param_names"} == expected[0].keys()
        assert {key: group[key] for key in expected[0] if key != "params"} == {
            key: value for key, value in expected[0].items() if key != "params"
        }
        assert [id(each) for each in group["params"]] == [id(each) for each in managed.parameters()]
        assert group["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_the_first_match_wins_and_the_rest_comes_first() -> None:
    groups = (
        Group(match=lambda name, _: name == "0.bias", lr=0.5),
        Group(match=lambda name, _: name.endswith("nothing")),
        Group(match=lambda name, parameter: parameter.dim() == 1, lr=0.25),
    )
    optimizer = FakeEngine(model()).optimizer(AdamW(lr=1.0, groups=groups))
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "1.weight"],
        ["0.bias"],
        [],
        ["1.bias"],
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5, 1.0, 0.25]


def test_what_a_group_says_at_the_step_governs() -> None:
    engine = FakeEngine(managed := model())
    optimizer = engine.optimizer(AdamW(lr=1.0, weight_decay=0.1, groups=NO_DECAY))
    optimizer.param_groups[0].update(lr=torch.tensor(0.5), betas=(0.5, torch.tensor(0.25)), eps=1e-3)
    optimizer.param_groups[1]["weight_decay"] = 0.75
    steps(optimizer, managed, range(1), engine)
    settings, max_norm, loss_scale = engine.steps[0]
    first = Settings(kind=StepRule.ADAM, lr=0.5, betas=(0.5, 0.25), eps=1e-3, weight_decay=0.1, decoupled=True)
    second = Settings(kind=StepRule.ADAM, lr=0.02, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.75, decoupled=True)
    assert settings == {"0.weight": first, "0.bias": second, "1.weight": first, "1.bias": second}
    assert (max_norm, loss_scale) == (None, 1.0)


def test_settings_hold_only_what_their_rule_uses() -> None:
    for spec, expected in (
        (ADAM, Settings(kind=StepRule.ADAM, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)),
        (MOMENTUM, Settings(kind=StepRule.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)),
    ):
        engine = FakeEngine(managed := model())
        steps(engine.optimizer(spec), managed, range(1), engine)
        assert set(engine.steps[0][0].values()) == {expected}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", math.nan),
        ("weight_decay", math.inf),
        ("betas", (0.9, math.nan)),
        ("betas", (1.0, 0.9)),
        ("lr", -0.1),
        ("lr", 10**400),
        ("lr", "fast"),
        ("eps", None),
        ("weight_decay", torch.ones(2)),
    ],
)
def test_a_number_that_is_none(key: str, value: object) -> None:
    engine = FakeEngine(managed := model())
    optimizer = engine.optimizer(ADAMW)
    optimizer.param_groups[0][key] = value
    engine.put(gradients(managed, 0))
    with pytest.raises(InvalidInput, match=f"{key} must be a (finite )?number .*when the optimizer steps, found "):
        optimizer.step()
    assert not engine.steps


# ---- schedulers and hooks ----

SCHEDULES: list[Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = [
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("spec", [ADAMW, ADAM, MOMENTUM], ids=lambda spec: type(spec).__name__)
def test_schedulers_govern_as_with_torch(
    schedule: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], spec: Spec
) -> None:
    plain, engine = model(), FakeEngine(managed := model())
    expected, optimizer = twin(spec, plain), engine.optimizer(spec)
    before = [each.detach().clone() for each in plain.parameters()]
    one, other = schedule(optimizer), schedule(expected)
    for seed in range(5):
        steps(optimizer, managed, range(seed, seed + 1), engine)
        steps(expected, plain, range(seed, seed + 1))
        for mine, theirs in zip(optimizer.param_groups, expected.param_groups, strict=True):
            assert {key: mine[key] for key in theirs if key != "params"} == {
                key: value for key, value in theirs.items() if key != "params"
            }
        one.step()
        other.step()
    numbers = [next(iter(settings.values())) for settings, _, _ in engine.steps]
    assert len({each.lr for each in numbers}) > 1
    if isinstance(one, lr_scheduler.OneCycleLR | lr_scheduler.CyclicLR):
        assert len({(each.momentum, each.betas) for each in numbers}) > 1, "momentum is cycled too"
    assert_near(managed, plain, before, 5)


def test_a_learning_rate_in_a_tensor_is_followed() -> None:
    engine = FakeEngine(managed := model())
    optimizer = engine.optimizer(MOMENTUM)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    schedule = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for seed in range(3):
        steps(optimizer, managed, range(seed, seed + 1), engine)
        schedule.step()
    assert [settings["0.bias"].lr for settings, _, _ in engine.steps] == [0.5, 0.25, 0.125]


def test_torchs_hooks_are_called() -> None:
    engine = FakeEngine(managed := model())
    optimizer, calls = engine.optimizer(ADAMW), []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
        optimizer.register_step_post_hook(lambda *_: calls.append("after")),
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("to save")),
        optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mine": 1}),
        optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append(state.pop("mine"))),
        optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded")),
    ]
    steps(optimizer, managed, range(1), engine)
    state = optimizer.state_dict()
    assert state["mine"] == 1
    optimizer.load_state_dict(state)
    assert calls == ["before", "after", "to save", 1, "loaded"]
    assert "mine" in state, "the caller's dictionary is the caller's"
    for handle in handles:
        handle.remove()
    steps(optimizer, managed, range(1), engine)
    assert len(calls) == 5


# ---- the step ----


def test_without_gradients_nothing_happens() -> None:
    engine = FakeEngine(model(), LossScale())
    optimizer = engine.optimizer(ADAMW)
    optimizer.step()
    assert not engine.steps
    assert optimizer.last_norm is None
    assert not optimizer.last_skipped
    assert optimizer.state_dict()["loss_scale"]["_growth_tracker"] == 0


def test_zero_grad_forgets() -> None:
    engine = FakeEngine(managed := model())
    optimizer = engine.optimizer(ADAMW)
    engine.put(gradients(managed, 0))
    optimizer.zero_grad()
    assert all(each.grad is None for each in managed.parameters())
    with pytest.raises(InvalidInput, match=r"set_to_none=False.*use zero_grad\(\)"):
        optimizer.zero_grad(set_to_none=False)


def test_backward_and_step_as_with_torch() -> None:
    plain, engine = model(), FakeEngine(managed := model())
    expected, optimizer = twin(ADAMW, plain), engine.optimizer(ADAMW)
    before = [each.detach().clone() for each in plain.parameters()]
    rng = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(4, 7, generator=rng)
        for net, opt in ((plain, expected), (managed, optimizer)):
            loss = net(x).square().mean()
            assert opt is expected or optimizer.scale(loss) is loss
            loss.backward()
            opt.step()
            opt.zero_grad()
    assert_near(managed, plain, before, 3)


def test_the_largest_norm_goes_to_the_engine_and_its_answer_is_kept() -> None:
    engine = FakeEngine(managed := model())
    optimizer = engine.optimizer(SGD(lr=1.0), max_grad_norm=0.5)
    grads = gradients(managed, 0)
    steps(optimizer, managed, range(1), engine)
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    assert engine.steps[0][1] == 0.5
    assert optimizer.last_norm == pytest.approx(norm, rel=1e-12)
    moved = [a.detach() - b.detach() for a, b in zip(managed.parameters(), model().parameters(), strict=True)]
    assert math.sqrt(sum(float(each.double().square().sum()) for each in moved)) == pytest.approx(0.5, rel=1e-5)


def test_the_factor_is_torchs() -> None:
    for norm, largest in ((3.0, 1.0), (1.0, 3.0), (0.0, 1.0), (1e-7, 1e-7), (5.0, math.inf), (math.inf, 1.0)):
        grad = torch.tensor(norm)
        expected = torch.clamp(largest / (grad + 1e-6), max=1.0).item()
        assert clip_factor(norm, largest) == pytest.approx(expected, rel=2 * torch.finfo(torch.float32).eps)
    assert clip_factor(1e30, None) == 1.0


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "1", True])
def test_a_largest_norm_that_is_none(value: object) -> None:
    with pytest.raises(InvalidInput, match="max_grad_norm must be a number above 0, or None"):
        FakeEngine(model()).optimizer(ADAMW, max_grad_norm=value)


# ---- the loss scale ----


def test_the_policy_is_torchs() -> None:
    mine, theirs = (
        LossScale(value=2.0**125, growth_interval=3),
        torch.amp.GradScaler("cpu", 2.0**125, growth_interval=3),
    )
    theirs.scale(torch.ones(()))
    pattern = [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, *[0] * 15]
    for skipped in pattern:
        theirs._per_optimizer_states[0]["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(float(skipped))}
        theirs.update()
        mine.update(skipped=bool(skipped))
        assert mine.state_dict() == theirs.state_dict()
    assert mine.value == 2.0**127, "the largest power of two that fp32 holds"


def test_the_defaults_are_torchs() -> None:
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(()))
    assert LossScale().state_dict() == theirs.state_dict()


def test_the_scale_never_reaches_zero() -> None:
    scale = LossScale()
    for _ in range(1000):
        scale.update(skipped=True)
    assert scale.value == torch.finfo(torch.float32).tiny


def test_fp16_scales_steps_and_skips() -> None:
    engine = FakeEngine(managed := model(), LossScale(growth_interval=2))
    optimizer = engine.optimizer(MOMENTUM)
    plain = model()
    expected = twin(MOMENTUM, plain)
    before = [each.detach().clone() for each in plain.parameters()]
    loss = torch.ones((), dtype=torch.float16)
    seen = []
    for seed in range(4):
        seen.append(optimizer.scale(loss).item())
        if seed == 1:
            bad = gradients(managed, seed)
            bad[2][0, 0] = math.nan
            engine.put(bad)
            kept = [each.detach().clone() for each in managed.parameters()]
            optimizer.step()
            assert optimizer.last_skipped
            assert all(torch.equal(a.detach(), b) for a, b in zip(managed.parameters(), kept, strict=True))
        else:
            steps(optimizer, managed, range(seed, seed + 1), engine)
            steps(expected, plain, range(seed, seed + 1))
            assert not optimizer.last_skipped
        optimizer.zero_grad()
    assert seen == [2.0**16, 2.0**16, 2.0**15, 2.0**15], "a loss in fp16 could not hold the first"
    assert optimizer.loss_scale == 2.0**16, "two clean steps after the skipped one"
    assert [record.steps for record in engine.records] == [3] * 4
    assert_near(managed, plain, before, 3)


def test_fp16_without_scaling_is_refused() -> None:
    engine = FakeEngine(managed := model(), LossScale())
    optimizer = engine.optimizer(MOMENTUM)
    engine.put(gradients(managed, 0))
    with pytest.raises(InvalidInput, match=r"call optimizer.scale\(loss\).backward\(\)"):
        optimizer.step()
    assert not engine.steps


def test_a_state_of_the_scale_that_is_none() -> None:
    with pytest.raises(InvalidInput, match="needs '_growth_tracker'"):
        LossScale().load_state_dict({"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9})
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InvalidInput, match="positive number within fp32"):
            LossScale().load_state_dict({**LossScale().state_dict(), "scale": scale})


# ---- closures ----


@torch.no_grad()
def test_a_closure_is_called_once_before_the_step() -> None:
    grads = gradients(model(), 0)
    engine = FakeEngine(managed := model())
    optimizer, calls = engine.optimizer(ADAMW), []

    def closure() -> str:
        calls.append((torch.is_grad_enabled(), len(engine.steps)))
        optimizer.zero_grad()
        engine.put(grads)
        return "the loss"

    assert optimizer.step(closure) == "the loss"
    assert calls == [(True, 0)]
    assert not torch.is_grad_enabled()
    other = FakeEngine(expected := model())
    other.put(grads)
    assert other.optimizer(ADAMW).step() is None
    for one, two in zip(managed.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_closure_that_fails_or_is_interrupted_steps_nothing() -> None:
    """An interrupt comes at once, as it does in a loop without a closure."""
    engine = FakeEngine(managed := model())
    optimizer, reached = engine.optimizer(ADAMW), []

    def interrupted() -> None:
        engine.put(gradients(managed, 0))
        signal.raise_signal(signal.SIGINT)
        reached.append("the line after it")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(interrupted)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not reached
    assert not engine.steps
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert not engine.steps


# ---- what it refuses ----


def test_refusals_teach() -> None:
    engine = FakeEngine(managed := model())
    optimizer = engine.optimizer(ADAMW)
    with pytest.raises(InvalidInput, match=r"add_param_group.*release\(model\) and call chunked\(\) again"):
        optimizer.add_param_group({"params": [next(managed.parameters())]})
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidInput, match=r"ChunkedOptimizer cannot be copied or pickled.*state_dict\(\)"):
            copied(optimizer)
    engine.put(gradients(managed, 0))
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(InvalidInput, match=r"param_groups\[0\]\['maximize'\] is True"):
        optimizer.step()
    optimizer.param_groups[0]["maximize"] = False
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(InvalidInput, match=r"param_groups\[0\]\['params'\] was changed.*release\(model\)"):
        optimizer.step()
    assert not engine.steps


def test_repr_is_short() -> None:
    optimizer = FakeEngine(model(), LossScale()).optimizer(with_groups(ADAMW, NO_DECAY), max_grad_norm=1.0)
    assert repr(optimizer).splitlines() == [
        "ChunkedOptimizer(AdamW, max_grad_norm=1.0, loss_scale=65536)",
        "  group 0: 2 parameters, lr=0.01, betas=(0.8, 0.95), eps=1e-06, weight_decay=0.1",
        "  group 1: 2 parameters, lr=0.02, betas=(0.8, 0.95), eps=1e-06, weight_decay=0.0",
    ]


def test_accelerate_wraps_it() -> None:
    accelerate = pytest.importorskip("accelerate")
    engine = FakeEngine(managed := model())
    optimizer = engine.optimizer(ADAMW)
    wrapped = accelerate.Accelerator(cpu=True).prepare(optimizer)
    engine.put(gradients(managed, 0))
    wrapped.step()
    assert len(engine.steps) == 1
    assert wrapped.state_dict()["state"].keys() == {0, 1, 2, 3}
    wrapped.zero_grad()
    assert next(managed.parameters()).grad is None
