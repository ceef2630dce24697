"""A tiny Llama with random weights, and what the tests with libraries train it on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ps_core import SGD, Budget, DoesNotFit, Options
from ps_core._units import align_up
from ps_core.engine import chunked, release, statistics

HOST = "64MiB"
VOCABULARY, LENGTH = 64, 16
SPEC = SGD(lr=0.5, momentum=0.9)
"""Adam divides any constant factor out of a gradient; with SGD an error in scale shows."""


def llama(seed: int = 0, **more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **more))


def row(index: int) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens, "labels": tokens}


def batch(index: int, size: int = 2) -> dict[str, Tensor]:
    rows = [row(size * index + each) for each in range(size)]
    return {name: torch.stack([each[name] for each in rows]) for name in rows[0]}


def twin(model: nn.Module) -> torch.optim.Optimizer:
    """torch's optimizer with the numbers of `SPEC`."""
    return torch.optim.SGD(model.parameters(), lr=SPEC.lr, momentum=SPEC.momentum)


def tight(attempt: Any, start: int) -> Any:
    """What an attempt made under the first device budget that is not refused; a refusal says what is needed."""
    size = start
    for _ in range(6):
        try:
            return attempt(Budget(device=size, host=HOST))
        except DoesNotFit as error:
            size = max(align_up(error.needed_bytes), size * 21 // 20)
    raise AssertionError(f"{size:,} bytes were refused")


def under(budget: Budget, model: nn.Module, train: Any, **more: Any) -> Any:
    """Train under management where freed memory is poisoned: what it returned, and what was left and counted."""
    options = Options(poison=True, group_bytes=8192)
    arguments = {"device": "emulated", "precision": "fp32", "options": options} | more
    model, optimizer = chunked(model, arguments.pop("spec", SPEC), budget=budget, **arguments)
    try:
        found = train(model, optimizer)
        counted = statistics(model)
    finally:
        release(model)
    assert counted.evictions > 0, "nothing was ever evicted"
    assert counted.tiers["device"].peak_bytes <= budget.device_bytes
    return found, dict(model.state_dict()), counted


def assert_near(got: dict[str, Tensor], expected: dict[str, Tensor], steps: int) -> None:
    """What rounding may do: a few units of the largest of a tensor's parameters, for every step."""
    for name, value in expected.items():
        room = 4 * steps * torch.finfo(torch.float32).eps * value.abs().max()
        apart = (got[name].float() - value.float()).abs().max()
        assert apart <= room, f"{name} is {apart:.3g} away, {room:.3g} is what rounding explains"
