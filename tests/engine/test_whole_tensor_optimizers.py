"""Optimizers that need whole matrices: each parameter is stepped in its shape, beside classes that need not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import _models as models
from _cases import next_token, tokens
from _checkpoints import Run, assert_same
from _reference import Settings
from _runs import HOST, check_same, let_go, managed, stand_in
from ps_core import AdamW, Budget, CheckpointMismatch, Group, InvalidInput, Options, TorchOptimizer
from ps_core.engine import chunked, load_checkpoint, release, save_checkpoint, statistics
from test_torch_optimizer import DEVICE, WAYS, loop, same_states, train

VECTORS = Group(match=lambda name, parameter: parameter.dim() != 2, kind=torch.optim.AdamW, lr=0.01)
MUON = TorchOptimizer(torch.optim.Muon, lr=0.05, groups=(VECTORS,))


class Scaled(nn.Module):
    """Has parameters of 0, 1, 2, 3 and 4 dimensions, thin matrices, and one whose memory is not in order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 8, 3)
        self.convolution.weight.data = self.convolution.weight.data.to(memory_format=torch.channels_last)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.line = nn.Conv1d(8, 4, 3)
        self.turned = nn.Linear(16, 4)
        self.turned.weight.data = self.turned.weight.data.t().contiguous().t()
        self.out = nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(self.pointwise(self.convolution(x)).flatten(2)).flatten(1)[:, :16]
        return (self.out(y * self.scale).square().mean() + self.turned(y).square().mean()).float()


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(3))


