"""Forward and backward of a managed model inside a hook of another backward pass, as cached losses do it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from _fake_cuda import FakeRuntime
from ps_core import SGD, Budget, Options, UnsupportedParameter
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(7))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def contrast(found: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy((found @ found.T).float(), torch.arange(len(found)))


def by_steps(model: nn.Module) -> float:
    """GradCache: embed without a graph, find the embeddings' gradients, then embed again, in parts, with a graph."""
    with torch.no_grad():
        found = torch.cat([model(part) for part in X.split(2)])
    loss = contrast(found.requires_grad_())
    loss.backward()
    for part, gradient in zip(X.split(2), found.grad.split(2), strict=True):
        (model(part) * gradient).sum().backward()
    return loss.item()


def in_a_hook(model: nn.Module) -> float:
    """The same in a hook of the loss, as `CachedMultipleNegativesRankingLoss` does it."""
    with torch.no_grad():
        found = [model(part).detach().requires_grad_() for part in X.split(2)]
    loss = contrast(torch.cat(found))
    gradients = torch.autograd.grad(loss, found)
    loss = loss.detach().requires_grad_()

    def again(outer: torch.Tensor) -> None:
        with torch.enable_grad():
            for part, gradient in zip(X.split(2), gradients, strict=True):
                (torch.dot(model(part).flatten(), gradient.flatten()) * outer).backward()

    loss.register_hook(again)
    (loss * 0.5).backward()
    return loss.item()


def steps(model: nn.Module, optimizer: Any, how: Any, count: int = 3) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(how(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def managed(precision: str = "fp32", accumulation: int = 4, **more: Any) -> Any:
    sizes = {"budget": Budget(device="80KiB", host="4MiB"), "options": Options(group_bytes=2**14, poison=True)}
    spec = SGD(lr=0.5, momentum=0.5)
    given = {"device": "emulated", "precision": precision, "accumulation_steps": accumulation}
    return chunked(more.pop("model", None) or Net(), spec, **given | sizes | more)


@pytest.mark.parametrize("how", [by_steps, in_a_hook])
def test_the_bits_of_plain_pytorch(how: Any) -> None:
    plain = Net()
    expected = steps(plain, torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5, fused=True), how)
    model, optimizer = managed()
    assert steps(model, optimizer, how) == expected
    counted = statistics(model)
    assert counted.evictions > 0
    assert counted.tiers["device"].peak_bytes <= 80 * 1024
    assert counted.divergences == 0
    assert counted.planned_passes > 12, "passes in the hook follow plans"
    release(model)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_same_with_and_without_a_hook(precision: str, accumulation: int) -> None:
    """Half the loss at twice the rate is the same step: both factors are exact."""
    found = []
    for how, lr in ((by_steps, 0.25), (in_a_hook, 0.5)):
        model, optimizer = managed(precision, accumulation)
        for group in optimizer.param_groups:
            group["lr"] = lr
        steps(model, optimizer, how, 1)
        found.append(optimizer.state_dict(masters=True)["state"])
        release(model)
    assert all(torch.equal(found[1][key]["master"], entry["master"]) for key, entry in found[0].items())


def test_a_hook_of_a_loss_of_the_same_model() -> None:
    """The outer backward goes through the model, too, after the hook has run the model again."""

    def twice(model: nn.Module) -> float:
        def again(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                model(X.flip(0)).square().mean().backward()

        out = model(X)
        out.register_hook(again)
        out.square().sum().backward()
        return out.detach().sum().item()

    plain = Net()
    expected = steps(plain, torch.optim.SGD(plain.parameters(), lr=0.01, fused=True), twice)
    for device, budget in (("emulated", Budget(device="96KiB", host="4MiB")), ("cpu", Budget(host="4MiB"))):
        model, optimizer = managed(device=device, budget=budget)
        optimizer.param_groups[0].update(lr=0.01, momentum=0.0)
        assert steps(model, optimizer, twice) == expected
        release(model)
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_parameters_unfrozen_for_passes_in_a_hook() -> None:
    """Which is where they are first trained: outside of it the model runs without gradients."""
    plain, model = Net(), Net()
    for each in (plain, model):
        each.layers[:3].requires_grad_(False)
    twin = torch.optim.SGD(plain.parameters(), lr=0.5, fused=True)
    model, optimizer = managed(model=model)
    optimizer.param_groups[0]["momentum"] = 0.0
    for _ in range(2):
        assert steps(model, optimizer, in_a_hook) == steps(plain, twin, in_a_hook)
        model.requires_grad_(True)
        plain.requires_grad_(True)
    release(model)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_checkpoint_around_the_whole_model_is_no_hook() -> None:
    plain, (model, optimizer) = Net(), managed(budget=Budget(device="112KiB", host="4MiB"))

    def whole(model: nn.Module) -> float:
        loss = checkpoint(model, X, use_reentrant=False).square().sum()
        loss.backward()
        return loss.item()

    twin = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5, fused=True)
    assert steps(model, optimizer, whole) == steps(plain, twin, whole)
    release(model)


def test_a_checkpoint_in_a_hook() -> None:
    def cached(model: nn.Module) -> float:
        return in_a_hook(lambda part: checkpoint(model, part, use_reentrant=False))

    plain, (model, optimizer) = Net(), managed(budget=Budget(device="112KiB", host="4MiB"))
    twin = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5, fused=True)
    assert steps(model, optimizer, cached) == steps(plain, twin, cached)
    release(model)


