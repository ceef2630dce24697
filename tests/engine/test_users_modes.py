"""Modes of PyTorch that the user enters see the model's operations, and none that the engine does by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from _fake_cuda import FakeRuntime
from _runs import let_go
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, statistics
from ps_core.engine._devices.cuda.device import CudaDevice

WIDTH, BATCH, HOST = 32, 4, "64MiB"
aten: Any = torch.ops.aten


class Block(nn.Module):
    """Two linear layers, whose intermediate results can be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


class Stack(nn.Module):
    """Blocks, of which ``contexts`` says what their checkpoints keep; None: there are none."""

    def __init__(self, contexts: Callable[[], Any] | None, **told: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.contexts, self.told = contexts, told

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.contexts is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts, **self.told)
        return x


def where(name: str) -> dict[str, Any]:
    if name == "cpu":
        return {"device": "cpu", "budget": Budget(host=HOST)}
    if name == "cuda":
        return {"device": CudaDevice(FakeRuntime(1)), "budget": Budget(device="80KiB", host=HOST)}
    return {"device": "emulated", "budget": Budget(device="80KiB", host=HOST)}


Mode = Callable[[], AbstractContextManager[Any]]


def trained(
    place: str,
    contexts: Callable[[], Any] | None = None,
    *,
    precision: str = "bf16",
    step: str = "after_backward",
    told_to_checkpoint: dict[str, Any] | None = None,
    forward: Mode = nullcontext,
    backward: Mode = nullcontext,
    outside: Mode = nullcontext,
) -> dict[str, Tensor]:
    """Train for some steps under the modes, and return what was computed."""
    told = where(place)
    torch.manual_seed(0)
    with getattr(told["device"], "_runtime", nullcontext()), outside():
        model, optimizer = chunked(
            Stack(contexts, **(told_to_checkpoint or {})),
            AdamW(lr=1e-2),
            precision=precision,
            options=Options(group_bytes=4096, step=step),  # type: ignore[arg-type]  # one of its literals
            **told,
        )
        found: dict[str, Tensor] = {}
        try:
            for index in range(5):
                x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(index))
                with forward():
                    loss = model(x).float().square().mean()
                with backward():
                    loss.backward()
                found[f"loss {index}"] = loss.detach()
                optimizer.step()
                optimizer.zero_grad()
            assert place == "cpu" or statistics(model).fetches
            found |= {name: value.clone() for name, value in model.state_dict().items()}
            for index, entry in optimizer.state_dict(masters=True)["state"].items():
                found |= {f"{key} {index}": value for key, value in entry.items()}
            return found
        finally:
            let_go(model)


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


# Selective activation checkpointing: in backward a mode returns results of forward, by operator and in their order.


def all_but_gelu(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    again = function is aten.gelu.default or function.is_view
    return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE


SELECTIVE = {
    "products": partial(create_selective_checkpoint_contexts, [aten.addmm.default, aten.mm.default]),
    "all but one": partial(create_selective_checkpoint_contexts, all_but_gelu),
}
RESPECTS = "respect_saved_tensors_hooks"
"""Argument, since PyTorch 2.14: send kept tensors through hooks for saved tensors, as the engine's."""
TOLD: list[dict[str, Any]] = [{}]
if RESPECTS in signature(checkpoint).parameters:  # which warns unless it is told
    TOLD = [{RESPECTS: True}, {RESPECTS: False}]


@pytest.mark.parametrize("kept", SELECTIVE)
@pytest.mark.parametrize("place", ["emulated", "cuda"])
@pytest.mark.parametrize(
    ("precision", "step"), [("bf16", "after_backward"), ("fp32", "after_backward"), ("bf16", "in_backward")]
)
@pytest.mark.parametrize("told", TOLD)
def test_selective_checkpointing_beside_moves(
    told: dict[str, Any], kept: str, place: str, precision: str, step: str
) -> None:
    expected = trained("cpu", precision=precision)
    same(trained(place, SELECTIVE[kept], precision=precision, step=step, told_to_checkpoint=told), expected)


# Modes that write down what they see, change it, or keep it.


class Operators(TorchDispatchMode):
    """Count operators."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Count functions."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("step", ["after_backward", "in_backward", "speculative"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("mode", [Operators, Functions])
def test_modes_see_the_same_wherever_parameters_are(mode: Any, precision: str, step: str) -> None:
    counts = []
    for place in ("cpu", "emulated", "cuda"):
        counts.append((Counter[str](), Counter[str]()))
        watch = [partial(mode, seen) for seen in counts[-1]]
        trained(place, precision=precision, step=step, forward=watch[0], backward=watch[1])
    assert counts[0] == counts[1]
    assert counts[0] == counts[2]
    assert not counts[0][0]["copy_"] + counts[0][0]["aten.copy_.default"]


class NotNumbers(TorchDispatchMode):
    """Refuse results that are not a number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, Tensor)
            and result.is_floating_point()
            and not func._schema.name.startswith("aten::empty")
        ):
            assert not result.isnan().any(), func
        return result


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("place", ["cpu", "emulated"])
def test_no_mode_sees_memory_without_contents(place: str, precision: str) -> None:
    same(trained(place, precision=precision, outside=NotNumbers), trained(place, precision=precision))
