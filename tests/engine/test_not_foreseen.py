"""Where no fake pass comes before the first one, a line says the true reason; a model without a loss is no news."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from _fake_cuda import FakeRuntime
from _models import WIDTH, stack
from _runs import HOST, let_go
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, statistics
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._devices.cuda.device import CudaDevice

Log = pytest.LogCaptureFixture
REST = ": this pass runs on demand and is recorded"


class Returns(nn.Module):
    """Blocks; what is made of their output is returned."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.blocks, self.make = stack(2), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.blocks(x))


def mean(x: Tensor) -> Tensor:
    return x.float().square().mean()


@pytest.fixture(params=["emulated", "played CUDA"])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One that the CPU emulates, and the CUDA device on a played runtime."""
    if request.param == "emulated":
        yield CpuDevice()
        return
    with FakeRuntime(3) as runtime:
        yield CudaDevice(runtime)


def train(
    model: nn.Module, device: Any, loss_of: Callable[[Any], Tensor] = lambda found: found, planned: int = 2
) -> None:
    """Three steps, of which so many follow a plan."""
    told: dict[str, Any] = {"budget": Budget(device="1MiB", host=HOST), "options": Options(group_bytes=8192)}
    model, optimizer = chunked(model, AdamW(lr=1e-2), device=device, **told)
    try:
        for _ in range(3):
            loss_of(model(torch.randn(4, WIDTH))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert statistics(model).planned_passes == planned
    finally:
        let_go(model)


def reason(log: Log) -> str:
    """What the one line says before the plan's."""
    found, plan = log.messages
    assert plan.startswith("Returns: planned ")
    assert found.startswith("Returns: no trace was possible (")
    assert found.endswith(")" + REST)
    return found.removeprefix("Returns: no trace was possible (").removesuffix(")" + REST)


WITHOUT_LOSS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "outputs": (lambda x: x, mean),
    "a tuple": (lambda x: (x, x), lambda found: mean(found[0])),
    "a dictionary": (lambda x: {"logits": x}, lambda found: mean(found["logits"])),
    "a loss of None": (lambda x: {"loss": None, "logits": x}, lambda found: mean(found["logits"])),
}


@pytest.mark.parametrize("kind", WITHOUT_LOSS)
def test_a_model_without_a_loss_is_not_worth_a_line(kind: str, device: Any, caplog: Log) -> None:
    make, loss_of = WITHOUT_LOSS[kind]
    with caplog.at_level("INFO", "ps_core"):
        train(Returns(make), device, loss_of)
    (plan,) = caplog.messages
    assert plan.startswith("Returns: planned ")
    caplog.clear()
    with caplog.at_level("DEBUG", "ps_core"):
        train(Returns(make), device, loss_of)
    assert caplog.messages[:2] == [
        "Returns: tracing the pass with fake tensors",
        f"Returns: no trace was possible (the model returns no loss){REST}",
    ]


def test_nor_where_nobody_has_set_up_logging(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from ps_core.engine._support.log import LOGGER

    monkeypatch.setattr(LOGGER, "hasHandlers", lambda: False)
    train(Returns(lambda x: x), CpuDevice(), mean)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ps_core: Returns: planned ")


def looks_at_a_value(x: Tensor) -> Tensor:
    return mean(x) * (1.0 if float(x.detach().sum()) > 0 else 0.5)


def test_what_fake_tensors_cannot_follow_is_named(device: Any, caplog: Log) -> None:
    with caplog.at_level("INFO", "ps_core"):
        train(Returns(looks_at_a_value), device)
    line = looks_at_a_value.__code__.co_firstlineno + 1
    assert reason(caplog) == (
        "fake tensors cannot follow the model: DataDependentOutputException: aten._local_scalar_dense.default "
        f"({__file__}, line {line})"
    )


def complains_at_length(x: Tensor) -> Tensor:
    if isinstance(x, FakeTensor):
        raise ValueError("so many words " * 99)
    return mean(x)


def test_it_is_short(device: Any, caplog: Log) -> None:
    with caplog.at_level("INFO", "ps_core"):
        train(Returns(complains_at_length), device)
    said = reason(caplog)
    assert said.startswith("fake tensors cannot follow the model: ValueError: so many words so many words")
    assert said.endswith(" ...")
    assert len(said) < 300


class Uncopied(nn.Module):
    """A part of a model that refuses to be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there can be only one of me")

    def forward(self, x: Tensor) -> Tensor:
        return mean(x)


def test_a_model_that_cannot_be_copied_is_not_laid_on_fake_tensors(device: Any, caplog: Log) -> None:
    with caplog.at_level("INFO", "ps_core"):
        train(Returns(Uncopied()), device)
    assert reason(caplog) == "the model cannot be copied: TypeError: there can be only one of me"


def test_cuda_that_has_begun_is_no_reason(device: Any, caplog: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first pass is foreseen, and follows a plan."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with caplog.at_level("INFO", "ps_core"):
        train(Returns(mean), device, planned=3)
    assert not any("no trace" in line for line in caplog.messages)


class Unmoved(nn.Module):
    """Its loss is made of no parameter that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.factor = stack(2), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return mean(x * self.factor)


def test_a_backward_pass_that_reaches_nothing_is_said(caplog: Log) -> None:
    told: dict[str, Any] = {"budget": Budget(device="1MiB", host=HOST), "precision": "bf16"}
    told["options"] = Options(group_bytes=8192, keep_fp32=("factor",))
    model, _ = chunked(Unmoved(), AdamW(lr=1e-2), device="emulated", **told)
    with caplog.at_level("INFO", "ps_core"):
        model(torch.randn(4, WIDTH)).backward()
    let_go(model)
    assert caplog.messages == [
        f"Unmoved: no trace was possible (its backward pass reaches no parameter that is moved){REST}"
    ]