def test_reentrant_checkpointing_is_refused_and_training_goes_on() -> None:
    model, optimizer = managed()

    def nested(block: nn.Module, x: torch.Tensor) -> None:
        checkpoint(block, x, use_reentrant=True).sum().backward()

    with pytest.raises(
        UnsupportedParameter, match=r"as reentrant checkpointing does it: use checkpoint\(\.\.\., use_re"
    ):
        nested(model.layers[0], X.clone().requires_grad_())
    optimizer.zero_grad()
    steps(model, optimizer, by_steps)
    release(model)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("layer", [0, 2, 5])
def test_a_hook_of_a_parameter_trains_the_same_model(layer: int, device: str) -> None:
    """The hook's pass begins while the outer backward has layers below it to do."""

    def trained(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        done = []

        def again(_: torch.Tensor) -> None:
            if not done:
                done.append(True)
                with torch.enable_grad():
                    inner = model(X.flip(0)).square().mean()
                inner.backward()

        steps(model, optimizer, by_steps, 1)
        hook = model.layers[layer].weight.register_post_accumulate_grad_hook(again)
        model(X).square().mean().backward()
        optimizer.step()
        hook.remove()
        return [value.clone() for value in model.state_dict().values()]

    plain = Net()
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5, fused=True))
    more = {"budget": None} if device == "cpu" else {}
    model, optimizer = managed(accumulation=1, device=device, **more)
    for one, other in zip(expected, trained(model, optimizer), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    release(model)


@pytest.mark.parametrize("use", ["gradient", "evaluation", "state dict"])
def test_a_hook_on_the_thread_of_a_card_uses_the_model(use: str) -> None:
    """The thread that autograd has for a card is in no call of ``backward()`` that Python knows."""
    runtime = FakeRuntime(1)
    with runtime:
        found = []
        for device, budget in ((CudaDevice(runtime), Budget(device="80KiB", host="4MiB")), ("cpu", None)):
            model, optimizer = managed(accumulation=1, device=device, budget=budget)

            def used(parameter: torch.Tensor, model: nn.Module = model) -> None:
                if use == "gradient":
                    assert parameter.grad is not None
                    parameter.grad.clone()
                elif use == "evaluation":
                    with torch.no_grad():
                        model(X)
                else:
                    model.state_dict()

            model.layers[3].weight.register_post_accumulate_grad_hook(used)
            for _ in range(2):
                model(X).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([value.clone() for value in model.state_dict().values()])
            release(model)
    assert all(map(torch.equal, *found))
