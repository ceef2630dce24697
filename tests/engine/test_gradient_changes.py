"""What people do to gradients between backward and step, on gradients that are in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ps_core import SGD, Budget, DoesNotFit, InvalidInput, Options, UnsupportedParameter
from ps_core._plan import Queue
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution import nonmodel_memory

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(7))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROOMY, TIGHT = (Budget(device=size, host="4MiB") for size in ("2MiB", "80KiB"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


def clip_by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 2.0**-7)


def clip_adaptively(model: nn.Module) -> None:
    """As in NFNets: each row's norm at most a share of the weight's; `.data` as timm writes it."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            most = parameter.detach().norm(dim=1, keepdim=True).clamp_(min=1e-3) * 0.01
            norm = parameter.grad.norm(dim=1, keepdim=True).clamp_(min=1e-6)
            parameter.grad.data.copy_(torch.where(norm > most, parameter.grad * (most / norm), parameter.grad))


def add_noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad.add_(noise, alpha=2.0**-6)


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.div_(3)


def turn_around(model: nn.Module) -> None:
    """Gradient ascent, as for unlearning."""
    for parameter in model.parameters():
        parameter.grad.mul_(-0.5)


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad / 2


def assign_data(model: nn.Module) -> None:
    """The tensor that was assigned is the gradient: its later changes count."""
    for parameter in model.parameters():
        halved = parameter.grad.data / 2
        same, parameter.grad.data = parameter.grad, halved
        assert same is parameter.grad
        halved.mul_(0.5)
        same.mul_(4)


def assign_all_at_once(model: nn.Module) -> None:
    """As PyTorch's own function does, by assignments to `.data`."""
    grads = [parameter.grad for parameter in model.parameters()]
    vector = nn.utils.parameters_to_vector(grads)
    nn.utils.vector_to_parameters(vector.clamp(-(2.0**-7), 2.0**-7), grads)


def drop_some(model: nn.Module) -> None:
    for index, parameter in enumerate(model.parameters()):
        if index % 3 == 0:
            parameter.grad.zero_()
        elif index % 3 == 1:
            parameter.grad[0] = 0.0


def value_then_norm(model: nn.Module) -> None:
    """Norms that were measured before the change are not those after it."""
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    clip_by_value(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.02)


CHANGES = [
    clip_by_value,
    clip_adaptively,
    add_noise,
    average,
    turn_around,
    replace,
    assign_data,
    assign_all_at_once,
    drop_some,
]


def step(model: nn.Module, optimizer: Any, change: Callable[[nn.Module], None], passes: int = 1) -> float:
    for index in range(passes):
        loss = model(X + index)
        loss.backward()
    change(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def managed(precision: str, budget: Budget, *, accumulation: int = 1, momentum: float = 0.5) -> Any:
    return chunked(
        Net(),
        SGD(lr=0.5, momentum=momentum),
        device="emulated",
        precision=precision,
        budget=budget,
        accumulation_steps=accumulation,
        options=Options(group_bytes=2**14, poison=True),
    )


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_in_fp32_the_bits_of_plain_pytorch(change: Callable[[nn.Module], None], passes: int) -> None:
    plain = Net()
    twin = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5, fused=True)
    model, optimizer = managed("fp32", TIGHT, accumulation=passes)
    for _ in range(3):
        assert step(model, optimizer, change, passes) == step(plain, twin, change, passes)
    counted = statistics(model)
    assert counted.evictions > 0
    assert counted.tiers["device"].peak_bytes <= TIGHT.device_bytes
    assert counted.divergences == 0
    release(model)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "change", [clip_by_value, add_noise, average, replace, assign_data, assign_all_at_once, drop_some]
)
def test_in_16_bits_the_bits_of_a_plain_loop_with_masters(change: Callable[[nn.Module], None]) -> None:
    """One step: gradients in 16 bits, changed as PyTorch changes them, and then stepped in fp32."""
    plain = Net().bfloat16()
    masters = [parameter.detach().float() for parameter in Net().parameters()]
    plain(X.bfloat16()).backward()
    exact = [parameter.grad.float() / 3 for parameter in plain.parameters()]
    change(plain)
    model, optimizer = managed("bf16", TIGHT, momentum=0.0)
    step(model, optimizer, change)
    found = [entry["master"] for entry in optimizer.state_dict(masters=True)["state"].values()]
    for index, (master, parameter) in enumerate(zip(masters, plain.parameters(), strict=True)):
        gradient = exact[index].bfloat16().float() if change is average else parameter.grad.float()
        assert torch.equal(found[index], master - 0.5 * gradient), index
    release(model)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("change", [*CHANGES, value_then_norm])
