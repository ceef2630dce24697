"""Joining the group of processes that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from ps_core._errors import InvalidInput, RanksDiverged
from ps_dist._collectives import TorchCollectives

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def connect(*, timeout_s: float = 600) -> TorchCollectives:
    """Join the processes that ``torchrun`` started; initialises the process group if the program has not.

    A process that waits longer than ``timeout_s`` for the others ends with `RanksDiverged`.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 10**9:
        raise InvalidInput(f"timeout_s: expected a positive number of seconds, found {timeout_s!r}")
    owned = not dist.is_initialized()
    if owned:
        _initialise(os.environ, timeout_s)
    return TorchCollectives(timeout_s=timeout_s, owned=owned)


def _initialise(environment: Mapping[str, str], timeout_s: float) -> None:
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise InvalidInput(
            f"not started by torchrun: {', '.join(missing)} not set; run torchrun --nproc-per-node=N your_program.py"
        )
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RanksDiverged(
            f"rank {environment['RANK']} of {environment['WORLD_SIZE']} could not join the others: {reason}"
        ) from error
