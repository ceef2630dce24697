"""Ray Train's workers share a model by `ps_dist.connect()`, with nothing between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_core import SGD, Budget
from ps_core.engine import chunked

ray = pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("ray.train.torch", reason="Ray Train is not installed")
STEPS = 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def part(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, optimizer: Any, ranks: list[int]) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        for rank in ranks:
            (model(part(step, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def in_a_worker(told: dict[str, str]) -> None:
    import ps_dist

    with ps_dist.connect(timeout_s=60) as together:
        model, optimizer = chunked(
            network(), SGD(lr=0.1), precision="fp32", budget=Budget(host="64MiB"), collectives=together
        )
        found = train(model, optimizer, [together.mesh.rank])
        assert together.mesh.size == 2
        torch.save(found, Path(told["folder"]) / f"{together.mesh.rank}.pt")


# Ray starts its processes in Python that leaves sockets and files to the collector, and writes in ways of its own.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_two_workers_train_as_one_process(tmp_path: Path) -> None:
    """The same bits as one process that takes both workers' parts, one after the other."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    import ps_core
    import ps_dist
    import ps_kernels

    places = [str(Path(module.__file__ or "").parents[1]) for module in (ps_core, ps_dist, ps_kernels)]
    path = os.pathsep.join([*places, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        TorchTrainer(
            in_a_worker,
            train_loop_config={"folder": str(tmp_path)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=str(tmp_path / "ray"), name="two"),
        ).fit()
    finally:
        ray.shutdown()
    model, optimizer = chunked(
        network(), SGD(lr=0.1), precision="fp32", budget=Budget(host="64MiB"), accumulation_steps=2
    )
    expected = train(model, optimizer, [0, 1])
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(found[name], value) for name, value in expected.items()), rank
