"""Joining the group of processes that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ps_core._errors import InvalidInput, PatrickStarError, RanksDiverged
from ps_dist._collectives import TorchCollectives
from ps_dist._facts import compare_facts, own_facts
from ps_dist._mesh import Mesh
from ps_dist._watch import Patience

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def connect(*, timeout_s: float = 600, replicate: int = 1) -> TorchCollectives:
    """Join the processes that ``torchrun`` started; initialises the process group if the program has not.

    A process that waits longer than ``timeout_s`` for the others ends with `RanksDiverged`, one whose others ended
    much sooner. ``replicate`` copies of the model are kept, each shared by a run of consecutive ranks: with as many
    copies as nodes, parameters are gathered within a node and only sums of gradients cross the network.

    Where a computer has a CUDA device for each of its processes, and the program has used none yet, each gets its own
    as its current device.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 10**9:
        raise InvalidInput(f"timeout_s: expected a positive number of seconds, found {timeout_s!r}")
    _take_card(os.environ)
    owned = not dist.is_initialized()
    if owned:
        _initialise(os.environ, timeout_s, replicate)
    patience = Patience(timeout_s=timeout_s)
    mesh = Mesh(dist.get_rank(), dist.get_world_size(), replicate)
    store: Any = dist.distributed_c10d._get_default_store()
    turn = store.add(f"ps_dist/joined/{mesh.rank}", 1)  # the same on every rank: each joins as often as the others
    store = PrefixStore(f"ps_dist/{turn}", store)
    if not owned:
        _compare(store, mesh.rank, mesh.size, replicate, timeout_s)
    # Longer than the watch takes to find out who is to blame.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * patience.hopeless_s))

    def leave() -> None:
        with suppress(ValueError):  # the program took everything down itself
            dist.destroy_process_group(group)
        if owned and dist.is_initialized():
            dist.destroy_process_group()

    return TorchCollectives(group=group, store=store, mesh=mesh, patience=patience, leave=leave)


def _take_card(environment: Mapping[str, str]) -> None:
    if torch.cuda.is_initialized() or not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environment.keys():
        return
    if 1 < int(environment["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count():
        torch.cuda.set_device(int(environment["LOCAL_RANK"]))


def _initialise(environment: Mapping[str, str], timeout_s: float, replicate: int) -> None:
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise InvalidInput(
            f"not started by torchrun: {', '.join(missing)} not set; run torchrun --nproc-per-node=N your_program.py"
        )
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, ranks = next(rendezvous("env://", timeout=timeout))
        # torchrun may keep one store from restart to restart, with the addresses of processes that are gone.
        store = PrefixStore(f"attempt/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        _compare(PrefixStore("ps_dist/first", store), rank, ranks, replicate, timeout_s)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    except PatrickStarError:
        raise  # it says what is wrong already
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RanksDiverged(
            f"rank {environment['RANK']} of {environment['WORLD_SIZE']} could not join the others: {reason}"
        ) from error


def _compare(store: Any, rank: int, ranks: int, replicate: int, timeout_s: float) -> None:
    Mesh(rank, ranks, replicate)
    compare_facts(store, own_facts(ranks=ranks, replicate=replicate), rank=rank, ranks=ranks, timeout_s=timeout_s)
