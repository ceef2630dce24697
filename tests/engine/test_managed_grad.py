"""``param.grad`` without memory: torch's clipping works on it, in every form, and nothing else does by mistake."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

from _fake_engine import FakeEngine, gradients, model
from ps_core import SGD, InvalidInput
from ps_core.engine._gradients.loss_scale import LossScale
from ps_core.engine._gradients.managed_grad import ManagedGrad

FOREACH = [None, True, False]
LR = 0.5


def exact_norm(grads: list[torch.Tensor]) -> float:
    return math.sqrt(sum(Fraction(value) ** 2 for grad in grads for value in grad.flatten().tolist()))


def norm_bound(grads: list[torch.Tensor]) -> float:
    """Relative error of a norm in fp32: an add for each element of the longest sum, a square, two roots."""
    return (max(grad.numel() for grad in grads) + len(grads) + 6) / 2 * torch.finfo(torch.float32).eps


def plain_steps(grads: list[torch.Tensor], clip: Callable[[nn.Module], object]) -> tuple[nn.Module, object]:
    """One SGD step of plain PyTorch with real gradients."""
    plain = model()
    for parameter, grad in zip(plain.parameters(), grads, strict=True):
        parameter.grad = grad.clone()
    answer = clip(plain)
    torch.optim.SGD(plain.parameters(), lr=LR).step()
    return plain, answer


def managed_steps(grads: list[torch.Tensor], clip: Callable[[nn.Module], object]) -> tuple[nn.Module, object]:
    managed = model()
    engine = FakeEngine(managed)
    engine.put(grads)
    answer = clip(managed)
    engine.optimizer(SGD(lr=LR)).step()
    return managed, answer


def assert_same_update(got: nn.Module, expected: nn.Module, relative: float) -> None:
    """Elementwise: the update may differ by the norm's error and three roundings (factor, product, times the rate).

    Then there is the sum's rounding. Not clipping at all, or twice: see `test_a_wrong_factor_would_be_seen`.
    """
    eps = torch.finfo(torch.float32).eps
    for before, one, other in zip(model().parameters(), got.parameters(), expected.parameters(), strict=True):
        one, other = one.detach(), other.detach()
        room = (relative + 3 * eps) * (other - before).abs() + eps * torch.maximum(other.abs(), before.abs())
        assert bool(((one - other).abs() <= room).all())


def clip(foreach: bool | None, max_norm: float) -> Callable[[nn.Module], object]:
    return lambda of: nn.utils.clip_grad_norm_(of.parameters(), max_norm, foreach=foreach)


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("max_norm", [0.25, 1e4, math.inf])
def test_clipping_by_torch_is_as_on_real_gradients(foreach: bool | None, max_norm: float) -> None:
    grads = gradients(model(), seed=1)
    plain, expected = plain_steps(grads, clip(foreach, max_norm))
    managed, got = managed_steps(grads, clip(foreach, max_norm))
    assert type(got) is torch.Tensor
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    exact, bound = exact_norm(grads), norm_bound(grads)
    assert abs(got.item() - exact) <= bound * exact
    assert abs(expected.item() - exact) <= bound * exact
    # Both are near the exact norm; ours is three roundings away (each tensor's norm, their sum, its root).
    assert abs(got.item() - exact) <= 3 * torch.finfo(torch.float32).eps * exact
    assert_same_update(managed, plain, bound if max_norm == 0.25 else 0.0)


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("times", [0, 2])
def test_a_wrong_factor_would_be_seen(foreach: bool | None, times: int) -> None:
    grads = gradients(model(), seed=1)
    plain, _ = plain_steps(grads, clip(foreach, 0.25))

    def wrong(of: nn.Module) -> None:
        factor = 0.25 / exact_norm(grads)
        for _ in range(times):
            for parameter in of.parameters():
                parameter.grad.mul_(factor)

    managed, _ = managed_steps(grads, wrong)
    with pytest.raises(AssertionError):
        assert_same_update(managed, plain, norm_bound(grads))


@pytest.mark.parametrize("foreach", FOREACH)
def test_norm_first_then_clipping_with_it(foreach: bool | None) -> None:
    def both(of: nn.Module) -> torch.Tensor:
        total = nn.utils.get_total_norm([each.grad for each in of.parameters()], foreach=foreach)
        nn.utils.clip_grads_with_norm_(of.parameters(), 0.25, total, foreach=foreach)
        return total

    grads = gradients(model(), seed=2)
    plain, expected = plain_steps(grads, both)
    managed, got = managed_steps(grads, both)
    assert abs(got.item() - expected.item()) <= norm_bound(grads) * expected.item()
    assert_same_update(managed, plain, norm_bound(grads))


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite(foreach: bool | None, bad: float) -> None:
    grads = gradients(model(), seed=3)
    grads[1][4] = bad
    engine = FakeEngine(managed := model())
    engine.put(grads)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(managed.parameters(), 1.0, error_if_nonfinite=True, foreach=foreach)
    assert [record.factor for record in engine.records] == [1.0] * 4
    total = nn.utils.clip_grad_norm_(managed.parameters(), 1.0, foreach=foreach)
    assert not math.isfinite(total.item())
    optimizer = engine.optimizer(SGD(lr=LR))
    optimizer.step()
    assert optimizer.last_skipped
    for one, other in zip(managed.parameters(), model().parameters(), strict=True):
        assert torch.equal(one.detach(), other.detach())


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("order", [1.0, math.inf, 0, -math.inf])
def test_clipping_by_other_norms(foreach: bool | None, order: float) -> None:
    grads = gradients(model(), seed=4)

    def by_order(of: nn.Module) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(of.parameters(), 0.25, norm_type=order, foreach=foreach)

    plain, expected = plain_steps(grads, by_order)
    managed, got = managed_steps(grads, by_order)
    assert torch.equal(got, expected)
    assert_same_update(managed, plain, 0.0)


def test_parameters_without_a_gradient_are_left_out() -> None:
    grads = gradients(model(), seed=5)
    engine = FakeEngine(managed := model())
    engine.put([grads[0], None, grads[2], None])
    assert next(iter(managed.children())).bias.grad is None
    total = nn.utils.clip_grad_norm_(managed.parameters(), 0.5)
    assert total.item() == pytest.approx(exact_norm([grads[0], grads[2]]), rel=norm_bound(grads))


@pytest.mark.parametrize(
    "norm",
    [
        lambda g: g.norm(),
        lambda g: g.norm(2),
        lambda g: g.norm(p=2, dtype=torch.float32),
        lambda g: g.data.norm(2),
        lambda g: g.detach().data.norm(),
        torch.norm,
        torch.linalg.norm,
        torch.linalg.vector_norm,
        lambda g: torch.linalg.vector_norm(g, 2.0, dtype=torch.float32),
        lambda g: torch._foreach_norm([g])[0],
        lambda g: g.to(g.device).to(g.dtype).norm(),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ways_to_ask_for_a_norm(norm: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    managed = nn.Linear(7, 3, bias=False).to(dtype)
    engine = FakeEngine(managed)
    engine.put([grad := torch.arange(21.0).view(3, 7)])
    got = norm(managed.weight.grad)
    assert got.shape == ()
    assert got.dtype == torch.float32, "the true norm, not one of 8 bits"
    assert got.item() == pytest.approx(exact_norm([grad]), rel=torch.finfo(torch.float32).eps)


def test_a_norm_in_double() -> None:
    engine = FakeEngine(managed := model())
    engine.put(gradients(managed, seed=1))
    assert torch.linalg.vector_norm(next(managed.parameters()).grad, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    "multiply",
    [
        lambda g: g.mul_(0.25),
        lambda g: g.mul_(torch.tensor(0.25)),
        lambda g: g.data.mul_(torch.tensor([0.25])),
        lambda g: g.detach().mul_(0.25),
        lambda g: g.__imul__(0.25),
        lambda g: torch._foreach_mul_([g], 0.25),
        lambda g: torch._foreach_mul_([g], [0.25]),
        lambda g: torch._foreach_mul_([g], torch.tensor(0.25)),
        lambda g: g.mul_(0.5).mul_(0.5),
    ],
)
def test_ways_to_multiply(multiply: Callable[[torch.Tensor], object]) -> None:
    engine = FakeEngine(managed := model())
    engine.put(gradients(managed, seed=1))
    before = [parameter.grad.norm().item() for parameter in managed.parameters()]
    multiply(next(managed.parameters()).grad)
    assert [record.factor for record in engine.records] == [0.25, 1.0, 1.0, 1.0]
    after = [parameter.grad.norm().item() for parameter in managed.parameters()]
    assert after == [before[0] / 4, *before[1:]], "the norm is of the product"


def test_metadata_is_the_parameters() -> None:
    managed = nn.Linear(7, 3, bias=False).bfloat16()
    engine = FakeEngine(managed)
    engine.put([torch.ones(3, 7)])
    grad = managed.weight.grad
    assert isinstance(grad, ManagedGrad)
    assert (grad.shape, grad.dtype, grad.device) == ((3, 7), torch.bfloat16, managed.weight.device)
    assert (grad.numel(), grad.dim(), grad.element_size(), len(grad)) == (21, 2, 2, 3)
    assert not grad.is_sparse
    assert not grad.requires_grad
    assert grad.to(grad.device) is grad
    assert repr(grad) == f"ManagedGrad(of='weight', norm={math.sqrt(21):g}, shape=(3, 7))"


READS: list[Callable[[torch.Tensor], object]] = [
    lambda g: g.abs().max(),
    lambda g: g.mean(),
    lambda g: g.std(),
    lambda g: g.var(dim=1),
    lambda g: torch.isnan(g).any(),
    lambda g: torch.isfinite(g).all(),
    lambda g: g.norm(1),
    lambda g: g.norm(math.inf),
    lambda g: g.norm(dim=0),
    lambda g: torch.linalg.vector_norm(g, 3, keepdim=True),
    torch.linalg.matrix_norm,
    lambda g: torch.histc(g, 8, -1, 1),
    lambda g: g.clone(),
    lambda g: g.float(),
    lambda g: g.double(),
    lambda g: g.detach().cpu().clone(),
    lambda g: g / 2,
    lambda g: g * g,
    lambda g: 1 - g,
    lambda g: g @ g.T,
    lambda g: g.view(-1)[3:9].sum(),
    lambda g: torch.stack([part.sum() for part in g.unbind()]),
    lambda g: torch.cat([g.flatten(), g.flatten()]),
    lambda g: torch.ones(33, 7).mul_(g),
    lambda g: torch.stack(torch._foreach_norm([torch.ones(3), g], 1)),
    lambda g: torch.stack(torch._foreach_mul([g, g.data], 2.0)),
    lambda g: torch.tensor(g.tolist()),
    lambda g: torch.from_numpy(g.float().numpy().copy()),
    copy.deepcopy,
    lambda g: pickle.loads(pickle.dumps(g)),
    lambda g: g[0, 0].item(),
    lambda g: bool((g == 0).any()),
]


@pytest.mark.parametrize("use", READS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_reading_is_as_on_a_real_gradient(
    use: Callable[[torch.Tensor], object], dtype: torch.dtype, factor: float
) -> None:
    engine = FakeEngine(managed := model().to(dtype))
    grads = [grad.to(dtype) for grad in gradients(managed, seed=1)]
    engine.put([grad.float() for grad in grads])
    got = next(managed.parameters()).grad
    got.mul_(factor)
    expected = use(grads[0] * factor)
    if not isinstance(expected, torch.Tensor):
        assert use(got) == expected
        return
    found = use(got)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert [record.factor for record in engine.records] == [factor, 1.0, 1.0, 1.0]


WRITES: list[Callable[[torch.Tensor], object]] = [
    lambda g: g.zero_(),
    lambda g: g.copy_(torch.linspace(-3, 1, 231).view(33, 7)),
    lambda g: g.clamp_(-0.1, 0.1),
    lambda g: g.data.clamp_(max=0.1),
    lambda g: g.detach().add_(torch.linspace(-3, 1, 231).view(33, 7), alpha=0.3),
    lambda g: g.div_(3),
    lambda g: g.data.div_(4.0),
    lambda g: g.mul_(torch.linspace(-3, 1, 231).view(33, 7)),
    lambda g: g.mul_(g),
    lambda g: torch.add(g, 1, out=g),
    lambda g: g.view(-1)[3:9].fill_(7.0),
    lambda g: g.data.T[2].mul_(-1),
    lambda g: g.__setitem__((slice(2, 5), 1), 3.0),
    lambda g: g.__setitem__(g > 0, 0.0),
    lambda g: [part.neg_() for part in g.split(10)],
    lambda g: g.__itruediv__(3.0),
    lambda g: torch._foreach_clamp_max_([g], 0.1),
    lambda g: torch._foreach_mul_([torch.ones(3), g], 3.0),
    lambda g: torch._foreach_add_([g, g], [torch.ones(33, 7), torch.ones(33, 7)], alpha=2),
    lambda g: torch._foreach_lerp_([g], [torch.ones_like(g)], 0.3),
    lambda g: g.mul_(0.5).add_(1).mul_(0.25),
    lambda g: nn.init.uniform_(g, generator=torch.Generator().manual_seed(0)),
]


@pytest.mark.parametrize("use", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_in_place_are_as_on_a_real_gradient(use: Callable[[torch.Tensor], object], dtype: torch.dtype) -> None:
    engine = FakeEngine(managed := model().to(dtype))
    grads = [grad.to(dtype) for grad in gradients(managed, seed=1)]
    engine.put([grad.float() for grad in grads])
    got = next(managed.parameters()).grad
    found = use(got)
    if isinstance(found, torch.Tensor):
        assert isinstance(found, ManagedGrad), "the same gradient again, not a copy"
    use(grads[0])
    assert torch.equal(got.clone(), grads[0])
    assert got.norm().item() == pytest.approx(grads[0].float().norm().item(), rel=1e-6)
    stored, factor = engine.records[0].gradient, engine.records[0].factor
    assert torch.equal((stored * factor).to(dtype), grads[0]), "what is stepped"


@pytest.mark.parametrize("foreach", FOREACH)
def test_clipping_by_value(foreach: bool | None) -> None:
    def by_value(of: nn.Module) -> None:
        nn.utils.clip_grad_value_(of.parameters(), 0.1, foreach=foreach)

    grads = gradients(model(), seed=1)
    plain, _ = plain_steps(grads, by_value)
    managed, _ = managed_steps(grads, by_value)
    assert_same_update(managed, plain, 0.0)


def test_in_fp16_values_are_without_the_loss_scale() -> None:
    engine = FakeEngine(managed := model().half(), LossScale())
    grads = [grad.half() for grad in gradients(managed, seed=1)]
    engine.put([grad.float() for grad in grads])
    got = next(managed.parameters()).grad
    assert torch.equal(got.clone(), grads[0])
    got.clamp_(-0.25, 0.25)
    assert torch.equal(engine.records[0].gradient, grads[0].float().clamp(-0.25, 0.25) * 2.0**16)


MEMORY_OF: list[tuple[Callable[[torch.Tensor], object], str]] = [
    (lambda g: g.data_ptr(), "data_ptr"),
    (lambda g: g.untyped_storage(), "untyped_storage"),
    (lambda g: g.share_memory_(), "share_memory_"),
    (torch.from_dlpack, "__dlpack__"),
]


@pytest.mark.parametrize(("use", "named"), MEMORY_OF)
def test_memory_that_is_not_there_is_refused_and_the_remedy_works(
    use: Callable[[torch.Tensor], object], named: str
) -> None:
    engine = FakeEngine(managed := model())
    engine.put(gradients(managed, seed=1))
    grad = next(managed.parameters()).grad
    with pytest.raises(InvalidInput, match=rf"{named}.* gradient of '0.weight'.* \.clone\(\) it first"):
        use(grad)
    use(grad.clone())


def test_an_array_of_a_gradient_cannot_be_written_to() -> None:
    engine = FakeEngine(managed := model())
    engine.put(gradients(managed, seed=1))
    with pytest.raises(ValueError, match="read-only"):
        next(managed.parameters()).grad.numpy()[0] = 1


def test_torchs_own_scaler_is_refused() -> None:
    engine = FakeEngine(managed := model())
    engine.put(gradients(managed, seed=1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(InvalidInput, match=r"GradScaler .* gradient of '0.weight'.*optimizer\.scaler in its place"):
        scaler.unscale_(engine.optimizer(SGD(lr=LR)))


@pytest.mark.parametrize("foreach", FOREACH)
def test_in_fp16_the_norm_is_without_the_loss_scale(foreach: bool | None) -> None:
    grads = gradients(model(), seed=1)
    plain, expected = plain_steps(grads, clip(foreach, 0.25))
    engine = FakeEngine(managed := model(), LossScale())
    optimizer = engine.optimizer(SGD(lr=LR))
    optimizer.scale(torch.ones(()))
    engine.put(grads)
    got = nn.utils.clip_grad_norm_(managed.parameters(), 0.25, foreach=foreach)
    assert abs(got.item() - expected.item()) <= norm_bound(grads) * expected.item()
    optimizer.step()
    assert_same_update(managed, plain, norm_bound(grads))


def test_accelerate_clips() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    grads = gradients(model(), seed=1)

    def clipped(of: nn.Module) -> torch.Tensor:
        return accelerator.clip_grad_norm_(of.parameters(), 0.25)

    plain, expected = plain_steps(grads, clipped)
    managed, got = managed_steps(grads, clipped)
    assert abs(got.item() - expected.item()) <= norm_bound(grads) * expected.item()
    assert_same_update(managed, plain, norm_bound(grads))


class Regression(nn.Module):
    """What the Trainer takes for a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def train(folder: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Three steps under Hugging Face's Trainer; the norms it logged."""
    transformers = pytest.importorskip("transformers")
    rng = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(7, generator=rng), "labels": torch.randn(5, generator=rng)} for _ in range(12)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, max_grad_norm=0.05, logging_steps=1, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = transformers.Trainer(network, arguments, train_dataset=data, optimizers=(optimizer, schedule))
    trainer.train()
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


def test_the_trainer_clips(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    plain, managed = Regression(), Regression()
    expected = train(tmp_path / "plain", plain, torch.optim.SGD(plain.parameters(), lr=LR))
    engine = FakeEngine(managed)
    got = train(tmp_path / "managed", managed, engine.optimizer(SGD(lr=LR)))
    assert len(got) == 3
    assert min(expected) > 0.05, "clipping must have something to do"
    # The norms of later steps come after clipped ones: a factor too few or too many shows in them too.
    assert got == pytest.approx(expected, rel=1e-5)
    for one, other in zip(managed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-5, atol=1e-6)
