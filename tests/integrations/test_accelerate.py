"""`ps_core.integrations.accelerate` against Accelerate itself, at the same seeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from _hugging_face import batch, llama, row
from ps_core import AlreadyManaged, Budget, InvalidInput, Options
from ps_core.engine import chunked, is_managed, release, statistics

pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from ps_core.integrations.accelerate import ChunkedAccelerator

STEPS = 6


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def ours(precision: str = "fp32", **more: Any) -> ChunkedAccelerator:
    return ChunkedAccelerator(
        cpu=True,
        budget=Budget(device=400_000, host="64MiB"),
        precision=precision,
        options=Options(group_bytes=8192, poison=True),
        **more,
    )


def optimizer_for(model: Any, kind: str) -> Any:
    vectors = [each for each in model.parameters() if each.dim() < 2]
    matrices = [each for each in model.parameters() if each.dim() > 1]
    if kind == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}]
    if kind == "RMSprop":
        return torch.optim.RMSprop([{**groups[0], "alpha": 0.9}, groups[1]], lr=0.01, momentum=0.9)
    if kind == "Adafactor":
        return torch.optim.Adafactor(groups, lr=0.1)
    if kind == "amsgrad":
        return torch.optim.AdamW(groups, lr=0.01, amsgrad=True, foreach=False)
    if kind == "decoupled Adam":
        return torch.optim.Adam(groups, lr=0.01, fused=True, decoupled_weight_decay=True)
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


def schedule(optimizer: Any) -> Any:
    """One that has others within it, and sets more than the rate."""
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    rest = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, rest], [2])


def run(accelerator: Any, kind: str, accumulation: int) -> tuple[list[tuple[float, ...]], Any]:
    model = llama()
    optimizer = optimizer_for(model, kind)
    scheduler = schedule(optimizer)
    loader = DataLoader([row(index) for index in range(2 * STEPS * accumulation)], batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    logs = []
    for each in loader:
        with accelerator.accumulate(model):
            loss = model(**each).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            logs.append((loss.item(), *scheduler.get_last_lr()))
    return logs, model


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "decoupled Adam", "RMSprop", "amsgrad", "Adafactor"])
def test_the_same_bits_as_accelerate(kind: str, accumulation: int) -> None:
    told = {"gradient_accumulation_steps": accumulation}
    expected, plain = run(accelerate.Accelerator(cpu=True, **told), kind, accumulation)
    found, model = run(ours(**told), kind, accumulation)
    assert found == expected
    assert len({row[1:] for row in found}) > 3, "the rates change"
    counted = statistics(model)
    assert (counted.steps, counted.divergences) == (STEPS, 0)
    assert counted.evictions > 0
    release(model)
    wanted = plain.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_saved_and_loaded_in_16_bits(tmp_path: Path, precision: str) -> None:
    def train(seed: int, *, resumes: bool) -> Any:
        accelerator, model = ours(precision), llama(seed)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        if resumes:
            accelerator.load_state(str(tmp_path / "state"))
        losses = []
        for index in range(3 if resumes else 0, 6):
            loss = model(**batch(index)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if index == 2:
                accelerator.save_state(str(tmp_path / "state"))
        return losses[-3:], optimizer.state_dict()["state"]

    (losses, states), (again, others) = train(0, resumes=False), train(1, resumes=True)
    assert again == losses
    for index, entry in states.items():
        assert "master" in entry
        assert all(torch.equal(others[index][name], value) for name, value in entry.items()), index


def test_a_model_that_is_managed_already_is_left_as_it_is() -> None:
    teacher, optimizer = chunked(llama(), None, budget=Budget(device=400_000, host="64MiB"), device="emulated")
    assert optimizer is None
    assert ours().prepare(teacher) is teacher
    release(teacher)


@pytest.mark.parametrize("kind", ["unfrozen", "added"])
def test_a_param_group_for_late_parameters(kind: str) -> None:
    """`add_param_group` on the prepared optimizer, as in Accelerate: settings of its own, and a scheduler's rates."""

    def train(accelerator: Any) -> tuple[list[Any], Any, list[int]]:
        model = llama()
        late = model.lm_head if kind == "unfrozen" else torch.nn.Linear(64, 64, bias=False)
        if kind == "unfrozen":
            late.requires_grad_(False)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        logs = []
        for index in range(STEPS):
            if index == 2:
                late.requires_grad_(True)
                if kind == "added":
                    torch.nn.init.eye_(late.weight)
                    model.lm_head = torch.nn.Sequential(model.lm_head, late)
                optimizer.add_param_group({"params": late.parameters(), "lr": 0.05, "weight_decay": 0.3})
            loss = model(**batch(index)).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            logs.append((loss.item(), *(group["lr"] for group in optimizer.param_groups)))
        return logs, model, [len(group["params"]) for group in optimizer.param_groups]

    expected, plain, sizes = train(accelerate.Accelerator(cpu=True))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    found, model, own = train(ours())
    assert (found, own) == (expected, sizes)
    release(model)
    wanted = plain.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_a_loss_function_is_no_second_model() -> None:
    model = llama()
    given = (model, torch.optim.AdamW(model.parameters(), fused=True), torch.nn.CrossEntropyLoss())
    model, optimizer, criterion = ours().prepare(*given)
    loss = criterion(model(input_ids=batch(0)["input_ids"]).logits.flatten(0, 1), batch(0)["labels"].flatten())
    loss.backward()
    optimizer.step()
    assert criterion is given[2]
    assert statistics(model).steps == 1
    release(model)


