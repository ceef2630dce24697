"""A model small enough to plan in a moment, and ways to train it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ps_core._command.forecast import Forecast, Training, forecast
from ps_core._simulate.cluster import Cluster
from ps_core._simulate.machine import MACHINES
from ps_core._workloads.named_shapes import gpt

MIB, GIB = 2**20, 2**30
MODEL = gpt(4, 256, vocabulary=1024, name="small")


def training(device: int = 64 * MIB, host: int = 256 * MIB, *, gpus: int = 1, disk: int = 0, **more: Any) -> Training:
    cluster = Cluster(
        gpus=gpus,
        device_memory=device,
        host_memory=host,
        disk=disk,
        device_reserve=0,
        host_reserve=0,
        host_reserve_per_rank=0,
    )
    machine = more.pop("machine", MACHINES["t4"])
    return Training(cluster=cluster, machine=machine, **{"batch": 2, "seq": 128, "quick": True, **more})


def timed(step: float, stalled: float) -> Forecast:
    told = forecast(MODEL, training())
    prediction = replace(told.planned.prediction, step_time_s=step, stalled_s=stalled)
    return replace(told, planned=replace(told.planned, prediction=prediction))
