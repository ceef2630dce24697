"""Memory that parameters share: with one another, with buffers, and with tensors in attributes of modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

import _models as models
from _cases import rows, square
from _runs import chunked_model, let_go
from _states import masters_of
from _twins import twin
from ps_core import SGD, AdamW, Budget, Options, UnsupportedParameter
from ps_core.engine import (
    HostEmbedding,
    chunked,
    load_checkpoint,
    load_weights,
    materialized,
    release,
    save_checkpoint,
    statistics,
)

WIDTH, LAYERS, STEPS = 16, 6, 4
SPECS = [AdamW(lr=1e-2, weight_decay=0.1), SGD(lr=0.05, momentum=0.9, weight_decay=0.1)]
PLACES: list[tuple[str, dict[str, Any]]] = [
    ("cpu", {"host": "64MiB"}),
    ("emulated", {"device": "16KiB", "host": "64MiB"}),
]
EACH_PLACE = pytest.mark.parametrize(("device", "budget"), PLACES, ids=[name for name, _ in PLACES])


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def loss_of(model: nn.Module, index: int) -> Tensor:
    torch.manual_seed(index)
    return (model(torch.randn(4, WIDTH)).float() - torch.randn(4, WIDTH)).square().mean()


def train(model: nn.Module, optimizer: Any, steps: int = STEPS) -> list[float]:
    losses = []
    for index in range(steps):
        loss = loss_of(model, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def manage(model: nn.Module, spec: Any, device: str, budget: dict[str, Any], **more: Any) -> Any:
    options = Options(group_bytes=4 * WIDTH * (WIDTH + 2), poison=True)
    return chunked(model, spec, device=device, budget=Budget(**budget), options=options, **{"precision": "fp32"} | more)


# Ties of whole parameters: as in plain PyTorch, each with a gradient and states of its own, over one memory.


def tie(model: nn.Module) -> None:
    model[2].weight.data = model[0].weight.data


def tie_three(model: nn.Module) -> None:
    for layer in (model[3], model[5]):
        layer.weight.data = model[0].weight.data
    model[4].bias.data = model[1].bias.data


def tie_with_a_frozen_one(model: nn.Module) -> None:
    tie(model)
    model[2].weight.requires_grad_(False)


def tie_to_a_frozen_one(model: nn.Module) -> None:
    tie(model)
    model[0].weight.requires_grad_(False)


def tie_by_numpy(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(torch.from_numpy(model[0].weight.detach().numpy()))


def tie_by_loading(model: nn.Module) -> None:
    """A tie of Parameter objects, of which ``assign=True`` makes several over one memory."""
    model[2].weight = model[0].weight
    model.load_state_dict(model.state_dict(), assign=True)
    assert model[2].weight is not model[0].weight


TIES = [tie, tie_three, tie_with_a_frozen_one, tie_to_a_frozen_one, tie_by_numpy, tie_by_loading]


def equal(model: nn.Module) -> bool:
    return torch.equal(model[0].weight.detach(), model[2].weight.detach())


@EACH_PLACE
@pytest.mark.parametrize("spec", SPECS, ids=["adamw", "sgd"])
@pytest.mark.parametrize("how", TIES)
def test_a_tie_by_memory_is_trained_as_in_plain_pytorch(how: Any, spec: Any, device: str, budget: Any) -> None:
    plain, model = linears(), linears()
    how(plain)
    how(model)
    expected = train(plain, twin(spec, plain))
    model, optimizer = manage(model, spec, device, budget)
    losses = train(model, optimizer)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert not statistics(model).divergences
    release(model)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, msg=f"{name} is another")


@EACH_PLACE
@pytest.mark.parametrize("more", [{}, {"accumulation_steps": 2}], ids=str)
def test_tied_parameters_stay_equal_in_16_bits(more: dict[str, Any], device: str, budget: Any) -> None:
    model = linears()
    tie(model)
    before = model[0].weight.detach().clone()
    model, optimizer = chunked(model, AdamW(lr=1e-2), device=device, budget=Budget(**budget), **more)
    for _ in range(3):
        train(model, optimizer, steps=1)
        assert equal(model)
        masters = masters_of(optimizer.state_dict(masters=True))
        assert torch.equal(masters[0], masters[4])
    assert not torch.equal(masters[0], before)
    moments = [optimizer.state_dict()["state"][index]["exp_avg"] for index in (0, 4)]
    assert not torch.equal(*moments), "each has a gradient of its own"
    release(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_leaves_the_management_is_one_memory_again(precision: str) -> None:
    model = linears()
    tie(model)
    first, second = model[0].weight, model[2].weight
    model, _ = manage(model, AdamW(), *PLACES[1], precision=precision)
    state = model.state_dict()
    assert state["0.weight"].data_ptr() == state["2.weight"].data_ptr()
    with materialized(model, write=True):
        assert model[0].weight.data_ptr() == model[2].weight.data_ptr()
        with torch.no_grad():
            model[2].weight.fill_(0.5)
        assert bool((model[0].weight == 0.5).all())
    assert equal(model)
    assert bool((model.state_dict()["0.weight"] == 0.5).all())
    release(model)
    assert model[0].weight is first
    assert model[2].weight is second
    assert first.data_ptr() == second.data_ptr()


def test_a_chunked_that_fails_leaves_the_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    model = linears()
    tie(model)
    before = model[0].weight.detach().clone()
    monkeypatch.setattr("ps_core.engine._chunked.move_unmanaged", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        manage(model, AdamW(), *PLACES[1])
    assert model[0].weight.data_ptr() == model[2].weight.data_ptr()
    assert torch.equal(model[2].weight, before)


def load_state_dict(model: nn.Module, optimizer: Any, name: str, value: Tensor, path: Path) -> None:
    model.load_state_dict({name: value}, strict=False)


def load_masters(model: nn.Module, optimizer: Any, name: str, value: Tensor, path: Path) -> None:
    state = optimizer.state_dict(masters=False)
    index = [each for each, _ in model.named_parameters()].index(name)
    state["masters"] = {index: value}
    optimizer.load_state_dict(state)


def load_file(model: nn.Module, optimizer: Any, name: str, value: Tensor, path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    others = ("0.weight", "2.weight")
    rest = {each: tensor for each, tensor in model.state_dict().items() if each not in others}
    safetensors.save_file({name: value, **rest}, path / "model.safetensors")
    assert load_weights(model, path) == ([], [])


def write_materialized(model: nn.Module, optimizer: Any, name: str, value: Tensor, path: Path) -> None:
    with materialized(model, names=[name], write=True), torch.no_grad():
        model.get_parameter(name).copy_(value)


@EACH_PLACE
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["0.weight", "2.weight"])
@pytest.mark.parametrize("write", [load_state_dict, load_masters, load_file, write_materialized])
def test_what_is_written_to_one_is_written_to_both(
    write: Any, name: str, precision: str, device: str, budget: Any, tmp_path: Path
) -> None:
    model = linears()
    tie(model)
    model, optimizer = manage(model, AdamW(), device, budget, precision=precision)
    train(model, optimizer, steps=1)
    write(model, optimizer, name, torch.full((WIDTH, WIDTH), 0.25), tmp_path)
    for each in (model[0].weight, model[2].weight):
        assert bool((each == 0.25).all())
    train(model, optimizer, steps=2)
    assert equal(model)
    assert not bool((model[0].weight == 0.25).all())
    let_go(model)


def test_a_checkpoint_goes_on_to_the_bit(tmp_path: Path) -> None:
    runs = []
    for saves in (True, False):
        model = linears()
        tie(model)
        model, optimizer = manage(model, AdamW(lr=1e-2), *PLACES[1], precision="bf16")
        if saves:
            train(model, optimizer)
            save_checkpoint(tmp_path / "saved", model, optimizer)
        else:
            load_checkpoint(tmp_path / "saved", model, optimizer)
        runs.append((train(model, optimizer), masters_of(optimizer.state_dict(masters=True))))
        assert equal(model)
        release(model)
    (losses, masters), (others, same) = runs
    assert losses == others
    assert all(torch.equal(masters[index], same[index]) for index in masters)


def test_a_tie_to_a_table_on_the_host_is_refused() -> None:
    model = nn.ModuleDict({"table": HostEmbedding(48, WIDTH), "head": nn.Linear(WIDTH, 48, bias=False)})
    model["head"].weight.data = model["table"].weight.data
    with pytest.raises(UnsupportedParameter, match=r"'table.weight' and 'head.weight' share memory.*share the Param"):
        manage(model, AdamW(), *PLACES[1])


# Everything else that shares memory is refused by name.


def transposed(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[0].weight.data.t())


def a_row(model: nn.Module) -> None:
    model[2].bias = nn.Parameter(model[0].weight.data[3])


def other_columns(model: nn.Module) -> None:
    both = torch.randn(WIDTH, WIDTH + 1)
    model[0].weight, model[2].weight = nn.Parameter(both[:, :-1]), nn.Parameter(both[:, 1:])


def another_type(model: nn.Module) -> None:
    model[2].ids = nn.Parameter(model[0].weight.data.view(torch.int32), requires_grad=False)


def a_buffer(model: nn.Module) -> None:
    model[2].register_buffer("kept", model[0].weight.data)


def an_attribute(model: nn.Module) -> None:
    model[2].kept = model[0].weight.t()


def in_a_list(model: nn.Module) -> None:
    model[2].kept = [1, ("two", model[0].weight.detach())]


def in_a_dictionary(model: nn.Module) -> None:
    model[2].kept = {"a": {3: model[0].weight.data[1:]}}


def in_a_hidden_module(model: nn.Module) -> None:
    hidden = nn.Linear(WIDTH, WIDTH)
    hidden.weight.data = model[0].weight.data
    model[2].kept = (hidden,)


def on_a_parameter(model: nn.Module) -> None:
    model[2].weight.main = model[0].weight.data.view(-1)


def by_numpy(model: nn.Module) -> None:
    model[2].kept = torch.from_numpy(model[0].weight.detach().numpy())


REFUSED: list[tuple[Callable[[nn.Module], None], str]] = [
    (transposed, "2.weight"),
    (a_row, "2.bias"),
    (other_columns, "2.weight"),
    (another_type, "2.ids"),
    (a_buffer, "2.kept"),
    (an_attribute, "2.kept"),
    (in_a_list, "2.kept[1][1]"),
    (in_a_dictionary, "2.kept['a'][3]"),
    (in_a_hidden_module, "2.kept[0].weight"),
    (on_a_parameter, "2.weight.main"),
    (by_numpy, "2.kept"),
]


@pytest.mark.parametrize("spec", [AdamW(), None], ids=["trained", "evaluated"])
@pytest.mark.parametrize(("share", "name"), REFUSED, ids=[share.__name__ for share, _ in REFUSED])
def test_other_shared_memory_is_refused_by_name(share: Any, name: str, spec: Any) -> None:
    model = linears()
    share(model)
    before = [each.data_ptr() for each in model.parameters()]
    with pytest.raises(UnsupportedParameter, match=r"share the Parameter itself.*a property") as caught:
        manage(model, spec, *PLACES[0])
    assert repr(name) in str(caught.value)
    assert "'0.weight'" in str(caught.value)
    assert [each.data_ptr() for each in model.parameters()] == before


def test_the_whole_path_is_told() -> None:
    model = nn.Sequential(models.stack(2), nn.Linear(models.WIDTH, models.WIDTH))
    model[0][1].cache = {"k": [model[1].weight.detach()]}
    with pytest.raises(UnsupportedParameter, match=r"\"0\.1\.cache\['k'\]\[0\]\".*'1\.weight'"):
        manage(model, AdamW(), *PLACES[0])


def test_an_expanded_parameter_is_refused_as_by_pytorchs_optimizers() -> None:
    model = linears()
    model[2].bias = nn.Parameter(torch.zeros(1).expand(WIDTH))
    with pytest.raises(UnsupportedParameter, match=r"'2\.bias' is expanded: its 16 elements are 1 places"):
        manage(model, AdamW(), *PLACES[0])
    model[2].bias.requires_grad_(False)
    release(manage(model, AdamW(), *PLACES[0])[0])


@pytest.mark.parametrize("how", [tie, transposed])
def test_shared_memory_on_meta_is_refused(how: Any) -> None:
    with torch.device("meta"):
        model = linears()
    how(model)
    with pytest.raises(UnsupportedParameter, match=r"'2\.weight'.* shares memory with the parameter '0\.weight'"):
        manage(model, AdamW(), *PLACES[0])


# What shares nothing that matters.


class Empty(nn.Module):
    """Parameters without elements, of one storage."""

    def __init__(self) -> None:
        super().__init__()
        nothing = torch.zeros(0)
        self.layer, self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Parameter(nothing), nn.Parameter(nothing)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def parts_of_one_storage() -> nn.Module:
    model, flat = linears(), torch.randn(LAYERS, WIDTH, WIDTH) / WIDTH
    for layer, own in zip(model, flat, strict=True):
        layer.weight.data = own
    return model


def columns_of_one_matrix() -> nn.Module:
    model, both = linears(), torch.randn(WIDTH, 2 * WIDTH) / WIDTH
    model[0].weight, model[2].weight = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])
    return model


def attributes_that_are_parameters() -> nn.Module:
    model = linears()
    model[2].first = [model[0].weight, {"module": model[0]}]
    model[2].itself = model[2].weight
    model[2].weight.myself = model[2].weight
    model[3].cycle = [model]
    model[3].cycle.append(model[3].cycle)
    return model


def buffers_of_one_memory() -> nn.Module:
    model = linears()
    model[0].register_buffer("one", torch.ones(3))
    model[2].register_buffer("other", model[0].one)
    model[2].kept = model[0].one[1:]
    return model


def of_another_model() -> nn.Module:
    """A managed teacher's weights, in a list of the student's."""
    model, teacher = linears(), manage(linears(), None, *PLACES[0])[0]
    model[0].teacher = [teacher]
    model[0].theirs = (teacher[0].weight,)
    return model


def normed_by_a_hook() -> nn.Module:
    """Until its first forward, the attribute ``weight`` of such a module is the parameter's memory."""
    model = linears()
    spectral_norm(model[2])
    return model


