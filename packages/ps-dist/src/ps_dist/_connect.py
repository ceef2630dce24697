"""Joining the group of processes that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ps_core._errors import InvalidInput, PatrickStarError, RanksDiverged
from ps_dist._choice import Choice
from ps_dist._collectives import TorchCollectives
from ps_dist._facts import own_facts
from ps_dist._groups import NO_DUMP, Groups, in_environment
from ps_dist._mesh import Mesh
from ps_dist._roll import meet
from ps_dist._watch import Patience

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_MOST_TRIAL_S = 120.0
"""In which NCCL connects the cards, if it works; or half of the patience with other processes."""


def transports() -> tuple[str, ...]:
    """What memory of CUDA devices can travel by, with this build of PyTorch."""
    return ("gloo", "nccl") if dist.is_nccl_available() else ("gloo",)


def connect(*, timeout_s: float = 600, replicate: int = 1, transport: str | None = None) -> TorchCollectives:
    """Join the processes that ``torchrun`` started; initialises the process group if the program has not.

    A process that waits longer than ``timeout_s`` for the others ends with `RanksDiverged`, one whose others ended
    much sooner. ``replicate`` copies of the model are kept, each shared by a run of consecutive ranks: with as many
    copies as nodes, parameters are gathered within a node and only sums of gradients cross the network.

    Where a computer has a CUDA device for each of its processes, and the program has used none yet, each gets its own
    as its current device; nothing of a card is taken before something uses it. ``transport`` is what memory of CUDA
    devices travels by: ``"nccl"``, from card to card, where each process has one of its own, or ``"gloo"``, by way of
    the host's. None: NCCL where it works on all ranks, which is tried when the first model is put on such devices; else
    gloo, and a line says why.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 10**9:
        raise InvalidInput(f"timeout_s: expected a positive number of seconds, found {timeout_s!r}")
    if transport not in (None, "gloo", "nccl"):
        raise InvalidInput(f"transport: expected 'gloo', 'nccl' or None, found {transport!r}")
    _take_card(os.environ)
    owned = not dist.is_initialized()
    if owned:
        call = _initialise(os.environ, timeout_s, replicate, transport)
    else:
        here = (dist.get_rank(), dist.get_world_size())
        call = _meet(dist.distributed_c10d._get_default_store(), *here, replicate, transport, timeout_s)
    patience = Patience(timeout_s=timeout_s)
    mesh = Mesh(dist.get_rank(), dist.get_world_size(), replicate)
    # A copy has a connection of its own: who waits for a key, as NCCL does, keeps all others of one connection waiting.
    own: Any = dist.distributed_c10d._get_default_store()  # any: torch's stubs do not have all of its methods
    store = PrefixStore(f"ps_dist/joined/{call}", own.clone())
    groups = Groups(patience, owned=owned)
    choice = Choice(transport, groups, store, min(timeout_s / 2, _MOST_TRIAL_S))
    joined = TorchCollectives(groups=groups, store=store, mesh=mesh, patience=patience, choose=choice)
    if transport == "nccl":
        _reach_own(joined)
    return joined


def _reach_own(joined: TorchCollectives) -> None:
    refused = None
    try:
        joined.reach(torch.device("cuda", torch.cuda.current_device()))
    except InvalidInput as error:
        refused = error
    except BaseException:
        joined.close()
        raise
    if refused is not None:
        joined.close()  # not on the way out of an exception: it is everybody's, and nobody waits to hear of it
        raise refused


def _lacking(transport: str | None) -> str | None:
    """Why memory cannot travel so on this computer."""
    if transport == "nccl" and not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    if transport == "nccl" and not dist.is_nccl_available():
        return "this torch was built without NCCL"
    return None


def _take_card(environment: Mapping[str, str]) -> None:
    """Have a card of its own be this process's current one, from the moment that anything uses CUDA.

    Setting the device takes memory of the card, which a program that trains on the CPU has no use for; so it is done as
    torch seeds generators of cards that are not in use yet.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if used or not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environment.keys():
        return
    if 1 < int(environment["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count():
        take = partial(torch.cuda.set_device, int(environment["LOCAL_RANK"]))
        torch.cuda._lazy_call(take)  # type: ignore[no-untyped-call]


def _initialise(environment: Mapping[str, str], timeout_s: float, replicate: int, transport: str | None) -> str:
    """Make the default group; the call that the processes met by."""
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise InvalidInput(
            f"not started by torchrun: {', '.join(missing)} not set; run torchrun --nproc-per-node=N your_program.py"
        )
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, ranks = next(rendezvous("env://", timeout=timeout))
        call = _meet(store, rank, ranks, replicate, transport, timeout_s)
        # torchrun may keep one store from restart to restart, with the addresses of processes that are gone.
        store = PrefixStore(f"ps_dist/{call}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        with in_environment(NO_DUMP):
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    except PatrickStarError:
        raise  # it says what is wrong already
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RanksDiverged(
            f"rank {environment['RANK']} of {environment['WORLD_SIZE']} could not join the others: {reason}"
        ) from error
    return call


# Any: torch's stubs have no base of stores with all methods.
def _meet(store: Any, rank: int, ranks: int, replicate: int, transport: str | None, timeout_s: float) -> str:
    """See `_roll`; what only this process lacks is told to all, for nobody may wait for one that is gone."""
    lacks = _lacking(transport)
    found = f"{transport}" if lacks is None else f"{transport} ({lacks})"
    facts = own_facts(ranks=ranks, replicate=replicate, transport=found)
    call = meet(PrefixStore("ps_dist/roll", store), facts, rank=rank, ranks=ranks, timeout_s=timeout_s)
    Mesh(rank, ranks, replicate)
    if lacks is not None:
        raise InvalidInput(
            f"transport={transport!r}: {lacks}; leave it out: memory of CUDA devices then goes by way of the host's"
        )
    return call
