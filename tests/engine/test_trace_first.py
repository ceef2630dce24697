"""What fake tensors say before a model has run is what the engine records when it runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from ps_core import AdamW, Budget, Options, Trace
from ps_core.engine import chunked, release
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._tracing.fake_trace import trace

IDS = torch.arange(4 * 48).reshape(4, 48) % 90
LANGUAGE = {"input_ids": IDS, "labels": IDS}
SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {"intermediate_size": 96, "max_position_embeddings": 64}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 100, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, **WIDE))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **WIDE, num_key_value_heads=2))


class Stack(nn.Module):
    """Layers of which some may be recomputed."""

    def __init__(self, *, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.table = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x))
        logits = nn.functional.linear(x, self.table.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Product(torch.autograd.Function):
    """A function of two parameters of different groups; autograd itself looks at both before and afterwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight.detach(), shift)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1), grad.sum((0, 1))


class WithFunction(Stack):
    """The head is a function of the user's own."""

    def __init__(self) -> None:
        super().__init__(recomputed=False)
        self.last = nn.Linear(32, 100)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = Product.apply(x, self.table.weight, self.last.bias)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Scaled(nn.Module):
    """A frozen layer between frozen scales, with an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Parameter(torch.ones(32), requires_grad=False) for _ in range(2))
        self.layer = nn.Linear(32, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before * x
        return self.after * (self.layer(x) + self.up(self.down(x)))


class Adapted(Stack):
    """Adapters in recomputed blocks, which keep frozen scales as they are given, not views of them."""

    def __init__(self) -> None:
        super().__init__(recomputed=True)
        self.layers = nn.ModuleList(Scaled() for _ in range(4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "stack": lambda: Stack(recomputed=False),
    "recomputed": lambda: Stack(recomputed=True),
    "function": WithFunction,
    "adapted": Adapted,
}


def recorded(model: nn.Module, precision: str) -> tuple[Trace, dict[str, int]]:
    """What the engine records in its first iteration, and each parameter's group."""
    options = Options(group_bytes=8192)
    chunked(
        model,
        AdamW(lr=1e-3),
        device="emulated",
        budget=Budget(device="64MiB", host="1GiB"),
        precision=precision,
        options=options,
    )
    engine = hooks_of(model).engine
    with patch.object(engine.passes.scheduler, "observe", wraps=engine.passes.scheduler.observe) as seen:
        result: Any = model(**LANGUAGE)
        loss = getattr(result, "loss", result)
        del result
        loss.backward()
    recording = seen.call_args_list[0].args[0]
    traced = recording.trace("", engine.records, engine.groups, engine.constant_bytes, 0)
    unit_of = {record.name: record.group.index for record in engine.records}
    release(model)
    return traced, unit_of


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_fake_trace_is_the_engines_own(name: str, precision: str) -> None:
    model = MODELS[name]()
    meant = MODELS[name]()
    engines, unit_of = recorded(model, precision)
    fake = trace(meant, LANGUAGE, precision=precision, unit_of=lambda name: unit_of[name])
    assert len(set(unit_of.values())) > 3
    assert [(moment.phase, set(moment.reads), set(moment.grads)) for moment in fake.moments] == [
        (moment.phase, set(moment.reads), set(moment.grads)) for moment in engines.moments
    ]
    inputs = IDS.numel() * IDS.element_size()  # on the compute tier, too, though no operator made them
    pairs = list(zip(fake.moments, engines.moments, strict=True))
    assert all(0.97 <= one.nonmodel_bytes / (two.nonmodel_bytes + inputs) <= 1.1 for one, two in pairs)
    assert 1.0 <= fake.peak_nonmodel_bytes / engines.peak_nonmodel_bytes <= 1.10


def test_inference_in_another_thread_meanwhile() -> None:
    """A fake pass leaves no mode on its thread's stack, whatever inference modes other threads have entered."""
    entered, done = Event(), Event()

    def infers() -> None:
        with torch.inference_mode():
            entered.set()
            done.wait(60)

    class Waits(Stack):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not entered.is_set():
                pool.submit(infers)
            assert entered.wait(60)
            return super().forward(*args, **kwargs)

    with ThreadPoolExecutor(1) as pool:
        try:
            found = trace(Waits(recomputed=False), LANGUAGE)
            assert not _get_current_dispatch_mode_stack()
        finally:
            done.set()
    assert found == trace(Waits(recomputed=False), LANGUAGE)
