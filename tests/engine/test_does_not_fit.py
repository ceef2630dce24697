"""What does not fit is said in full: where, when, how much, and three things to do; word by word.

The first of the three, done as it is written, is enough, as far as it says.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core.engine import HostEmbedding, chunked, release, statistics
from ps_models import TiledLinear


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))


def train(model: nn.Module, budget: Budget, rows: int) -> None:
    chunked(model, AdamW(), device="emulated", budget=budget, options=Options(group_bytes=2**17))
    try:
        model(torch.randn(rows, 256)).float().square().mean().backward()
    finally:
        release(model)


def refusal(*, device: int, host: int, rows: int = 0) -> str:
    model = layers()
    with pytest.raises(DoesNotFit) as caught:
        train(model, Budget(device=device, host=host), rows)
    return str(caught.value)


def test_model_data_beyond_all_tiers() -> None:
    assert refusal(device=2**18, host=2**20) == (
        "does not fit: all tiers together needs 3,670,016 bytes at 'between steps', "
        "more than the 1,310,720 bytes it has\n"
        '  try: Budget(device=262144, host="4MiB"): 3.0 MiB more\n'
        "  try: model.get_parameter('0.weight').requires_grad_(False): before chunked, for half of all parameters, "
        "1.5 MiB less\n"
        "  try: a smaller model: each parameter takes 14 bytes"
    )


def test_a_group_beyond_the_device() -> None:
    assert refusal(device=2**16, host=2**23) == (
        "does not fit: device needs 131,072 bytes at 'forward of 0.weight', more than the 65,536 bytes it has\n"
        "  try: Budget(device=262144, host=8388608): 0.2 MiB more, and what activations take\n"
        "  try: model.set_submodule('0', TiledLinear.from_linear(model.get_submodule('0'), 32)): "
        "before chunked; 0.weight in tiles (TiledLinear of ps_models)\n"
        "  try: a smaller batch or sequence: less non-model data, of which nothing is known yet"
    )


def test_activations_beyond_the_device() -> None:
    assert refusal(device=2**18, host=2**23, rows=512) == (
        "does not fit: device needs 655,360 bytes at 'forward of 0.weight', more than the 262,144 bytes "
        "it has\n"
        "  try: Budget(device=655360, host=8388608): 0.4 MiB more, as far as this pass has come\n"
        "  try: x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False): for each block, in forward "
        "(activation checkpointing): then only one block's activations are there at a time\n"
        "  try: a quarter of the batch or sequence: about 0.4 MiB less non-model data"
    )


class ManyScores(nn.Module):
    """The last moment takes most of the memory, as scores of many words do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x).repeat(1, 64).float() + 1).logsumexp(-1)


@pytest.mark.parametrize("spec", [AdamW(), None])
def test_the_last_moment_of_an_evaluation_beyond_the_device(spec: AdamW | None) -> None:
    def evaluate(budget: Budget) -> tuple[int, int]:
        model, _ = chunked(ManyScores(), spec, device="emulated", budget=budget, options=Options(group_bytes=2**17))
        try:
            for _ in range(3):
                with torch.no_grad():
                    model(torch.randn(64, 256))
            memory = statistics(model).tiers["device"]
            return memory.peak_bytes, memory.budget_bytes
        finally:
            release(model)

    with pytest.raises(DoesNotFit, match=r"at 'forward of layers\.3\.weight'") as caught:
        evaluate(Budget(device=2**20, host=2**23))
    code, _, _ = caught.value.remedies[0].partition(": ")
    peak, size = evaluate(eval(code, {"Budget": Budget}))
    assert 2**20 < peak <= size