def test_in_16_bits_wherever_gradients_are(change: Callable[[nn.Module], None], precision: str, passes: int) -> None:
    """A budget changes nothing; nor does the loss scale, but for what it saves from becoming zero."""

    def scaled(model: nn.Module, optimizer: Any) -> list[Any]:
        for _ in range(3):
            for index in range(passes):
                optimizer.scale(model(X + index)).backward()
            change(model)
            optimizer.step()
            optimizer.zero_grad()
        return [entry["master"] for entry in optimizer.state_dict(masters=True)["state"].values()]

    found = []
    for budget in (ROOMY, TIGHT):
        model, optimizer = managed(precision, budget)
        found.append(scaled(model, optimizer))
        assert statistics(model).steps == 3
        assert statistics(model).skipped_steps == 0
        release(model)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not all(torch.equal(one, other.detach()) for one, other in zip(found[0], Net().parameters(), strict=True))


def test_a_norm_after_a_change_is_that_of_the_change() -> None:
    plain = Net()
    twin = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5, fused=True)
    model, optimizer = managed("fp32", TIGHT)
    for _ in range(2):
        assert step(model, optimizer, value_then_norm) == pytest.approx(step(plain, twin, value_then_norm), rel=1e-6)
        assert optimizer.last_norm == pytest.approx(0.02, rel=1e-4)
    release(model)


@pytest.mark.parametrize("factors", [(1e200,), (1e30,) * 2, (1e30,) * 8], ids=["one", "two", "eight"])
def test_a_factor_beyond_fp32_makes_the_gradient_infinite_and_skips_the_step(factors: tuple[float, ...]) -> None:
    model, optimizer = managed("fp32", TIGHT)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def overflow(model: nn.Module) -> None:
        for factor in factors:
            next(model.parameters()).grad.mul_(factor)

    step(model, optimizer, overflow)
    assert optimizer.last_skipped
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    release(model)


def test_gradients_that_change_places_say_what_to_do() -> None:
    model, optimizer = managed("fp32", TIGHT)
    model(X).backward()
    one, other = model.layers[0].weight, model.layers[1].weight
    with pytest.raises(InvalidInput, match=r"was stepped, forgotten or replaced; .* keep a clone"):
        one.grad, other.grad = other.grad, one.grad
    release(model)
    model, optimizer = managed("fp32", TIGHT)
    one, other = model.layers[0].weight, model.layers[1].weight
    model(X).backward()
    expected = one.grad.clone(), other.grad.clone()
    one.grad, other.grad = other.grad, one.grad.clone()
    assert torch.equal(one.grad.clone(), expected[1])
    assert torch.equal(other.grad.clone(), expected[0])
    optimizer.step()
    release(model)


def test_data_of_a_view_cannot_be_assigned() -> None:
    model, _ = managed("fp32", TIGHT)
    model(X).backward()
    grad = model.layers[0].weight.grad
    for view in (grad.view(-1), grad.data):
        with pytest.raises(InvalidInput, match=r"an assignment to \.data on the gradient of .* a view"):
            view.data = torch.zeros(view.shape)
    before = grad.clone()
    with pytest.raises(UnsupportedParameter, match=r"has shape \(3,\), expected \(64, 64\)"):
        grad.data = torch.zeros(3)
    with pytest.raises(InvalidInput, match="found a NoneType; allowed is a tensor"):
        grad.data = None
    with pytest.raises(UnsupportedParameter, match="expected a dense floating-point tensor"):
        model.layers[0].weight.grad = torch.eye(64).to_sparse()
    assert torch.equal(grad.clone(), before), "nothing was changed"
    release(model)


