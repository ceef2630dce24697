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
from ps_core import AdamW, Budget, InvalidInput, Options, UnsupportedParameter
from ps_core.engine import chunked, is_managed, materialized, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of

pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SPEC = AdamW(lr=1e-2, weight_decay=0.1)
STEPS = 4


def with_adapters(seed: int = 0, **more: Any) -> Any:
    told = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | more
    config = peft.LoraConfig(**told)
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
    groups = hooks_of(model).engine.groups
    homes = {each: sum(chunk.bytes for chunk in each.chunks.values()) for each in groups}
    base_bytes = sum(size for each, size in homes.items() if not each.trainable)
    padding = 64 * sum(not each.trainable for each in groups)
    assert 2 * frozen <= base_bytes <= 2 * (frozen + padding)
    assert sum(size for each, size in homes.items() if each.trainable) >= 14 * adapters

    before = {name: value.clone() for name, value in model.state_dict().items() if "lora" not in name}
    versions = {each.index: each.weight_chunk.version for each in groups if not each.trainable}
    train(model, optimizer)
    counted = statistics(model)
    assert counted.evictions > 0
    assert counted.moved_bytes["host->device"] > 2 * frozen, "the base was fetched again and again"
    written_back = counted.moved_bytes.get("device->host", 0)
    assert written_back <= 4 * STEPS * (adapters + 64 * len(groups)), "only adapters and their gradients go back"
    assert written_back < 2 * frozen
    assert {each.index: each.weight_chunk.version for each in groups if not each.trainable} == versions, (
        "the base was changed"
    )
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


# Adapters exchanged while the model is under management


def saved_adapters(folder: Path, rank: int = 4) -> dict[str, Tensor]:
    """Others, whose product is not zero, in a folder; their values by name."""
    other = with_adapters(seed=5, r=rank)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in other.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16().float() / 8
    other.save_pretrained(str(folder))
    return {name: value for name, value in other.state_dict().items() if "lora_" in name}


def hotswap(model: Any, folder: Path) -> None:
    from peft.utils.hotswap import hotswap_adapter

    hotswap_adapter(model, str(folder), adapter_name="default", torch_device="cpu")


def adapters(model: Any) -> dict[str, Tensor]:
    return {name: value.float() for name, value in model.state_dict().items() if "lora_" in name}


def test_adapters_are_exchanged_under_materialized(tmp_path: Path) -> None:
    wanted = saved_adapters(tmp_path)
    model, optimizer = managed(with_adapters())
    train(model, optimizer)
    with materialized(model, write=True):
        hotswap(model, tmp_path)
    found = adapters(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    plain = with_adapters()
    plain.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(model(**batch(9)).loss, in_bf16(plain)(**batch(9)).loss)
    train(model, optimizer)
    assert any(not torch.equal(adapters(model)[name], value) for name, value in wanted.items())
    release(model)


def test_exchanged_without_it_they_are_refused_and_stay(tmp_path: Path) -> None:
    saved_adapters(tmp_path)
    model, optimizer = managed(with_adapters())
    train(model, optimizer)
    before = adapters(model)

    def attempt() -> None:
        hotswap(model, tmp_path)
        model(**batch(0))

    with pytest.raises(UnsupportedParameter, match=r"lora_.*changed in place.*with materialized\(model"):
        attempt()
    release(model)
    found = {name: value.float() for name, value in model.state_dict().items() if "lora_" in name}
    assert all(torch.equal(found[name], value) for name, value in before.items())


def test_of_another_rank_they_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    saved_adapters(tmp_path, rank=8)
    model, optimizer = managed(with_adapters())
    before = adapters(model)
    with (
        pytest.raises(InvalidInput, match=r"lora_A.* now has shape \(8, 32\), expected \(4, 32\)"),
        materialized(model, write=True),
    ):
        hotswap(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in adapters(model).items())
    train(model, optimizer)
    release(model)


def test_an_adapter_that_is_added_is_taken_in() -> None:
    model, optimizer = managed(with_adapters())
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    train(model, optimizer)
    assert all(is_managed(module) for name, module in model.named_modules() if name.endswith("lora_A.other"))
    model.delete_adapter("other")
    train(model, optimizer)
    release(model)
