"""Parameters that are unfrozen, or added, after `chunked`: trained from the next pass on, to the bit as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from _fake_cuda import FakeRuntime
from _hugging_face import batch, llama
from ps_core import SGD, AdamW, Budget, DoesNotFit, Group, Options, UnsupportedParameter
from ps_core.engine import WeightAverage, chunked, load_checkpoint, materialized, release, save_checkpoint, statistics
from ps_core.engine._devices.cuda.device import CudaDevice

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(7))
ROOMY, TIGHT = (Budget(device=size, host="4MiB") for size in ("2MiB", "80KiB"))
STAGES = 4
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames what PEFT reads


class Net(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


def managed(model: nn.Module, budget: Budget = TIGHT, precision: str = "fp32", **more: Any) -> Any:
    given = {"device": "emulated", "options": Options(group_bytes=2**14, poison=True), "budget": budget} | more
    return chunked(model, given.pop("spec", AdamW(lr=0.01)), precision=precision, **given)


def unfreeze(model: nn.Module, stage: int) -> None:
    """The last layers first, as in progressive unfreezing."""
    for index, layer in enumerate(model.layers):
        layer.requires_grad_(index >= 5 - stage)


def add_layer(model: nn.Module, stage: int) -> None:
    if stage:
        torch.manual_seed(stage)
        model.layers.append(nn.Linear(64, 64))


def run(model: nn.Module, optimizer: Any, change: Callable[[nn.Module, int], None], passes: int = 1) -> list[float]:
    losses = []
    for stage in range(STAGES):
        before = set(model.parameters())
        change(model, stage)
        added = [parameter for parameter in model.parameters() if parameter not in before]
        if added and isinstance(optimizer, torch.optim.AdamW):
            optimizer.add_param_group({"params": added})
        for _ in range(2):
            for index in range(passes):
                loss = model(X + index)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(model(X).item())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("budget", [ROOMY, TIGHT])
def test_a_module_that_is_first_called_in_inference_mode_can_be_trained(budget: Budget, precision: str) -> None:
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        model, optimizer = managed(Net(), budget, precision)
        losses = run(model, optimizer, lambda *_: None)
        add_layer(model, 1)
        with materialized(model):  # moves home slots down, so that they are copied back later
            pass
        add_layer(model, 2)
        with mode():
            losses.append(model(X).item())
        model.requires_grad_(False).requires_grad_(True)  # PyTorch refuses this for an inference tensor
        found.append((losses + run(model, optimizer, lambda *_: None), model.state_dict()))
        release(model)
    (one, weights), (other, others) = found
    assert one == other
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "emulated", "disk"])
@pytest.mark.parametrize("change", [unfreeze, add_layer])
def test_the_bits_of_plain_pytorch(
    change: Callable[[nn.Module, int], None], device: str, passes: int, tmp_path: Path
) -> None:
    budgets = {
        "cpu": Budget(host="4MiB"),
        "emulated": TIGHT,
        "disk": Budget(device="80KiB", host="300KiB", disk="4MiB", disk_dir=str(tmp_path)),
    }
    plain, model = Net(), Net()
    change(plain, 0)
    change(model, 0)
    expected = run(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0, fused=True), change, passes)
    where = {"device": "cpu" if device == "cpu" else "emulated", "accumulation_steps": passes}
    model, optimizer = managed(model, budgets[device], spec=AdamW(lr=0.01, weight_decay=0.0), **where)
    assert run(model, optimizer, change, passes) == expected
    counted = statistics(model)
    assert counted.divergences == 0
    assert counted.planned_passes == counted.passes, "each pass after a change is foreseen"
    if device == "emulated":
        assert counted.evictions > 0
        assert counted.tiers["device"].peak_bytes <= TIGHT.device_bytes
    release(model)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("place", ["pinned", "disk"])
@pytest.mark.parametrize("change", [unfreeze, add_layer])
def test_moments_begin_at_zero_in_memory_that_was_in_use(
    change: Callable[[nn.Module, int], None], place: str, tmp_path: Path
) -> None:
    """Without poison, which fills every slot: released pinned blocks, and ranges of the file, are used again."""
    plain, model = Net(), Net()
    change(plain, 0)
    change(model, 0)
    expected = run(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0, fused=True), change)
    runtime = FakeRuntime(1)
    with runtime:
        device = CudaDevice(runtime) if place == "pinned" else "cpu"
        disk = Budget(host="300KiB", disk="4MiB", disk_dir=str(tmp_path))
        options = Options(group_bytes=2**14)
        spec = AdamW(lr=0.01, weight_decay=0.0)
        budget = TIGHT if place == "pinned" else disk
        model, optimizer = managed(model, budget, spec=spec, device=device, options=options)
        assert run(model, optimizer, change) == expected
        release(model)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("change", [unfreeze, add_layer])
def test_in_16_bits_a_budget_changes_nothing(change: Callable[[nn.Module, int], None], precision: str) -> None:
    found = []
    for budget in (ROOMY, TIGHT):
        model = Net()
        change(model, 0)
        model, optimizer = managed(model, budget, precision)
        scaled = {"fp16": optimizer.scale, "bf16": lambda loss: loss}[precision]
        losses = []
        for stage in range(STAGES):
            change(model, stage)
            for _ in range(2):
                loss = model(X)
                scaled(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        found.append((losses, optimizer.state_dict(masters=True)["state"]))
        release(model)
    (losses, states), (others, other_states) = found
    assert losses == others
    assert losses[-1] < losses[0]
    assert states.keys() == other_states.keys()
    for index, entry in states.items():
        assert all(torch.equal(other_states[index][name], value) for name, value in entry.items())


def test_memory_is_taken_only_for_what_is_trained() -> None:
    """A large frozen parameter beside a small one that is unfrozen gets no states."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 1, bias=False)).requires_grad_(False)
    model.append(nn.Linear(1, 1))
    model, optimizer = managed(model, Budget(device="1MiB", host="1MiB"), options=Options(group_bytes="1MiB"))
    model[1].requires_grad_(True)
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    total = statistics(model).bytes_per_parameter * (256 * 256 + 258)
    assert total < 4 * 256 * 256 + 16 * 2 * (256 + 64 + 64)
    release(model)