SHARE_NOTHING = [
    Empty,
    parts_of_one_storage,
    columns_of_one_matrix,
    attributes_that_are_parameters,
    buffers_of_one_memory,
    of_another_model,
    normed_by_a_hook,
]


@EACH_PLACE
@pytest.mark.parametrize("build", SHARE_NOTHING)
def test_what_shares_nothing_is_trained_as_in_plain_pytorch(build: Any, device: str, budget: Any) -> None:
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model, optimizer = manage(build(), SPECS[1], device, budget)
    expected = train(plain, twin(SPECS[1], plain))
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-6)
    let_go(model)


def test_parameters_of_recurrent_modules_and_of_meta_are_no_aliases() -> None:
    for build in (partial(models.Recurrent, nn.LSTM), models.Attention, models.stack):
        with torch.device("meta"):
            made = build()
        with chunked_model(made) as (model, _):
            square(model, *rows(0)).backward()
        with chunked_model(build()) as (model, _):
            square(model, *rows(0)).backward()


def changed_by_a_view(weight: Tensor) -> None:
    """Change a weight as `nn.init.orthogonal_` does: through a view, then by its own name."""
    with torch.no_grad():
        weight.view(-1).copy_(torch.linspace(-1, 1, weight.numel()))
        weight.mul_(0.5)


@EACH_PLACE
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_remedy_works_after_a_change_by_a_view_and_by_name(
    device: str, budget: dict[str, Any], precision: str
) -> None:
    """The change by name is refused; the one before it is not refused a second time, where the remedy is followed."""
    results = []
    for refused in (False, True):
        model, optimizer = chunked(
            linears(), AdamW(lr=1e-2), device=device, budget=Budget(**budget), precision=precision
        )
        train(model, optimizer, 2)
        if refused:
            with pytest.raises(UnsupportedParameter, match=r"mul_ would change '1\.weight'"):
                changed_by_a_view(model[1].weight)
        with materialized(model, ["1.weight"], write=True):
            changed_by_a_view(model[1].weight)
        losses = train(model, optimizer)
        results.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
        release(model)
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
