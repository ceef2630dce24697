"""PyTorch's default type and default device are the user's, and change nothing that the engine makes for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _fake_cuda import FakeRuntime
from ps_core import AdamW, Budget, InvalidInput, Options, UnsupportedParameter
from ps_core.engine import (
    WeightAverage,
    chunked,
    load_checkpoint,
    load_weights,
    materialized,
    release,
    save_checkpoint,
    statistics,
)
from ps_core.engine._devices.cuda.device import CudaDevice

WIDTH, HOST = 32, "64MiB"


@contextmanager
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")  # of what is made there nothing can be read
    try:
        yield
    finally:
        torch.set_default_device(None)  # with a device, also the usual one, a mode would stay on for later tests


DEFAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "double precision": double,
    "another device": elsewhere,
    "another device within a block": lambda: torch.device("meta"),
}


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))


def where(device: str, folder: Path) -> dict[str, Any]:
    if device == "cpu":
        return {"device": "cpu", "budget": Budget(host=HOST)}
    if device == "with a disk":
        return {"device": "cpu", "budget": Budget(host="160KiB", disk=HOST, disk_dir=str(folder))}
    if device == "cuda":
        return {"device": CudaDevice(FakeRuntime(1)), "budget": Budget(device="80KiB", host=HOST)}
    return {"device": "emulated", "budget": Budget(device="40KiB", host=HOST)}


def trained(
    default: Callable[[], AbstractContextManager[Any]], folder: Path, inputs: list[Tensor], **arguments: Any
) -> dict[str, Tensor]:
    """A run with everything that a loop may call, under a default of the user's."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(block() for _ in range(4)))
    spec = arguments.pop("spec", AdamW(lr=1e-2))
    with default():
        model, optimizer = chunked(model, spec, options=Options(group_bytes=8192), **arguments)
        average = WeightAverage(model)
        for index, x in enumerate(inputs):
            loss = model(x).float().square().mean()
            optimizer.scale(loss).backward()
            if index == 1:
                optimizer.step()  # after two passes: sums of gradients
            elif index > 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                average.update()
        save_checkpoint(folder / "run", model, optimizer, extra={"seen": 3})
        assert load_checkpoint(folder / "run", model, optimizer) == {"seen": 3}
        load_weights(model, folder / "run")
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(optimizer.state_dict(masters=True))
        with materialized(model):
            found = {name: value.detach().clone() for name, value in model.named_parameters()}
        with average.applied():
            found |= {f"average of {name}": value.clone() for name, value in model.state_dict().items()}
        for index, entry in optimizer.state_dict(masters=True)["state"].items():
            found |= {f"{key} {index}": value for key, value in entry.items()}
        assert statistics(model).steps == len(inputs) - 1
        release(model)
    return found | {f"released {name}": value for name, value in model.state_dict().items()}


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].device == value.device, name
        assert torch.equal(got[name], value), name


def batches() -> list[Tensor]:
    return [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(each)) for each in range(4)]


CASES = [
    ("cpu", "bf16"),
    ("cpu", "fp32"),
    ("emulated", "fp16"),
    ("with a disk", "bf16"),
    ("cuda", "bf16"),
    ("cuda", "fp32"),
]


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize(("device", "precision"), CASES)
def test_training_has_the_same_bits(default: str, device: str, precision: str, tmp_path: Path) -> None:
    found = []
    for name, each in (("plain", nullcontext), ("other", DEFAULTS[default])):
        (tmp_path / name).mkdir()
        told = where(device, tmp_path) | {"precision": precision, "max_grad_norm": 1.0}
        with getattr(told["device"], "_runtime", nullcontext()):
            found.append(trained(each, tmp_path / name, batches(), **told))
    same(found[1], found[0])


# The engine asks who calls it. A default device puts code of PyTorch in between, also where it is the usual one.


def unscaled_by_torch(model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(InvalidInput, match=r"GradScaler .* optimizer\.scaler in its place"):
        scaler.unscale_(optimizer)


def parametrized(model: Any, optimizer: Any) -> None:
    with pytest.raises(UnsupportedParameter, match="parametrizations"):
        nn.utils.parametrizations.weight_norm(model[0])


@pytest.fixture
def usual_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("usual_device")
@pytest.mark.parametrize("act", [unscaled_by_torch, parametrized])
def test_the_engine_knows_who_calls_it(act: Callable[[Any, Any], None]) -> None:
    model, optimizer = chunked(block(), AdamW(lr=1e-2), device="cpu", precision="fp16", budget=Budget(host=HOST))
    optimizer.scale(model(torch.ones(2, WIDTH)).sum()).backward()
    act(model, optimizer)
    release(model)


@pytest.mark.usefixtures("usual_device")
def test_gradients_that_nothing_keeps_can_be_forgotten() -> None:
    model, _ = chunked(block(), None, device="cpu", precision="fp32", budget=Budget(host=HOST))
    model(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(UnsupportedParameter, match="without an optimizer"):
        _ = model[0].weight.grad
    model.zero_grad()
    assert model[0].weight.grad is None
    release(model)


@pytest.mark.usefixtures("usual_device")
def test_weights_from_meta_that_are_filled_where_they_lie() -> None:
    def made(device: str) -> nn.Module:
        with torch.device(device):
            module = nn.Linear(WIDTH, WIDTH)
        module.reset_parameters = lambda: (nn.init.eye_(module.weight), nn.init.zeros_(module.bias))
        return module

    model, _ = chunked(made("meta"), None, device="cpu", precision="fp32", budget=Budget(host=HOST))
    assert torch.equal(model.state_dict()["weight"], torch.eye(WIDTH))
    release(model)