def test_a_flag_alone_is_not_refused_and_costs_nothing() -> None:
    model = Net()
    unfreeze(model, 0)
    model, optimizer = managed(model)
    before = statistics(model).bytes_per_parameter
    model.requires_grad_(True)
    with torch.no_grad():
        model(X)
    unfreeze(model, 0)
    model(X).backward()
    optimizer.step()
    assert statistics(model).bytes_per_parameter == before
    release(model)


@pytest.mark.parametrize("change", [lambda model: model.requires_grad_(True), lambda model: add_layer(model, 1)])
def test_what_cannot_fit_is_refused_at_the_pass_and_changes_nothing(change: Callable[[nn.Module], Any]) -> None:
    plain, model = Net(), Net()
    for each in (plain, model):
        unfreeze(each, 0)
    twin = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    model, optimizer = managed(model, Budget(device="96KiB", host="104KiB"), spec=AdamW(lr=0.01, weight_decay=0.1))
    change(model)
    for _ in range(2):
        with pytest.raises(DoesNotFit, match=r"Budget\(device=.*host="):
            model(X)
    del model.layers[6:]
    unfreeze(model, 0)
    for _ in range(2):
        losses = []
        for each, stepper in ((plain, twin), (model, optimizer)):
            losses.append(each(X))
            losses[-1].backward()
            stepper.step()
            stepper.zero_grad()
        assert losses[0].item() == losses[1].item()
    release(model)


def test_added_parameters_are_in_the_groups_that_match_and_in_states() -> None:
    groups = (Group(match=lambda name, _: name.endswith("bias"), lr=0.5),)
    model, optimizer = managed(Net(2), spec=SGD(lr=0.1, momentum=0.9, groups=groups))
    run_once(model, optimizer)
    model.layers.append(nn.Linear(64, 64))
    model.layers[2].register_buffer("seen", torch.zeros(3))
    model.scale = nn.Parameter(torch.ones(64), requires_grad=False)
    average = WeightAverage(model)
    run_once(model, optimizer)
    average.update()
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names == [
        ["layers.0.weight", "layers.1.weight", "scale", "layers.2.weight"],
        ["layers.0.bias", "layers.1.bias", "layers.2.bias"],
    ]
    state = optimizer.state_dict()
    assert len(state["state"]) == 6
    assert model.layers[2].weight in optimizer.state
    assert "layers.2.weight" in average.state_dict()["averages"]
    assert set(model.state_dict()) == set(model.state_dict(prefix="")) >= {"layers.2.weight", "layers.2.seen", "scale"}
    with materialized(model, write=True), torch.no_grad():
        model.layers[2].weight.fill_(0.5)
    model.layers[2].load_state_dict(model.layers[2].state_dict())
    assert model.state_dict()["layers.2.weight"].eq(0.5).all()
    release(model)
    assert type(model.layers[2].weight) is nn.Parameter