@pytest.mark.parametrize("made_once", [True, False])
def test_a_batch_that_fits_is_found(made_once: bool) -> None:
    """`find_executable_batch_size` calls the function again; the model may be prepared before it, or within it."""
    accelerator, tried, models = ours(), [], []

    def prepared() -> Any:
        model = llama()
        models.append(model)
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))

    def steps(size: int, model: Any, optimizer: Any) -> list[float]:
        losses = []
        for index in range(3):
            loss = model(**{name: value.repeat(size // 2, 1) for name, value in batch(index).items()}).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    given = prepared() if made_once else None

    @accelerate.utils.find_executable_batch_size(starting_batch_size=10)
    def train(size: int) -> list[float]:
        tried.append(size)
        if not made_once:
            accelerator.free_memory()
            for model in models:
                release(model)
            models.clear()
        return steps(size, *(given or prepared()))

    found = train()
    assert tried[0] == 10
    assert 2 <= tried[-1] < 10
    for model in models:
        release(model)
    assert steps(tried[-1], *prepared()) == found
    release(models[-1])


def adversaries(accelerator: Any, folder: Path, **budgets: Any) -> tuple[list[float], list[Any]]:
    """A generator and a discriminator, each with an optimizer; saved and loaded after two of four rounds."""
    torch.manual_seed(0)
    generator = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    judge = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    pairs = [(each, torch.optim.AdamW(each.parameters(), lr=0.01, fused=True)) for each in (generator, judge)]
    given = [{"budget": each} for each in budgets.values()] or [{}, {}]
    (generator, makes), (judge, judges) = (
        accelerator.prepare(*pair, **more) for pair, more in zip(pairs, given, strict=True)
    )
    noise = [torch.randn(4, 8, generator=torch.Generator().manual_seed(index)) for index in range(8)]
    losses = []
    for index in (0, 1, 2, 3, 2, 3):
        if index == 2 and len(losses) > 4:
            accelerator.load_state(str(folder))
        elif index == 2:
            accelerator.save_state(str(folder))
        fooled = (judge(generator(noise[index])) - 1).square().mean()
        accelerator.backward(fooled)
        makes.step()
        makes.zero_grad()
        judges.zero_grad()
        caught = judge(generator(noise[index + 4]).detach()).square().mean()
        accelerator.backward(caught)
        judges.step()
        judges.zero_grad()
        losses += [fooled.item(), caught.item()]
    return losses, [generator, judge]


def test_two_models_that_are_trained(tmp_path: Path) -> None:
    """Each is prepared with a part of the budget; results are Accelerate's to the bit, saved and loaded."""
    expected, plain = adversaries(accelerate.Accelerator(cpu=True), tmp_path / "plain")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    one, two = Budget(device="64KiB", host="8MiB").split(1, 1)
    found, models = adversaries(ours(), tmp_path / "ours", one=one, two=two)
    assert found == expected
    assert found[8:] == found[4:8]
    for model, other, budget in zip(models, plain, (one, two), strict=True):
        assert statistics(model).tiers["device"].budget_bytes == budget.device_bytes
        release(model)
        wanted = other.state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_prepared_a_second_time() -> None:
    """What to do about it is said by `chunked`: the model did come with an optimizer."""
    model = llama()
    model, _ = ours().prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(AlreadyManaged, match=r"release\(model\)"):
        ours().prepare(model, torch.optim.AdamW(model.parameters()))
    release(model)
    model, _ = ours().prepare(model, torch.optim.AdamW(model.parameters()))
    release(model)


def test_what_is_refused() -> None:
    model = llama()
    with pytest.raises(InvalidInput, match=r"prepare_model found 1 models and 0 optimizers .* to one prepare"):
        ours().prepare_model(model)
    with pytest.raises(InvalidInput, match=r"prepare_optimizer found 0 models and 1 optimizers .* to one prepare"):
        ours().prepare_optimizer(torch.optim.AdamW(model.parameters()))
    with pytest.raises(InvalidInput, match=r"1 models and 0 optimizers .* hand model and optimizer to one prepare"):
        ours().prepare(model)
    with pytest.raises(InvalidInput, match=r"param_groups\[0\]\['differentiable'\] is True"):
        ours().prepare(model, torch.optim.RMSprop(model.parameters(), differentiable=True))
    with pytest.raises(InvalidInput, match=r"torch\.optim\.LBFGS could not be stepped .*closure"):
        ours().prepare(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(InvalidInput, match="requires a gradient, but the optimizer does not have it"):
        ours().prepare(model, torch.optim.AdamW(model.lm_head.parameters()))
    with pytest.raises(InvalidInput, match="the optimizer has 1 parameters that LlamaForCausalLM does not have"):
        ours().prepare(model, torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.zeros(2))]))
    stepped = torch.optim.AdamW(model.parameters())
    model(**batch(0)).loss.backward()
    stepped.step()
    with pytest.raises(InvalidInput, match="has stepped already"):
        ours().prepare(model, stepped)
    fresh = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(fresh, 2)
    with pytest.raises(InvalidInput, match="a scheduler was made for this AdamW, which is replaced, but is not handed"):
        ours().prepare(model, fresh)
    assert not is_managed(model)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(InvalidInput, match="mixed_precision='bf16' does not go with a memory budget"):
        ours(mixed_precision="bf16")