def test_views_of_a_gradient_are_none_of_what_is_assigned_to_it() -> None:
    """In plain PyTorch they keep the memory of before; here there is none."""
    model, _ = managed("fp32", TIGHT)
    model(X).backward()
    grad = model.layers[0].weight.grad
    for view in (grad.data, grad.detach(), grad.view(-1), grad[0]):
        again = view.view(-1)
        grad.data = torch.ones(64, 64)
        for use in (torch.norm, torch.clone, lambda each: each.add_(1)):
            for stale in (view, again):
                with pytest.raises(InvalidInput, match="stepped, forgotten or replaced"):
                    use(stale)
        if view.shape == grad.shape:
            with pytest.raises(InvalidInput, match="stepped, forgotten or replaced"):
                grad.data = view
        assert torch.equal(grad.data.clone(), torch.ones(64, 64))
        assert model.layers[0].weight.grad is grad
    release(model)


def test_reads_are_counted_and_free() -> None:
    """Of what is moved; a model that is in one place moves nothing, and a stored gradient is not changed by it."""
    model, optimizer = managed("fp32", TIGHT)
    model(X).backward()
    before = statistics(model).moved_bytes["host->device"]
    largest = max(parameter.grad.abs().max().item() for parameter in model.parameters())
    assert statistics(model).moved_bytes["host->device"] - before >= 4 * 4 * 64 * 64
    plain = Net()
    plain(X).backward()
    assert largest == max(parameter.grad.abs().max().item() for parameter in plain.parameters())
    optimizer.step()
    release(model)


def test_a_gradient_of_before_the_step_says_so() -> None:
    model, optimizer = managed("fp32", TIGHT)
    model(X).backward()
    grad = model.layers[0].weight.grad
    view = grad.data.view(-1)
    optimizer.step()
    for use in (torch.norm, torch.clone, lambda g: g.mul_(2.0), lambda g: g.add_(1.0)):
        for stale in (grad, view):
            with pytest.raises(
                InvalidInput,
                match=r"was stepped, forgotten or replaced; read parameter\.grad again, or keep a clone\(\)",
            ):
                use(stale)
    release(model)


def test_in_a_hook_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading ends the planned pass, as reading a norm does; the results are the same, and no garbage is collected."""
    collected: list[str] = []
    monkeypatch.setattr(nonmodel_memory.gc, "collect", lambda: collected.append("garbage"))
    plain, (model, optimizer) = Net(), managed("fp32", TIGHT)
    twin = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5, fused=True)

    def clip(parameter: nn.Parameter) -> None:
        parameter.grad.clamp_(-0.01, 0.01)

    for each in (plain, model):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(clip)
    for _ in range(3):
        assert step(model, optimizer, lambda _: None) == step(plain, twin, lambda _: None)
    assert not collected  # what a pass that broke off left; collecting for each gradient took seconds a step
    release(model)


def test_a_copy_that_does_not_fit_is_refused() -> None:
    model, optimizer = managed("fp32", TIGHT)
    model(X).backward()
    store = model.layers[0].weight._owner.store
    taken = store.reserve(0, store.free_bytes(0) - 2**13)
    with pytest.raises(DoesNotFit, match=r"at 'reading the gradient of layers\.0\.weight'.*\n.*Budget\(device="):
        model.layers[0].weight.grad.mean()
    assert model.layers[0].weight.grad.norm() > 0
    model.layers[0].bias.grad.mean()
    store.release(taken, Queue.COMPUTE)
    optimizer.step()
    release(model)