def test_added_parameters_are_listed_after_a_match_that_raised() -> None:
    fails = [True]

    def match(name: str, _: nn.Parameter) -> bool:
        if name.startswith("layers.2") and fails:
            raise ValueError(fails.pop())
        return name.endswith("bias")

    model, optimizer = managed(Net(2), spec=AdamW(groups=(Group(match=match, lr=0.5),)))
    run_once(model, optimizer)
    model.layers.append(nn.Linear(64, 64))
    model(X).backward()
    with pytest.raises(ValueError, match="True"):
        optimizer.step()
    optimizer.step()
    assert [group["param_names"][-1] for group in optimizer.param_groups] == ["layers.2.weight", "layers.2.bias"]
    assert model.layers[2].weight in optimizer.state


def run_once(model: nn.Module, optimizer: Any) -> float:
    loss = model(X)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("change", [unfreeze, add_layer])
def test_a_checkpoint_of_it_resumes(change: Callable[[nn.Module, int], None], tmp_path: Path) -> None:
    model = Net()
    change(model, 0)
    model, optimizer = managed(model, precision="bf16")
    run_once(model, optimizer)
    change(model, 1)
    run_once(model, optimizer)
    save_checkpoint(tmp_path / "here", model, optimizer)
    again = Net()
    change(again, 0)
    change(again, 1)
    again, stepper = managed(again, Budget(device="80KiB", host="4MiB"), precision="bf16")
    load_checkpoint(tmp_path / "here", again, stepper)
    assert [run_once(again, stepper) for _ in range(2)] == [run_once(model, optimizer) for _ in range(2)]
    release(model), release(again)


def test_a_run_that_added_parameters_is_resumed_by_adding_them_again(tmp_path: Path) -> None:
    """They come last, wherever they stand in the model."""
    runs = []
    for seed in range(2):
        model, optimizer = managed(Net(2), Budget(device="80KiB", host="4MiB"), precision="bf16")
        model.layers[0].register_parameter("extra", nn.Parameter(torch.full((64,), float(seed))))
        model.layers[0].register_forward_hook(lambda layer, args, out: out + layer.extra)
        with torch.no_grad():
            model(X)
        runs.append((model, optimizer))
    first, again = runs
    run_once(*first)
    save_checkpoint(tmp_path / "here", *first)
    load_checkpoint(tmp_path / "here", *again)
    assert [run_once(*again) for _ in range(2)] == [run_once(*first) for _ in range(2)]
    again[1].load_state_dict(first[1].state_dict())
    release(first[0]), release(again[0])


class Adapter(nn.Linear):
    """Adds to what its layer returns."""

    def attach(self, layer: nn.Module) -> None:
        layer.adapter = self
        layer.register_forward_hook(lambda layer, args, out: out + layer.adapter(out))


def test_a_run_that_added_modules_one_by_one_is_resumed_by_adding_all_of_them(tmp_path: Path) -> None:
    """The last layer's came first; added together they come in the order of the model. States belong to names."""
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(managed(Net(2), Budget(device="120KiB", host="4MiB")))
    first, again = runs
    for layer in reversed(first[0].layers):
        Adapter(64, 64).attach(layer)
        run_once(*first)
    save_checkpoint(tmp_path / "here", *first)
    weights, states = first[0].state_dict(), first[1].state_dict()
    for layer in again[0].layers:
        Adapter(64, 64).attach(layer)
    load_checkpoint(tmp_path / "here", *again)
    expected = [run_once(*first) for _ in range(2)]
    assert [run_once(*again) for _ in range(2)] == expected
    again[0].load_state_dict(weights)
    again[1].load_state_dict(states)
    assert [run_once(*again) for _ in range(2)] == expected
    release(first[0]), release(again[0])


def test_a_module_added_before_a_block_of_ordinary_parameters_is_taken_in_after_it() -> None:
    model, optimizer = managed(Net(2))
    add_layer(model, 1)
    with torch.no_grad():
        with materialized(model):
            inside = model(X)
        assert torch.equal(model(X), inside)
    run_once(model, optimizer)
    assert len(optimizer.state_dict()["state"]) == 6


