"""LoRA by PEFT: the base is frozen, takes 2 bytes a parameter, and is never written back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _hugging_face import HOST, batch, llama
from _reference import Make, Settings
from _runs import check_under_the_tightest_budget
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, materialized, release, statistics
from ps_core.engine._management import management_of

pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SPEC = AdamW(lr=1e-2, weight_decay=0.1)
STEPS = 4


def with_adapters(seed: int = 0, **more: Any) -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)
    return peft.get_peft_model(llama(seed), config)


def train(model: nn.Module, optimizer: Any) -> list[Tensor]:
    logs = []
    for index in range(STEPS):
        loss = model(**batch(index)).loss
        optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        logs.append(loss.detach())
    return logs


def in_bf16(model: Any) -> Any:
    """The parameters, not the buffers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def managed(model: nn.Module, size: int = 160_000) -> tuple[Any, Any]:
    options = Options(poison=True, group_bytes=8192)
    return chunked(model, SPEC, device="emulated", budget=Budget(device=size, host=HOST), options=options)


def test_the_same_bits_under_the_tightest_budget() -> None:
    def loop(make: Make) -> list[Tensor]:
        return train(*make(with_adapters(), SPEC))

    check_under_the_tightest_budget(loop, Settings(precision="bf16"))


def test_the_base_takes_two_bytes_a_parameter_and_is_never_written_back() -> None:
    model, optimizer = managed(with_adapters())
    frozen = sum(each.numel() for each in model.parameters() if not each.requires_grad)
    adapters = sum(each.numel() for each in model.parameters() if each.requires_grad)
    groups = management_of(model).engine.groups
    homes = {each: sum(home.bytes for home in each.homes.values()) for each in groups}
    base_bytes = sum(size for each, size in homes.items() if not each.trainable)
    padding = 64 * sum(not each.trainable for each in groups)
    assert 2 * frozen <= base_bytes <= 2 * (frozen + padding)
    assert sum(size for each, size in homes.items() if each.trainable) >= 14 * adapters

    before = {name: value.clone() for name, value in model.state_dict().items() if "lora" not in name}
    stamps = {each.index: each.home.stamp for each in groups if not each.trainable}
    train(model, optimizer)
    counted = statistics(model)
    assert counted.evictions > 0
    assert counted.moved_bytes["host->device"] > 2 * frozen, "the base was fetched again and again"
    written_back = counted.moved_bytes.get("device->host", 0)
    assert written_back <= 4 * STEPS * (adapters + 64 * len(groups)), "only adapters and their gradients go back"
    assert written_back < 2 * frozen
    assert {each.index: each.home.stamp for each in groups if not each.trainable} == stamps, "the base was changed"
    for name, value in before.items():
        assert torch.equal(value, model.state_dict()[name]), name
    release(model)


def test_adapters_are_saved_and_loaded_by_peft(tmp_path: Path) -> None:
    model, optimizer = managed(with_adapters())
    train(model, optimizer)
    model.save_pretrained(str(tmp_path))
    expected = {name: value.float() for name, value in model.state_dict().items() if "lora" in name}
    with torch.no_grad():
        loss = model(**batch(9)).loss
    release(model)

    loaded = peft.PeftModel.from_pretrained(llama(), str(tmp_path), is_trainable=True)
    found = {name: value for name, value in loaded.state_dict().items() if "lora" in name}
    assert found.keys() == expected.keys()
    assert any(value.any() for name, value in found.items() if "lora_B" in name), "training moved them from zero"
    for name, value in expected.items():
        assert torch.equal(value, found[name].float()), name
    again, optimizer = managed(loaded)
    with torch.no_grad():
        assert torch.equal(again(**batch(9)).loss, loss)
    train(again, optimizer)
    release(again)


def test_adapters_are_merged_under_materialized() -> None:
    """The sum goes to the base as a frozen parameter's value, and the model then needs no adapters."""
    model, optimizer = managed(with_adapters())
    train(model, optimizer)
    plain = with_adapters()
    plain.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    in_bf16(plain).merge_adapter()
    with materialized(model, write=True):
        model.merge_adapter()
    expected = plain.state_dict()
    merged = [name for name in expected if name.endswith(("q_proj.base_layer.weight", "v_proj.base_layer.weight"))]
    assert len(merged) == 6
    for name in merged:
        assert torch.equal(model.state_dict()[name], expected[name]), name
    with torch.no_grad():
        assert torch.equal(model(**batch(9)).loss, plain(**batch(9)).loss)
    release(model)


def test_adapters_switched_off_give_the_base() -> None:
    model, optimizer = managed(with_adapters())
    train(model, optimizer)
    base = in_bf16(llama())
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(**batch(9)).loss, base(**batch(9)).loss)
    release(model)