class WithLoss(nn.Module):
    """Layers that return their loss, so that fake tensors can follow a whole pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


class Blocks(nn.Module):
    """Small blocks whose activations take most of the memory."""

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))  # noqa: E731
        self.blocks = nn.ModuleList(make() for _ in range(8))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x.float().square().mean()


def test_every_remedy_for_activations_works_when_followed() -> None:
    """Smaller groups would save less than is missing, so they are not told of."""

    def attempt(budget: Budget, rows: int = 512, *, checkpointing: bool = False) -> None:
        torch.manual_seed(0)
        model, optimizer = chunked(
            Blocks(checkpointing=checkpointing), AdamW(), device="emulated", precision="bf16", budget=budget
        )
        try:
            for _ in range(2):
                model(torch.randn(rows, 64)).backward()
                optimizer.step()
        finally:
            release(model)

    tight = Budget(device=2**21, host=2**24)
    with pytest.raises(DoesNotFit) as caught:
        attempt(tight)
    larger, saved, smaller = caught.value.remedies
    attempt(eval(larger[: larger.index(")") + 1]))
    assert saved.startswith("x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)")
    attempt(tight, checkpointing=True)
    parts = {"half": 2, "a quarter of": 4, "an eighth of": 8}
    attempt(tight, 512 // parts[smaller.partition(" the batch")[0]])
    with pytest.raises(DoesNotFit) as caught:
        attempt(tight, 4096, checkpointing=True)
    larger, smaller = caught.value.remedies  # blocks that are checkpointed already are not told of
    attempt(eval(larger[: larger.index(")") + 1]), 4096, checkpointing=True)
    attempt(tight, 4096 // parts[smaller.partition(" the batch")[0]], checkpointing=True)


def test_checkpointing_is_not_suggested_for_an_evaluation() -> None:
    """It saves memory that only a backward pass needs."""
    torch.manual_seed(0)
    model, optimizer = chunked(
        Blocks(checkpointing=True), AdamW(), device="emulated", precision="bf16", budget=Budget(device=2**21)
    )
    for _ in range(2):
        model(torch.randn(512, 64)).backward()
        optimizer.step()
    with pytest.raises(DoesNotFit) as caught, torch.no_grad():
        model(torch.randn(8192, 64))
    _, smaller = caught.value.remedies
    words = smaller.partition(" the batch")[0]
    del caught  # its frames hold activations
    with torch.no_grad():
        model(torch.randn(8192 // {"half": 2, "a quarter of": 4, "an eighth of": 8}[words], 64))
    release(model)


def test_what_a_whole_pass_needs_is_said_at_once() -> None:
    """The first moment that does not fit needs less than later ones, which fake tensors have seen."""

    def attempt(size: int) -> None:
        torch.manual_seed(0)
        model = WithLoss()
        told = {"device": "emulated", "options": Options(group_bytes=2**17)}
        chunked(model, AdamW(), budget=Budget(device=size, host=2**23), **told)
        try:
            model(torch.randn(512, 256)).backward()
        finally:
            release(model)

    with pytest.raises(DoesNotFit) as caught:
        attempt(2**18)
    needed = caught.value.needed_bytes
    assert needed > 3 * 2**18
    attempt(needed)


class Words(nn.Module):
    """A language model of a few sizes that returns its loss."""

    def __init__(self, *, words: int, hidden: int, layers: int, tied: bool, recomputed: bool) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(words, hidden), nn.LayerNorm(hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, words, bias=False)
        self.recomputed = recomputed
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x))
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), ids.flatten())


def one_step(
    model: nn.Module, ids: torch.Tensor, budget: Budget, options: Options, precision: str, passes: int
) -> None:
    told = {"device": "emulated", "budget": budget, "options": options, "precision": precision}
    _, optimizer = chunked(model, AdamW(), accumulation_steps=passes, **told)
    assert optimizer is not None
    try:
        for _ in range(passes):
            model(ids).backward()
        optimizer.step()
    finally:
        release(model)


@pytest.mark.parametrize("seed", [*range(10), 11, 13, 16])
def test_the_first_remedy_is_enough(seed: int) -> None:
    """Each tier is asked for once, and where it was before anything was known of activations, once more."""
    draw = random.Random(seed)
    sizes = {"words": draw.choice([64, 512, 2048]), "hidden": draw.choice([32, 64]), "layers": draw.randint(1, 4)}
    flags = {"tied": draw.random() < 0.4, "recomputed": draw.random() < 0.4}
    precision, passes = draw.choice(["bf16", "fp32"]), draw.choice([1, 2])
    numel = sum(parameter.numel() for parameter in Words(**sizes, **flags).parameters())
    budget = Budget(device=int(numel * draw.choice([0.05, 0.3, 1])), host=numel * draw.choice([3, 10, 14]))
    kept = ("*norm*", "blocks.*.0.*") if seed >= 10 else ()
    options = Options(group_bytes=draw.choice([None, 2**14, 2**17]), keep_fp32=kept)
    ids = torch.randint(sizes["words"], (draw.choice([1, 4]), draw.choice([8, 64])))
    asked: list[str] = []
    for _ in range(4):
        try:
            one_step(Words(**sizes, **flags), ids, budget, options, precision, passes)
            break
        except DoesNotFit as error:
            remedy, _, what = error.remedies[0].partition(": ")
            before, budget = budget, eval(remedy)
            (tier,) = [name for name in ("device", "host") if getattr(budget, name) != getattr(before, name)]
            assert replace(budget, **{tier: getattr(before, tier)}) == before, "all else is as it was"
            asked.append(tier + " at first" * what.endswith(", and what activations take"))
    else:
        pytest.fail(f"no end of remedies: {asked}")
    assert asked
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("kept", ["*norm*", "blocks.*.0.*"])
def test_what_never_moves_begins_no_moment_but_takes_room(kept: str) -> None:
    """Passes are as foreseen: with what is done amid such parameters, and what an earlier pass has left of them."""
    model = Words(words=512, hidden=64, layers=4, tied=True, recomputed=True)
    options, budget = Options(group_bytes=2**14, keep_fp32=(kept,)), Budget(device=405_792, host="4MiB")
    told = {"device": "emulated", "budget": budget, "options": options}
    _, optimizer = chunked(model, AdamW(), accumulation_steps=2, **told)
    assert optimizer is not None
    for _ in range(2):
        model(torch.arange(8)[None]).backward()
    optimizer.step()
    found = statistics(model)
    assert (found.divergences, found.planned_passes) == (0, 2), found.last_divergence
    release(model)


def remedies_for(model: nn.Module, device: int) -> tuple[str, ...]:
    with pytest.raises(DoesNotFit) as caught:
        one_step(model, torch.randint(64, (1, 8)), Budget(device=device, host="64MiB"), Options(), "bf16", 1)
    return caught.value.remedies


def applied(remedy: str, model: nn.Module) -> nn.Module:
    """Do to a model what a remedy says in code."""
    code, _, _ = remedy.partition(": before chunked; ")
    exec(code, {"model": model, "nn": nn, "HostEmbedding": HostEmbedding, "TiledLinear": TiledLinear})
    return model


@pytest.mark.parametrize(("words", "bias"), [(4096, False), (8000, True)])
def test_a_table_and_a_head_beyond_the_device(words: int, bias: bool) -> None:
    sizes = {"words": words, "hidden": 64, "layers": 1, "recomputed": False}

    def make() -> Words:
        model = Words(**sizes, tied=False)
        model.head = nn.Linear(64, words, bias=bias)
        return model

    _, said, _ = remedies_for(make(), 2**18)
    table = "model.set_submodule('table', HostEmbedding.from_embedding(model.get_submodule('table')))"
    assert said.startswith(f"{table}; model.set_submodule('head', TiledLinear.from_linear(")
    assert said.endswith(
        "HostEmbedding in place of nn.Embedding for table.weight; head.weight in tiles (TiledLinear of ps_models)"
    )
    half = applied(table + ": before chunked; ", make())
    assert remedies_for(half, 2**18)[1].startswith("model.set_submodule('head', ")
    whole = applied(said, make())
    first, second, _ = remedies_for(whole, 2**18)
    assert "checkpoint" in second, "activations are another matter"
    ids = torch.randint(64, (1, 8))
    one_step(applied(said, make()), ids, eval(first.partition(": ")[0]), Options(), "bf16", 1)


def test_a_tied_head_beyond_the_device() -> None:
    model = Words(words=4096, hidden=64, layers=1, recomputed=False, tied=True)
    untied = "a head that is not table.weight, in tiles (of ps_models: tied_head=False, head_tiles=32)"
    assert remedies_for(model, 2**18)[1].startswith(
        f"{untied}; HostEmbedding in place of nn.Embedding for table.weight"
    )


class Own(nn.Module):
    """A parameter of its own, and one that is looked up beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(2**18))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.factors.square().sum()


