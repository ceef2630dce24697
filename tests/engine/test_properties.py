"""What must hold, each a test named after it: placement, parity, budgets, divergence, no stale memory and the rest."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import _models as models
from _cases import CASES, STEPS, case, finish, next_token, other_shape, rows, some_blocks, square, tokens
from _reference import Loop, Make, Result, Settings, resident
from _runs import HOST, check_same, check_under_the_tightest_budget, chunked_model, managed, stand_in, tightest
from _states import masters_of
from checked_device.device import CheckedDevice
from ps_core import SGD, Adam, AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, release, statistics

STACK = case("stack", models.stack)
LANGUAGE = case("language", models.Language, inputs=tokens, loss=next_token)
GROUP_BYTES = 2048


def tight(precision: str, rounds: int = 3) -> int:
    """The smallest device budget for the language model."""
    run = Settings(precision=precision)
    name = f"test_properties.py::tight[{precision}, {rounds} rounds]"
    return tightest(lambda size: managed(LANGUAGE.run, run, stand_in, Budget(device=size, host=HOST)), rounds, name)[0]


@pytest.fixture(scope="module")
def smallest() -> dict[str, int]:
    return {precision: tight(precision) for precision in ("fp32", "bf16")}


# 1


CHOICES = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["belady", "lru", "fifo"]),
        "group_bytes": st.sampled_from([1024, 2048, 5000, 20_000, None]),
        "prefetch": st.sampled_from([None, 0, 1, 3]),
        "poison": st.booleans(),
        "step": st.sampled_from(["after_backward", "speculative"]),
    }
)


@settings(max_examples=12)
@given(precision=st.sampled_from(["fp32", "bf16"]), room=st.floats(1, 3), choices=CHOICES, seed=st.integers(0, 99))
def test_1_placement_never_changes_the_result(
    smallest: dict[str, int], precision: str, room: float, choices: dict[str, Any], seed: int
) -> None:
    told = Settings(precision=precision, options=Options(**choices))

    def attempt(size: int) -> Result:
        return managed(LANGUAGE.run, told, lambda: CheckedDevice(check=True, seed=seed), Budget(device=size, host=HOST))

    _, got = tightest(attempt, rounds=2, floor=int(room * smallest[precision]))
    check_same(LANGUAGE.run, told, got)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_1_the_cpu_alone_and_an_accelerator_give_the_same(precision: str, smallest: dict[str, int]) -> None:
    told = Settings(precision=precision)
    check_same(LANGUAGE.run, told, managed(LANGUAGE.run, told, "cpu", Budget(host=HOST)))
    emulated = managed(LANGUAGE.run, told, "emulated", Budget(device=smallest[precision], host=HOST))
    check_same(LANGUAGE.run, told, emulated)
    assert emulated.evictions > 0


# 2


OPTIMIZERS = [
    (AdamW(lr=1e-2, weight_decay=0.1), torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    (Adam(lr=1e-2, weight_decay=0.1), torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    (
        SGD(lr=0.3, momentum=0.9, weight_decay=0.01),
        torch.optim.SGD,
        {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01, "fused": True},
    ),
]


def ulps(old: Tensor, expected: Tensor, found: Tensor) -> float:
    """The largest distance, in units in the last place of the larger of a parameter and its update."""
    size = torch.maximum(old.abs(), (expected - old).abs()).clamp_min(torch.finfo(torch.float32).tiny)
    unit = torch.nextafter(size, torch.tensor(math.inf)) - size
    return float(((expected - found).abs() / unit).max())


@pytest.mark.parametrize(("spec", "kind", "numbers"), OPTIMIZERS, ids=["AdamW", "Adam", "SGD"])
def test_2_each_step_is_that_of_pytorchs_fused_optimizer(spec: Any, kind: Any, numbers: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = models.Language()
    names = [name for name, _ in model.named_parameters()]
    twin = models.Language()
    theirs = kind(twin.parameters(), **numbers)
    told = {"precision": "fp32", "options": Options(group_bytes=GROUP_BYTES), "spec": spec}
    with chunked_model(model, **told, budget=Budget(device="128KiB", host=HOST)) as (_, ours):
        for index in range(STEPS):
            state = ours.state_dict(masters=True)
            before = {name: masters_of(state)[place] for place, name in enumerate(names)}
            twin.load_state_dict(before)
            theirs.load_state_dict({key: state[key] for key in ("state", "param_groups")})
            for group in theirs.param_groups:
                group["fused"] = True
            for each, optimizer in ((model, ours), (twin, theirs)):
                next_token(each, *tokens(index)).backward()
                finish(optimizer)
            after = masters_of(ours.state_dict(masters=True))
            for place, (name, expected) in enumerate(twin.named_parameters()):
                assert not torch.equal(before[name], after[place]), f"{name} did not move"
                assert ulps(before[name], expected.detach(), after[place]) <= 2, name
        assert statistics(model).evictions > 0


@pytest.mark.parametrize("spec", [AdamW(lr=1e-2), SGD(lr=0.3, momentum=0.9)], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_2_sixteen_bits_as_a_resident_mixed_precision_loop(precision: str, spec: Any) -> None:
    told = Settings(precision=precision, max_grad_norm=None)
    check_under_the_tightest_budget(replace(LANGUAGE, spec=spec).run, told)


# 3


class Metered(CheckedDevice):
    """Knows how much memory was asked of it."""

    def __init__(self) -> None:
        super().__init__(check=True, seed=3)
        self.arena_bytes = self.host_bytes = 0

    def arena(self, size_bytes: int) -> Tensor:
        """Memory of the accelerator."""
        self.arena_bytes += size_bytes
        return super().arena(size_bytes)

    def host(self, size_bytes: int) -> Tensor:
        """Memory beside it."""
        self.host_bytes += size_bytes
        return super().host(size_bytes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("room", [1.0, 1.5])
def test_3_budgets_are_kept(precision: str, room: float, smallest: dict[str, int]) -> None:
    device, size, host = Metered(), int(smallest[precision] * room), 2**20
    got = managed(LANGUAGE.run, Settings(precision=precision), lambda: device, Budget(device=size, host=host))
    (found,) = got.statistics
    for name, most in (("device", size), ("host", host)):
        tier = found.tiers[name]
        assert 0 < tier.peak_bytes <= tier.budget_bytes <= most
    assert 0 < device.arena_bytes <= size
    assert 0 < device.host_bytes <= host


@pytest.mark.parametrize(("device", "host"), [(0, "64MiB"), (4096, "64MiB"), ("64KiB", 100_000)])
def test_3_what_cannot_fit_raises_before_the_first_step(device: int | str, host: int | str) -> None:
    torch.manual_seed(0)
    model = models.Language()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    budget = Budget(device=device, host=host)
    made = None

    def begin() -> None:
        nonlocal made
        made = chunked(model, AdamW(), device="emulated", budget=budget, precision="fp32")
        next_token(model, *tokens(0)).backward()

    try:
        with pytest.raises(DoesNotFit) as caught:
            begin()
    finally:
        if made is not None:
            release(model)
    error = caught.value
    assert error.needed_bytes > error.available_bytes
    assert len(error.remedies) == 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


# 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "row",
    [
        case("shape", models.Language, inputs=other_shape, loss=next_token),
        case("skip", models.Skipping, inputs=some_blocks),
        *(each for each in CASES if each.name in ("experts", "evaluation_before_step", "evaluation_between_steps")),
    ],
    ids=lambda row: row.name,
)
def test_4_divergence_is_a_cache_miss(row: Any, precision: str) -> None:
    got = check_under_the_tightest_budget(row.run, Settings(precision=precision))
    if row.name in ("shape", "skip", "experts"):  # evaluation is a pass of its own, and may well follow its own plan
        assert sum(each.divergences for each in got.statistics) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_4_a_loop_that_repeats_itself_does_not_diverge(precision: str) -> None:
    got = check_under_the_tightest_budget(LANGUAGE.run, Settings(precision=precision))
    assert [each.divergences for each in got.statistics] == [0]
    assert sum(each.prefetch_hits for each in got.statistics) > 0


# 5


class Watched(CheckedDevice):
    """Keeps hold of the accelerator's memory."""

    def __init__(self) -> None:
        super().__init__(check=True, seed=3)
        self.memory: list[Tensor] = []

    def arena(self, size_bytes: int) -> Tensor:
        """Memory, of which a second look is kept."""
        found = super().arena(size_bytes)
        self.memory.append(torch.from_dlpack(found))
        return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_5_no_stale_memory(precision: str, smallest: dict[str, int]) -> None:
    """With poison on freed slots hold not-a-number, and the result is what it is without."""
    budget, seen = Budget(device=smallest[precision], host=HOST), {}
    for poison in (True, False):
        device = Watched()
        told = Settings(precision=precision, options=Options(poison=poison, group_bytes=GROUP_BYTES))

        def watched(make: Make, device: Watched = device, poison: bool = poison) -> list[Tensor]:
            logs = LANGUAGE.run(make)
            kind = torch.float32 if precision == "fp32" else torch.bfloat16
            words = torch.cat([each[: each.numel() // 4 * 4].view(kind) for each in device.memory])
            seen[poison] = int(words.isnan().sum())
            return logs

        check_same(LANGUAGE.run, told, managed(watched, told, lambda device=device: device, budget))
    assert seen[True] > 100
    assert seen[False] == 0


# 6


class Adapted(nn.Module):
    """A frozen linear layer and its low-rank correction."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    model = models.Language()
    model.requires_grad_(False)
    for block in model.blocks:
        block.wide, block.narrow = Adapted(block.wide), Adapted(block.narrow)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_6_low_rank_corrections_of_a_frozen_model(precision: str) -> None:
    row = case("adapted", adapted, inputs=tokens, loss=next_token)
    check_under_the_tightest_budget(row.run, Settings(precision=precision))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_6_a_model_on_meta_starts_with_the_numbers_of_a_plain_one(precision: str, checkpointing: bool) -> None:
    def loop(on: str) -> Loop:
        def build() -> nn.Module:
            with torch.device(on):
                return models.Language(tied=True, checkpointing=checkpointing)

        return replace(LANGUAGE, build=build).run

    told = Settings(precision=precision)

    def attempt(size: int) -> Result:
        return managed(loop("meta"), told, stand_in, Budget(device=size, host=HOST))

    _, got = tightest(attempt, rounds=2)
    check_same(loop("cpu"), told, got)
    assert got.evictions > 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_6_checkpointing_of_transformers_switched_on(when: str) -> None:
    from _zoo import gpt2

    def loop(make: Make) -> list[Tensor]:
        model = gpt2()
        if when == "before":
            model.activation_checkpointing_enable({"use_reentrant": False})
        model, optimizer = make(model, AdamW(lr=1e-2))
        if when == "after":
            model.activation_checkpointing_enable({"use_reentrant": False})
        logs = []
        for index in range(STEPS):
            (batch,) = tokens(index)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            finish(optimizer)
            logs.append(loss.detach())
        return logs

    check_under_the_tightest_budget(loop, Settings(precision="bf16"))


# 7


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("who", ["the engine", "the loop"])
def test_7_clipping_by_the_true_global_norm(who: str, precision: str) -> None:
    """SGD, because Adam hides a factor; and against PyTorch's own clipping."""
    limit, spec = 0.25, SGD(lr=1.0)
    torch.manual_seed(1)
    twin, _ = resident(models.stack(), None, precision=precision)
    torch.manual_seed(1)
    told: dict[str, Any] = {"precision": precision, "spec": spec, "options": Options(group_bytes=GROUP_BYTES)}
    if who == "the engine":
        told["max_grad_norm"] = limit
    with chunked_model(models.stack(), **told, budget=Budget(device="96KiB", host=HOST)) as (model, optimizer):
        for each in (twin, model):
            square(each, *rows(0)).backward()
        (norm,) = {float(torch.nn.utils.get_total_norm([p.grad.float() for p in twin.parameters()]))}
        assert norm > 2 * limit, "or nothing is clipped"
        if who == "the loop":
            assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)) == pytest.approx(norm, rel=1e-6)
        before = masters_of(optimizer.state_dict(masters=True))
        optimizer.step()
        after = masters_of(optimizer.state_dict(masters=True))
        assert who == "the loop" or optimizer.last_norm == pytest.approx(norm, rel=1e-6)
        for place, each in enumerate(twin.parameters()):
            moved, wanted = before[place] - after[place], each.grad.float() * (limit / (norm + 1e-6))
            most = max(float(before[place].abs().max()), float(wanted.abs().max()))
            torch.testing.assert_close(moved, wanted, rtol=0, atol=most * 2**-22)
        total = math.sqrt(sum(float((before[place] - after[place]).double().square().sum()) for place in before))
        assert total == pytest.approx(limit, rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_7_a_gradient_that_is_not_finite_skips_the_step_and_loses_nothing(precision: str, bad: float) -> None:
    """The fourth batch makes one gradient infinite or not a number; the fifth step goes on as if it had not been."""

    def loop(make: Make) -> list[Tensor]:
        model, optimizer = make(models.stack(), AdamW(lr=1e-2))
        logs = []
        for index in range(STEPS):
            out = model(*rows(index)).float()
            loss = (out * (bad if index == 3 else 1.0)).square().mean() * 1e-3
            optimizer.scale(loss).backward()
            finish(optimizer)
            logs += [out.detach(), torch.tensor(optimizer.loss_scale)]
        return logs

    got = check_under_the_tightest_budget(loop, Settings(precision=precision))
    scales = [float(each) for each in got.logs[1::2]]
    start = 2.0**16 if precision == "fp16" else 1.0
    assert scales == [start] * 3 + [start / 2 if precision == "fp16" else start] * 2
    steps = {float(value) for name, value in got.values.items() if name.endswith("/steps")}
    assert steps == {STEPS - 1.0}


# 9


@pytest.mark.parametrize(("precision", "bytes_each"), [("bf16", 14), ("fp16", 14), ("fp32", 16)])
def test_9_fourteen_bytes_a_parameter(precision: str, bytes_each: int, smallest: dict[str, int]) -> None:
    """Measured as memory asked of the device; without accumulation no byte but for naming: ends of groups."""
    device = Metered()
    torch.manual_seed(0)
    model = nn.Sequential(*[models.Residual(128) for _ in range(8)])
    count = sum(parameter.numel() for parameter in model.parameters())
    told: dict[str, Any] = {"precision": precision, "device": device, "budget": Budget(device="3MiB", host="32MiB")}
    with chunked_model(model, **told) as (_, optimizer):
        for index in range(3):
            optimizer.scale(square(model, *rows(index, 4, 6, 128)) * 1e-3).backward()
            finish(optimizer)
        found = statistics(model)
        assert bytes_each <= found.bytes_per_parameter <= bytes_each * 1.02
        held = sum(tier.current_bytes for tier in found.tiers.values())
        assert held <= found.bytes_per_parameter * count + sum(each.nbytes for each in model.buffers()) + 2**16