def test_what_is_refused() -> None:
    model, _ = managed(Net(2))
    other = Net(2)
    with pytest.raises(UnsupportedParameter, match="was replaced after chunked"):
        torch.func.functional_call(model, dict(other.named_parameters()), (X,))
    assert all(type(parameter) is nn.Parameter for parameter in other.parameters())
    with torch.device("meta"):
        model.layers.append(nn.Linear(64, 64))
    for _ in range(2):
        with pytest.raises(UnsupportedParameter, match="was added after chunked"):
            model(X)
    del model.layers[2:]
    tied = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tied[1].weight.data = tied[0].weight.data
    model.layers.extend(tied)
    with pytest.raises(UnsupportedParameter, match="was added after chunked"):
        model(X)  # they would drift apart
    del model.layers[2:]
    release(model)
    held = Net(2)
    held.layers[0].requires_grad_(False)
    model, optimizer = managed(held, ROOMY)
    run_once(model, optimizer)
    alias = model.layers[0].weight.detach()
    model.requires_grad_(True)
    with pytest.raises(UnsupportedParameter, match=r"something still refers to memory of .*: drop what"):
        model(X)
    del alias
    run_once(model, optimizer)
    release(model)


def test_a_module_that_is_added_while_the_model_runs_is_taken_in_at_the_next_call() -> None:
    class Growing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x)
            if len(self.layers) < 3:
                torch.manual_seed(3)
                self.layers.append(nn.Linear(64, 64))
                loss = loss + self(x)  # the root, within itself
            return loss

    model, optimizer = managed(Growing(2), ROOMY)
    plain = Growing(2)
    losses = []
    for each in (model, plain):
        each(X)
        stepper = optimizer if each is model else torch.optim.AdamW(each.parameters(), lr=0.01, fused=True)
        losses.append([run_once(each, stepper) for _ in range(3)])
    assert losses[0] == losses[1]
    release(model)


# PEFT.


def lora(**more: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)


def peft_run(model: nn.Module, optimizer: Any, changes: list[Callable[[nn.Module], Any]]) -> list[float]:
    losses = []
    for index, change in enumerate(changes):
        change(model)
        for inner in range(2):
            loss = model(**batch(2 * index + inner)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = peft.get_peft_model(llama(), lora(), adapter_name="first")
    torch.manual_seed(5)
    model.add_adapter("second", lora())
    return model


def test_adapters_of_peft_take_turns() -> None:
    changes = [lambda m: m.set_adapter("first"), lambda m: m.set_adapter("second"), lambda m: m.set_adapter("first")]
    plain = adapted()
    expected = peft_run(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True), changes)
    model, optimizer = managed(
        adapted(), Budget(device="280KiB", host="8MiB"), spec=AdamW(lr=0.01), options=Options(group_bytes=8192)
    )
    assert peft_run(model, optimizer, changes) == expected
    counted = statistics(model)
    assert counted.evictions > 0
    assert counted.bytes_per_parameter < 8, "the base has no states"
    release(model)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_reference_adapter_as_dpo_has_it() -> None:
    """Evaluated under no_grad with its flags set, which costs no memory."""

    def step(model: nn.Module, optimizer: Any, index: int) -> float:
        model.set_adapter("second")
        with torch.no_grad():
            reference = model(**batch(index)).loss
        model.set_adapter("first")
        loss = (model(**batch(index)).loss - reference).square() + model(**batch(index + 1)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    plain = adapted()
    twin = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    model, optimizer = managed(
        adapted(), Budget(device="800KiB", host="8MiB"), spec=AdamW(lr=0.01), options=Options(group_bytes=8192)
    )
    before = statistics(model).bytes_per_parameter
    assert [step(model, optimizer, index) for index in range(3)] == [step(plain, twin, index) for index in range(3)]
    assert statistics(model).bytes_per_parameter == before
    release(model)


def test_an_adapter_added_after_chunked() -> None:
    def add(model: nn.Module) -> None:
        torch.manual_seed(6)
        model.add_adapter("third", lora())
        model.set_adapter("third")

    plain = adapted()
    twin = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)

    def add_to_plain(model: nn.Module) -> None:
        add(model)
        twin.add_param_group({"params": [each for name, each in model.named_parameters() if "third" in name]})

    first = [lambda m: m.set_adapter("first")]
    expected = peft_run(plain, twin, [*first, add_to_plain])
    model, optimizer = managed(
        adapted(), Budget(device="280KiB", host="8MiB"), spec=AdamW(lr=0.01), options=Options(group_bytes=8192)
    )
    assert peft_run(model, optimizer, [*first, add]) == expected
    release(model)