class ScaleByNorm(torch.optim.Optimizer):
    """A class of somebody's own: keeps a row of averages for each matrix, in a shape of fewer dimensions."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                norms = each.grad.norm(dim=-1) if each.dim() else each.grad.abs()
                state["norms"] = norms.clone() if not state else state["norms"] * 0.5 + norms
                each -= group["lr"] * each.grad / (1 + (state["norms"].unsqueeze(-1) if each.dim() else state["norms"]))


@pytest.mark.parametrize("way", WAYS)
def test_muon_for_matrices_and_adamw_for_the_rest(way: str) -> None:
    run = loop(MUON, WAYS[way].accumulation_steps)
    check_same(run, WAYS[way], managed(run, WAYS[way], "cpu", Budget(host=HOST)))
    tight = managed(run, WAYS[way], stand_in, Budget(device=DEVICE[way], host=HOST))
    check_same(run, WAYS[way], tight)
    assert tight.evictions > 0


def test_muon_on_a_disk(tmp_path: Path) -> None:
    run, told = loop(MUON), Settings(precision="bf16")
    budget = Budget(device=130_000, host=60_000, disk="64MiB", disk_dir=str(tmp_path))
    got = managed(run, told, stand_in, budget)
    check_same(run, told, got)
    assert got.statistics[0].moved_bytes["host->disk"] > 0


def pair(kind: type, *, plain: bool, settings: dict[str, Any] | None = None) -> tuple[nn.Module, Any]:
    model, given = Scaled(), settings or {"lr": 0.1}
    if plain:
        return model, kind(model.parameters(), **given)
    budget, options = Budget(device="64KiB", host="8MiB"), Options(group_bytes=1024, poison=True)
    spec = TorchOptimizer(kind, **given)
    return chunked(model, spec, device="emulated", budget=budget, options=options, precision="fp32")


def steps(model: nn.Module, optimizer: Any, count: int = 3) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(X)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, ScaleByNorm])
def test_parameters_of_every_shape_and_state_dicts_both_ways(kind: type) -> None:
    plain, managed_one = pair(kind, plain=True), pair(kind, plain=False)
    assert steps(*plain) == steps(*managed_one)
    theirs, found = plain[1].state_dict(), managed_one[1].state_dict()
    same_states(theirs["state"], found["state"])
    fresh, late = pair(kind, plain=True), pair(kind, plain=False)
    fresh[0].load_state_dict(managed_one[0].state_dict())
    fresh[1].load_state_dict(found)
    late[0].load_state_dict(plain[0].state_dict())
    late[1].load_state_dict(theirs)
    expected = steps(*plain)
    for other in (managed_one, fresh, late):
        assert steps(*other) == expected
        same_states(plain[1].state_dict()["state"], other[1].state_dict()["state"])
    let_go(managed_one[0], late[0])


def test_states_are_packed_into_one_slot_and_thin_matrices_take_a_second() -> None:
    found = {}
    for thin in (False, True):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1 if thin else 64))
        model, _ = chunked(model, TorchOptimizer(torch.optim.Adafactor))
        found[thin] = statistics(model).bytes_per_parameter
        release(model)
    assert (found[False], found[True]) == (pytest.approx(10, rel=0.05), pytest.approx(14, rel=0.05))


def test_single_states_are_read_and_written() -> None:
    model, optimizer = pair(torch.optim.Adafactor, plain=False)
    steps(model, optimizer, 1)
    entry = optimizer.state[model.turned.weight]
    assert {key: tuple(entry[key].shape) for key in ("row_var", "col_var")} == {"row_var": (4, 1), "col_var": (1, 16)}
    before = entry["row_var"].clone()
    entry["col_var"].fill_(2.0)
    assert torch.equal(entry["row_var"], before)
    assert entry["col_var"].eq(2.0).all()
    with pytest.raises(InvalidInput, match=r"col_var of 'turned\.weight' must be a tensor of shape \(1, 16\)"):
        entry["col_var"] = torch.zeros(4, 16)
    let_go(model)


def test_a_checkpoint_resumes_exactly_and_refuses_other_classes(tmp_path: Path) -> None:
    spec: Any = MUON
    with Run("emulated", precision="fp16", spec=spec) as run:
        run.train(3)
        save_checkpoint(tmp_path / "saved", run.model, run.optimizer, extra={"scheduler": run.scheduler.state_dict()})
        losses, values = run.train(3), run.values()
    with Run("cpu, disk", precision="fp16", spec=spec, seed=2, group_bytes=8192) as other:
        extra = load_checkpoint(tmp_path / "saved", other.model, other.optimizer)
        other.scheduler.load_state_dict(extra["scheduler"])
        assert all(map(torch.equal, losses, other.train(3)))
        assert_same(values, other.values())
    with Run("cpu", precision="fp16", spec=TorchOptimizer(torch.optim.Adafactor)) as other:
        words = r"torch\.optim\.Muon and torch\.optim\.AdamW in the checkpoint, torch\.optim\.Adafactor here"
        with pytest.raises(CheckpointMismatch, match=words):
            load_checkpoint(tmp_path / "saved", other.model, other.optimizer)


# ---- what cannot be stepped, and the ways out that are named ----


def test_muon_alone_names_the_parameter_and_both_ways_out_work() -> None:
    words = r"'blocks\.0\.norm\.weight' has shape .*Muon only supports 2D.*kind=torch\.optim\.AdamW"
    with pytest.raises(InvalidInput, match=words):
        chunked(models.Language(), TorchOptimizer(torch.optim.Muon))
    model = models.Language()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    for spec, each in ((TorchOptimizer(torch.optim.Muon), model), (MUON, models.Language())):
        made, optimizer = chunked(each, spec, precision="fp32")
        before = {name: value.clone() for name, value in made.state_dict().items()}
        train(made, optimizer, range(1))
        after = made.state_dict()
        assert any(not torch.equal(before[name], after[name]) for name in before)
        let_go(made)


def test_a_vector_that_is_unfrozen_later_is_refused_at_its_step_and_changes_nothing() -> None:
    model = models.Language()
    vectors = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    for parameter in vectors:
        parameter.requires_grad_(False)
    model, optimizer = chunked(model, TorchOptimizer(torch.optim.Muon), precision="fp32")
    train(model, optimizer, range(1))
    vectors[0].requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    next_token(model, *tokens(1)).backward()
    with pytest.raises(InvalidInput, match=r"has shape .*Muon only supports 2D.*requires_grad_\(False\)"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    vectors[0].requires_grad_(False)
    train(model, optimizer, range(2, 3))
    let_go(model)


def test_a_thin_matrix_that_is_added_later_is_refused_and_has_room_after_chunked_anew() -> None:
    model, spec = nn.Sequential(nn.Linear(16, 16)), TorchOptimizer(torch.optim.Adafactor)
    model, optimizer = chunked(model, spec, precision="fp32")
    model.append(nn.Linear(16, 1))
    model(torch.ones(2, 16)).sum().backward()
    with pytest.raises(InvalidInput, match=r"'1\.weight' of shape \(1, 16\) has no room for its 'col_var'"):
        optimizer.step()
    release(model)
    model, optimizer = chunked(model, spec, precision="fp32")
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    release(model)


def test_a_parameter_of_more_dimensions_than_are_tried_is_refused_by_name() -> None:
    model = nn.ParameterDict({"cube": nn.Parameter(torch.ones((2,) * 7))})
    with pytest.raises(InvalidInput, match=r"'cube' has shape .*tried with at most 6 dimensions, found 7"):
        chunked(model, TorchOptimizer(torch.optim.Adafactor))


def test_several_processes_are_refused_by_name() -> None:
    class Ranks:
        process, processes, local_ranks = 0, 2, 2

    with pytest.raises(InvalidInput, match=r"torch\.optim\.Adafactor steps whole matrices, and several processes each"):
        chunked(nn.Linear(8, 8), TorchOptimizer(torch.optim.Adafactor), collectives=Ranks())


def test_a_class_for_a_group_is_for_torch_optimizers() -> None:
    with pytest.raises(InvalidInput, match=r"Group\.kind is for a TorchOptimizer; AdamW has one class"):
        AdamW(groups=(VECTORS,))
    with pytest.raises(InvalidInput, match=r"Group\.kind must be an optimizer class, found 'adamw'"):
        TorchOptimizer(torch.optim.Muon, groups=(Group(match=lambda name, _: True, kind="adamw"),))