class Convolved(Own):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(1))
        self.layer = nn.Conv1d(512, 512, 1)


@pytest.mark.parametrize(("model", "name"), [(Own, "factors"), (Convolved, "layer.weight")])
def test_other_parameters_beyond_the_device(model: type[nn.Module], name: str) -> None:
    """Only an nn.Linear can be in tiles."""
    said = f"{name} cut into several parameters, of which one is used at a time"
    assert remedies_for(model(), 2**18)[1] == said


def test_kept_parameters_beyond_the_device() -> None:
    options = Options(keep_fp32=("*",), group_bytes=2**14)
    with pytest.raises(DoesNotFit, match="for those that it names stay there for good") as caught:
        one_step(Own(), torch.ones(1), Budget(device=2**18, host="64MiB"), options, "bf16", 1)
    assert eval(caught.value.remedies[1].partition(": ")[0]) == Options(group_bytes=2**14)


@pytest.mark.parametrize(("device", "what", "needed"), [(2**19, "step", 917_504), (2**20, "prologue", 262_144)])
def test_a_group_beyond_the_host(device: int, what: str, needed: int, tmp_path: Path) -> None:
    """Which more disk would not help: a larger device has room for the step, but a weight passes through the host."""

    def attempt(host: int) -> None:
        budget = Budget(device=device, host=host, disk="64MiB", disk_dir=str(tmp_path))
        one_step(WithLoss(), torch.randn(8, 256), budget, Options(group_bytes=2**17), "bf16", 1)

    with pytest.raises(DoesNotFit) as caught:
        attempt(2**16)
    assert str(caught.value).startswith(f"does not fit: host needs {needed:,} bytes at '{what} of layers.0.weight'")
    assert caught.value.remedies == (
        f'Budget(device={device}, host={needed}, disk="64MiB", disk_dir="{tmp_path}"): '
        f"{(needed - 2**16) / 2**20:.1f} MiB more",
        "layers.0.weight cut into several parameters, of which one is used at a time",
        "model.get_parameter('layers.0.weight').requires_grad_(False): before chunked; it has no states then",
    )
    attempt(needed)


