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
from ps_core.engine import HostEmbedding, chunked, release


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
        '  try: Budget(host="4MiB"): 2.8 MiB more\n'
        "  try: freeze half of the parameters: 1.5 MiB less\n"
        "  try: a smaller model: each parameter takes 14 bytes"
    )


def test_a_group_beyond_the_device() -> None:
    assert refusal(device=2**16, host=2**23) == (
        "does not fit: device needs 131,072 bytes at 'forward of 0.weight', more than the 65,536 bytes it has\n"
        "  try: Budget(device=262144): 0.2 MiB more, and what activations take\n"
        "  try: 0.weight in tiles, each a parameter (TiledLinear, head_tiles of ps_models)\n"
        "  try: a smaller batch or sequence: less non-model data, of which nothing is known yet"
    )


def test_activations_beyond_the_device() -> None:
    assert refusal(device=2**18, host=2**23, rows=512) == (
        "does not fit: device needs 655,360 bytes at 'forward of 0.weight', more than the 262,144 bytes "
        "it has\n"
        "  try: Budget(device=655360): 0.4 MiB more, as far as this pass has come\n"
        "  try: activation checkpointing: only a block's activations at a time\n"
        "  try: half the batch or sequence: about 0.2 MiB less non-model data"
    )


class WithLoss(nn.Module):
    """Layers that return their loss, so that fake tensors can follow a whole pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


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


@pytest.mark.parametrize("seed", [*range(10), 13, 14])
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
            tier = "host" if "host" in remedy else "device"
            assert getattr(eval(remedy), tier) is not None
            asked.append(tier + " at first" * what.endswith(", and what activations take"))
            budget = replace(budget, **{tier: getattr(eval(remedy), tier)})
    else:
        pytest.fail(f"no end of remedies: {asked}")
    assert asked
    assert len(asked) == len(set(asked))


def remedy_for(model: nn.Module, device: int, host: str = "64MiB", **more: str) -> str:
    budget = Budget(device=device, host=host, **more)
    with pytest.raises(DoesNotFit) as caught:
        one_step(model, torch.randint(64, (1, 8)), budget, Options(), "bf16", 1)
    return str(caught.value)


def test_a_table_or_a_head_beyond_the_device() -> None:
    sizes = {"words": 4096, "hidden": 64, "layers": 1, "recomputed": False}
    table = "HostEmbedding in place of nn.Embedding for table.weight"
    head = "head.weight in tiles, each a parameter (TiledLinear, head_tiles of ps_models)"
    untied = "a head that is not table.weight (tied_head=False of ps_models), in tiles (head_tiles)"
    assert f"  try: {table}; {head}\n" in remedy_for(Words(**sizes, tied=False), 2**18)
    assert f"  try: {untied}; {table}\n" in remedy_for(Words(**sizes, tied=True), 2**18)
    model = Words(**sizes, tied=False)
    model.table = HostEmbedding.from_embedding(model.table)
    assert f"  try: {head}\n" in remedy_for(model, 2**18)


class Own(nn.Module):
    """A parameter of its own, and one that is looked up beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(2**18))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.factors.square().sum()


def test_other_parameters_beyond_the_device() -> None:
    assert "  try: factors in tiles, each a parameter" in remedy_for(Own(), 2**18)
    with pytest.raises(DoesNotFit, match=r"try: fewer parameters in Options\.keep_fp32, which stay there for good"):
        one_step(Own(), torch.ones(1), Budget(device=2**18, host="64MiB"), Options(keep_fp32=("*",)), "bf16", 1)


@pytest.mark.parametrize(("device", "what", "needed"), [(2**19, "step", 917_504), (2**20, "prologue", 262_144)])
def test_a_group_beyond_the_host(device: int, what: str, needed: int, tmp_path: Path) -> None:
    """Which more disk would not help: a larger device has room for the step, but a weight passes through the host."""

    def attempt(host: int) -> None:
        budget = Budget(device=device, host=host, disk="64MiB", disk_dir=str(tmp_path))
        one_step(WithLoss(), torch.randn(8, 256), budget, Options(group_bytes=2**17), "bf16", 1)

    with pytest.raises(DoesNotFit) as caught:
        attempt(2**16)
    first, *remedies = str(caught.value).splitlines()
    assert first.startswith(f"does not fit: host needs {needed:,} bytes at '{what} of layers.0.weight'")
    assert remedies == [
        f"  try: Budget(host={needed}): {(needed - 2**16) / 2**20:.1f} MiB more",
        "  try: layers.0.weight cut into several parameters",
        "  try: freeze layers.0.weight: it has no states then",
    ]
    attempt(needed)
