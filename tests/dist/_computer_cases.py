"""Ranks of several computers, which one computer plays, on each rank of a crew."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ps_dist
from ps_core import SGD, Budget, Options, RanksDiverged
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._sharding.planned_scheduler import RanksScheduler
from ps_dist._local_ranks import Location


@contextmanager
def computers(each: ps_dist.TorchCollectives, layout: str, **settings: Any) -> Iterator[ps_dist.TorchCollectives]:
    """Join anew; rank by rank the letters of ``layout`` name the computers that the ranks take themselves to be on."""
    own = replace(Location.own(), machine=layout[each.process])
    with (
        mock.patch.object(Location, "own", staticmethod(lambda: own)),
        ps_dist.connect(**({"timeout_s": 60} | settings)) as joined,
    ):
        here = layout.count(layout[each.process])
        assert joined.local_ranks == (here if len(set(layout)) < len(layout) else len(layout))
        yield joined


def over(
    each: ps_dist.TorchCollectives, layout: str, case: Callable[..., Any], *args: Any, **settings: Any
) -> tuple[Any, dict[str, int], str]:
    """What a case gives on such computers; what came over the network; what data travelled by."""
    with computers(each, layout, **settings) as joined:
        found = case(joined, *args)
        told = joined.statistics()
        return found, told.network_bytes, told.transport


def follows_a_plan(each: ps_dist.TorchCollectives, layout: str, device: str) -> tuple[dict[str, float], ...]:
    """A planned step: bytes that came in all and over the network, as counted and as predicted; and the weights."""
    rows = []
    with computers(each, layout) as joined:
        torch.manual_seed(0)
        sizes = {} if device == "cpu" else {"device": "96KiB"}
        model, optimizer = chunked(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(5))), SGD(lr=0.1), device=device, precision="fp32",
            collectives=joined, budget=Budget(host="16MiB", **sizes), options=Options(group_bytes=64 * 65 * 4),
        )  # fmt: skip
        assert optimizer is not None
        for step in range(4):
            told = joined.statistics()
            before = [_moved(told.wire_bytes), _moved(told.network_bytes)]
            inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(10 * step + joined.rank))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            told = joined.statistics()
            rows = [_moved(told.wire_bytes) - before[0], _moved(told.network_bytes) - before[1]]
        scheduler = hooks_of(model).engine.passes.scheduler
        assert isinstance(scheduler, RanksScheduler)
        assert scheduler.planned is not None
        assert statistics(model).divergences == 0
        predicted = dict(scheduler.planned.prediction.moved_bytes)
        weights = torch.cat([value.flatten() for value in model.state_dict().values()])
        release(model)
    return dict(zip(("wire", "network"), rows, strict=True)), predicted, {"weights": float(weights.double().sum())}


def _moved(found: dict[str, int]) -> int:
    return found.get("all_gather", 0) + found.get("reduce_scatter", 0)


def one_is_killed(each: ps_dist.TorchCollectives, layout: str, at_rank: int) -> str:
    """In the middle of gathers, of which some cross the network."""

    def steps() -> None:
        with computers(each, layout, timeout_s=300) as joined:
            for step in range(100):
                if step == 3 and joined.process == at_rank:
                    os.kill(os.getpid(), signal.SIGKILL)
                joined.all_gather(torch.empty(joined.ranks * 5000), torch.zeros(5000), f"step {step}")

    with pytest.raises(RanksDiverged) as caught:
        steps()
    return str(caught.value)