def test_no_memory_to_speak_of() -> None:
    with pytest.raises(
        DoesNotFit,
        match=r'Budget\(device=\d+\): [\d.,]+ \w+ more \(24 without a unit is 24 bytes; did you mean "24GiB"\?\)(.|\n)*'
        r"TiledLinear\.from_linear\(model\.get_submodule\('0'\), 64\)",
    ):
        chunked(nn.Sequential(nn.Linear(64, 64, bias=False)), AdamW(), device="emulated", budget=Budget(device=24))


@pytest.mark.parametrize(
    ("budget", "asks"),
    [
        (Budget(device="24"), '(24 without a unit is 24 bytes; did you mean "24GiB"?)'),
        (Budget(device=24, host=64), 'did you mean "24GiB"? 64 without a unit is 64 bytes; did you mean "64GiB"?)'),
        (Budget(device="32KiB", host=64), '(64 without a unit is 64 bytes; did you mean "64GiB"?)'),
        (Budget(device=4095), '(4095 without a unit is 4095 bytes; did you mean "4095GiB"?)'),
        (Budget(device=4096), ""),
        (Budget(device="24B"), ""),
        (Budget(device=0), ""),
    ],
)
def test_a_small_number_without_a_unit_is_asked_about(budget: Budget, asks: str) -> None:
    """Numbers are bytes all the same: tiny models fit in few."""
    with pytest.raises(DoesNotFit) as raised:
        chunked(nn.Sequential(nn.Linear(64, 64, bias=False)), AdamW(), device="emulated", budget=budget)
    assert asks in raised.value.remedies[0] if asks else "did you mean" not in str(raised.value)
    chunked(nn.Linear(4, 4), AdamW(), device="emulated", budget=Budget(device=4000, host=4000))
