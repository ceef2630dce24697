"""Parameters that are unfrozen or added after `chunked`, with several ranks: PyTorch's bits, or one refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from _threads import Together, run
from ps_core import AdamW, Budget, DoesNotFit, Options, RanksDiverged
from ps_core.engine import chunked, load_checkpoint, release, save_checkpoint, statistics

WIDTH, STAGES = 64, 4
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7))
WHERE = {
    "cpu": ("cpu", Budget(host="4MiB")),
    "tight": ("emulated", Budget(device="80KiB", host="4MiB")),
    "roomy": ("emulated", Budget(device="2MiB", host="4MiB")),
}


class Net(nn.Module):
    """Starts alike on all ranks, which are threads and share PyTorch's generator."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(linear(index) for index in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


def linear(seed: int) -> nn.Linear:
    made, generator = nn.Linear(WIDTH, WIDTH), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    return made


def unfreeze(model: nn.Module, stage: int) -> None:
    for index, layer in enumerate(model.layers):
        layer.requires_grad_(index >= 5 - stage)


def unfreeze_biases(model: nn.Module, stage: int) -> None:
    """Parts of groups: each is cut in two."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("layers.5") or (stage > 1 and name.endswith("bias")))


def add_layer(model: nn.Module, stage: int) -> None:
    if stage:
        model.layers.append(linear(10 + stage))


def train(model: nn.Module, optimizer: Any, change: Any, passes: int, ranks: int = 1) -> list[float]:
    """The ranks have the same batch, so each gives its part of the same gradient."""
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
                (loss / ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(model(X).item())
    return losses


def managed(each: Together, model: nn.Module, where: str = "tight", **more: Any) -> tuple[Any, Any]:
    device, budget = WHERE[where]
    given = {"precision": "fp32", "options": Options(group_bytes=2**14, poison=where != "cpu"), "budget": budget}
    return chunked(model, AdamW(lr=0.01, weight_decay=0.0), device=device, collectives=each, **given | more)


def case(each: Together, change: Any, where: str, passes: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = Net()
    change(model, 0)
    _, budget = WHERE[where]
    model, optimizer = managed(each, model, where, accumulation_steps=passes, budget=Budget(**vars_of(budget)))
    losses = train(model, optimizer, change, passes, each.ranks)
    counted = statistics(model)
    if where == "tight":
        assert counted.evictions > 0
        assert counted.tiers["device"].peak_bytes <= 80 * 1024
    values = {name: value.clone() for name, value in model.state_dict().items()}
    release(model)
    return losses, values


def vars_of(budget: Budget) -> dict[str, Any]:
    """A budget object is for one model."""
    return {"device": budget.device, "host": budget.host}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("change", [unfreeze, unfreeze_biases, add_layer])
def test_the_bits_of_plain_pytorch(change: Callable[[nn.Module, int], None], where: str, passes: int) -> None:
    plain = Net()
    change(plain, 0)
    twin = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    expected = train(plain, twin, change, passes)
    found, _ = run(2, case, change, where, passes)
    for losses, values in found:
        assert losses == expected
        assert all(torch.equal(value, values[name]) for name, value in plain.state_dict().items())


def in_16_bits(each: Together, change: Any, where: str, folder: Path) -> list[float]:
    """Trains, saves, and goes on; a second model goes on from the checkpoint with the same bits."""
    runs = []
    for loads in (False, True):
        model = Net()
        change(model, 0)
        budget = Budget(**vars_of(WHERE[where][1]))
        model, optimizer = managed(each, model, where, precision="bf16", budget=budget)
        if not loads:
            losses = train(model, optimizer, change, 1, each.ranks)
            save_checkpoint(folder / f"{where}-{change.__name__}", model, optimizer)
        else:
            for stage in range(STAGES):
                change(model, stage)
            with torch.enable_grad():
                model(X)
            load_checkpoint(folder / f"{where}-{change.__name__}", model, optimizer)
        runs.append(train(model, optimizer, lambda model, stage: None, 1, each.ranks))
        release(model)
    assert runs[0] == runs[1]
    return losses + runs[0]


@pytest.mark.parametrize("change", [unfreeze, add_layer])
def test_in_16_bits_a_budget_and_a_checkpoint_change_nothing(
    change: Callable[[nn.Module, int], None], tmp_path: Path
) -> None:
    found = [run(2, in_16_bits, change, where, tmp_path)[0] for where in ("roomy", "tight")]
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]
    assert found[0][0][-1] < found[0][0][0]


def parts(each: Together, change: Any) -> None:
    model = Net()
    unfreeze(model, 0)
    model, _ = managed(each, model, "cpu", budget=Budget(host="4MiB"))
    change(model, each.rank)
    model(X).backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda model, rank: unfreeze(model, 1 + rank),
            r"unfrozen after chunked\(\.\.\.\) must be the same on all ranks",
        ),
        (lambda model, rank: model.layers.append(linear(rank)), r"added after chunked\(\.\.\.\) must be the same"),
        (unfreeze, "the ranks do different things"),
    ],
    ids=["others", "other values", "one rank only"],
)
def test_ranks_that_train_other_parameters_are_told(change: Any, words: str) -> None:
    with pytest.raises(RanksDiverged, match=words):
        run(2, parts, change)


def tight(each: Together) -> tuple[list[float], str]:
    model = Net()
    unfreeze(model, 0)
    small = Budget(device="80KiB", host="200KiB" if each.rank else "4MiB")
    model, optimizer = managed(each, model, budget=small)
    losses = train(model, optimizer, lambda model, stage: None, 1, each.ranks)
    model.requires_grad_(True)
    refused = ""
    for _ in range(2):
        try:
            model(X)
        except (DoesNotFit, RanksDiverged) as error:
            refused = f"{type(error).__name__}: {error}"
    unfreeze(model, 0)
    losses += train(model, optimizer, lambda model, stage: None, 1, each.ranks)
    release(model)
    return losses, refused


def test_where_one_rank_has_no_room_all_refuse_and_go_on() -> None:
    plain = Net()
    unfreeze(plain, 0)
    twin = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    expected = [loss for _ in range(2) for loss in train(plain, twin, lambda model, stage: None, 1)]
    (first, told), (second, refused) = run(2, tight)[0]
    assert first == second == expected
    assert told.startswith("RanksDiverged: rank 1 cannot take in parameters")
    assert refused.startswith("DoesNotFit")
