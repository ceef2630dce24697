"""Arguments of `chunked` of another kind than it expects: one line that names what was given, and nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ps_core import AdamW, Budget, Group, InvalidInput, Options, UnsupportedParameter
from ps_core.engine import chunked, release
from ps_core.engine._optim.kernel_rule import Settings, StepRule

MODEL_SGD = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
MODEL_RMSPROP = torch.optim.RMSprop(nn.Linear(2, 2).parameters())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": MODEL_SGD}, r"found torch.optim.sgd.SGD; try: SGD\(lr=...\) of ps_core"),
        (
            {"optimizer": MODEL_RMSPROP},
            r"try: TorchOptimizer\(torch.optim.rmsprop.RMSprop, lr=...\)",
        ),
        ({"optimizer": torch.optim.AdamW}, "or None; found torch.optim.adamw.AdamW"),
        ({"optimizer": AdamW}, r"or None; found the class AdamW, not yet called: AdamW\(\)"),
        ({"optimizer": "adamw"}, "or None; found 'adamw'"),
        ({"budget": "1MiB"}, "budget must be a ps_core.Budget, .* found '1MiB'"),
        ({"options": {"prefetch": 2}}, "options must be a ps_core.Options, .* found builtins.dict"),
        ({"collectives": "nccl"}, r"collectives must be what ps_dist.connect\(\) gives, or None; found 'nccl'"),
        ({"accumulation_steps": 1025}, "accumulation_steps must be a whole number from 1 to 1024, found 1025"),
        ({"device": 0}, "device must be a text like 'emulated' or 'cuda:1', found 0"),
        ({"device": torch.device("meta")}, "device must be 'cpu', 'emulated', 'cuda' or one CUDA device .* 'meta'"),
    ],
)
def test_something_else_is_named(arguments: dict[str, Any], words: str) -> None:
    model, given = nn.Linear(4, 4), {"optimizer": None} | arguments
    with pytest.raises(InvalidInput, match=words):
        chunked(model, given.pop("optimizer"), **given)
    assert type(model.weight) is nn.Parameter


def test_a_device_of_pytorch() -> None:
    model, _ = chunked(nn.Linear(4, 4), AdamW(), device=torch.device("cpu"), budget=Budget(host="1MiB"))
    release(model)


def test_memory_that_the_computer_does_not_give() -> None:
    with pytest.raises(InvalidInput, match=r"cannot allocate [\d,]+ bytes .*; expected a smaller Budget"):
        chunked(nn.Linear(4, 4), AdamW(), device="emulated", budget=Budget(device="65536TiB"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


NO_PARAMETER = "Net: keep_fp32 has {!r}, which is the whole name of no parameter"


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("nrom.*", "*norm*"),
        ("*layer.1.wieght", "*layers.1.weight*"),
        ("norm", "*norm*"),
        ("*Norm*", "*norm*"),
        ("norm.pooler.*", None),
        ("layers[.]0.*", ""),
        ("*router*", None),
    ],
)
def test_a_pattern_of_no_parameter_is_said(pattern: str, meant: str | None, caplog: pytest.LogCaptureFixture) -> None:
    options = Options(keep_fp32=("norm.*", pattern))
    with caplog.at_level("INFO", "ps_core"):
        model, _ = chunked(Net(), None, budget=Budget(host="1MiB"), options=options)
    release(model)
    expected = NO_PARAMETER.format(pattern) + (f"; did you mean {meant!r}?" if meant else "")
    assert caplog.messages == ([] if meant == "" else [expected])


@pytest.mark.parametrize("pattern", ["0.weight", "1.weight", "1.*"])
def test_a_tied_parameter_is_kept_by_any_of_its_names(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with caplog.at_level("INFO", "ps_core"):
        chunked(model, None, budget=Budget(host="1MiB"), options=Options(keep_fp32=(pattern,)))
    assert [layer.weight.dtype for layer in model] == [torch.float32, torch.float32, torch.bfloat16]
    assert not caplog.messages
    release(model)


def in_16_bits_but_norms() -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 4)}) for _ in range(2))
    model.last = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model.to(torch.bfloat16)
    for norm in (*(block["norm"] for block in model.blocks), model.last[1]):
        norm.float()
    return model


def test_parameters_that_may_be_fp32_on_purpose_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def types(options: Options) -> list[torch.dtype]:
        model, _ = chunked(in_16_bits_but_norms(), None, budget=Budget(host="1MiB"), options=options)
        found = [parameter.dtype for parameter in model.parameters()]
        release(model)
        return found

    with caplog.at_level("INFO", "ps_core"):
        found = types(Options(keep_fp32=("last.1.bias",)))
    assert found.count(torch.float32) == 1
    (line,) = caplog.messages
    before, _, told = line.partition("; to compute them in fp32: ")
    assert before == (
        "Module: 'blocks.0.norm.weight', 'blocks.0.norm.bias', 'blocks.1.norm.weight' and 2 others came as float32 "
        "beside parameters of bfloat16, and are computed in bfloat16"
    )
    options = eval(told, {"Options": Options})
    assert options.keep_fp32 == ("last.1.bias", "blocks.*.norm.weight", "blocks.*.norm.bias", "last.1.weight")
    caplog.clear()
    with caplog.at_level("INFO", "ps_core"):
        assert types(options) == [parameter.dtype for parameter in in_16_bits_but_norms().parameters()]
        for plain in (Net(), in_16_bits_but_norms().to(torch.bfloat16)):
            release(chunked(plain, None, budget=Budget(host="1MiB"))[0])
        release(chunked(in_16_bits_but_norms(), None, budget=Budget(host="1MiB"), precision="fp32")[0])
    assert not caplog.messages


def test_a_group_of_no_parameter_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """One that is empty for others come first is, too."""
    texts = ("nrom", "norm", "norm.weight", "bias")
    groups = tuple(Group(match=lambda name, _, text=text: text in name, lr=0.1) for text in texts)
    with caplog.at_level("INFO", "ps_core"):
        model, _ = chunked(Net(), AdamW(groups=groups), budget=Budget(host="1MiB"))
    release(model)
    assert caplog.messages == [
        "Net: groups[0] has no parameter: its match is true for none",
        "Net: groups[2] has no parameter: its match is true for none that no group before it has",
    ]


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_of_pytorch_is_told_what_takes_its_place(foreach: bool) -> None:
    model, _ = chunked(nn.Linear(4, 4), AdamW(), device="emulated", budget=Budget(device="64KiB", host="1MiB"))
    other = torch.optim.AdamW(model.parameters(), foreach=foreach)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(UnsupportedParameter, match=r"step the one that chunked\(model, AdamW\(...\)\) returns"):
        other.step()
    release(model)


def test_an_optimizer_rule_whose_flag_is_no_flag() -> None:
    with pytest.raises(InvalidInput, match="decoupled must be True or False, found 'no'"):
        Settings(kind=StepRule.ADAM, lr=0.1, decoupled="no")  # type: ignore[arg-type]
