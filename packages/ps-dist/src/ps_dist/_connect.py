"""Joining the group of processes that torchrun started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from socket import create_connection
from time import monotonic, sleep
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ps_core._errors import InvalidInput, PatrickStarError, RanksDiverged
from ps_dist._attempt import Attempt
from ps_dist._choice import Choice
from ps_dist._collectives import TorchCollectives
from ps_dist._facts import own_facts
from ps_dist._farewell import words_of
from ps_dist._groups import NO_DUMP, Groups, in_environment
from ps_dist._journal import Entry, Journal
from ps_dist._lane import Lane
from ps_dist._mesh import Mesh
from ps_dist._roll import Met, meet
from ps_dist._timeouts import AwakeClock, Timeouts
from ps_dist._watchdog import Watchdog

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TRY_S = 2.0
"""In which a store answers that is there; else it is tried again."""
_GRACE_S = 10.0
"""Beyond the timeout, in which processes that could not all meet tell each other why."""

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
    found = _found_in_time(os.environ, timeout_s, replicate, transport, owned=owned)
    timeouts, journal = Timeouts(timeout_s=timeout_s), Journal()
    lane = Lane(AwakeClock(), hopeless_s=timeouts.hopeless_s)
    watchdog = Watchdog(
        found.own_store,
        lane,
        journal,
        rank=found.rank,
        places=found.met.places,
        keeper=_keeper(os.environ),
        timeouts=timeouts,
    )
    groups = _connected(found, lane, watchdog, timeouts, owned=owned)
    choice = Choice(transport, groups, found.own_store, min(timeout_s / 2, _MOST_TRIAL_S))
    mesh = Mesh(found.rank, found.ranks, replicate)
    joined = TorchCollectives(groups=groups, lane=lane, journal=journal, watchdog=watchdog, mesh=mesh, choose=choice)
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


@dataclass(frozen=True, slots=True)
class _Found:
    """The other processes, and where to talk of them. Any: torch's stubs have no base of stores with all methods."""

    store: Any
    own_store: Any
    """For this connection alone. It is another link: who waits for a key, as NCCL does, blocks all others of a link."""
    rank: int
    ranks: int
    met: Met


def _found_in_time(
    environment: Mapping[str, str], timeout_s: float, replicate: int, transport: str | None, *, owned: bool
) -> _Found:
    """Find all other processes; in a thread that is left behind if the store never answers."""
    if owned and (missing := [name for name in _NEEDED if name not in environment]):
        raise InvalidInput(
            f"not started by torchrun: {', '.join(missing)} not set; run torchrun --nproc-per-node=N your_program.py"
        )
    found: list[_Found] = []
    lacks = _lacking(transport)
    named = f"{transport}" if lacks is None else f"{transport} ({lacks})"

    def find() -> None:
        deadline_s = monotonic() + timeout_s
        store, rank, ranks = _store(environment, timeout_s) if owned else _store_of_group()
        if owned:
            store.set_timeout(timedelta(seconds=timeout_s))  # before the copy, which connects within it
        own = store.clone()
        if owned:
            own.set_timeout(timedelta(seconds=timeout_s))
        facts = own_facts(ranks=ranks, replicate=replicate, transport=named)
        left_s = max(deadline_s - monotonic(), 0.0)
        met = meet(PrefixStore("ps_dist/roll", store), facts, rank=rank, ranks=ranks, timeout_s=left_s)
        found.append(_Found(store, PrefixStore(f"ps_dist/joined/{met.call}", own), rank, ranks, met))

    attempt = Attempt(find)
    late = attempt.within(timeout_s + _GRACE_S)
    if attempt.error is not None:
        _raise_named(attempt.error, environment)
    if late:
        raise RanksDiverged(
            f"{_who(environment)} could not join the others: {_store_name(environment)} has not answered for "
            f"{timeout_s:g} s"
        )
    Mesh(found[0].rank, found[0].ranks, replicate)
    if lacks is not None:  # told to all before: nobody may wait for one that is gone
        raise InvalidInput(
            f"transport={transport!r}: {lacks}; leave it out: memory of CUDA devices then goes by way of the host's"
        )
    return found[0]


def _keeper(environment: Mapping[str, str]) -> int | None:
    """Return the rank that keeps the store; None: torchrun keeps it."""
    return None if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


# Any: torch's stubs have no base of stores with all methods.
def _store(environment: Mapping[str, str], timeout_s: float) -> tuple[Any, int, int]:
    """Open the store that torchrun tells of; rank 0 keeps it where torchrun does not."""
    timeout = timedelta(seconds=timeout_s)
    address, port, ranks = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), int(environment["WORLD_SIZE"])
    if int(environment["RANK"]) == _keeper(environment):
        # As torch does it, but that it would wait for the others here, and not know who is missing.
        own = TCPStore(address, port, ranks, is_master=True, timeout=timeout, multi_tenant=True, wait_for_workers=False)
        return own, 0, ranks
    deadline_s = monotonic() + timeout_s
    while True:
        try:
            create_connection((address, port), timeout=_TRY_S).close()
            # It would go on trying for up to twice its timeout, in a call that nothing ends.
            store, rank, ranks = next(rendezvous("env://", timeout=timedelta(seconds=_TRY_S)))
        except (OSError, RuntimeError):
            if monotonic() >= deadline_s:
                raise
            sleep(_TRY_S / 10)
        else:
            return store, rank, ranks


def _store_of_group() -> tuple[Any, int, int]:
    return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()


def _who(environment: Mapping[str, str]) -> str:
    if dist.is_initialized():
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"
    return f"rank {environment['RANK']} of {environment['WORLD_SIZE']}"


def _store_name(environment: Mapping[str, str]) -> str:
    where = f"at {environment.get('MASTER_ADDR', '?')}:{environment.get('MASTER_PORT', '?')}"
    return (
        f"the store of torchrun {where}" if _keeper(environment) is None else f"rank 0, which keeps the store {where},"
    )


def _raise_named(error: BaseException, environment: Mapping[str, str]) -> NoReturn:
    """Raise the error, which says whom this rank could not reach."""
    if isinstance(error, PatrickStarError) or not isinstance(error, OSError | RuntimeError | ValueError):
        raise error
    reason = str(error).splitlines()[0]
    if environment.get("RANK") != str(_keeper(environment)):
        reason = f"{_store_name(environment)} ended or cannot be reached ({reason})"
    raise RanksDiverged(f"{_who(environment)} could not join the others: {reason}") from error


def _connected(found: _Found, lane: Lane, watchdog: Watchdog, timeouts: Timeouts, *, owned: bool) -> Groups:
    """Connect the processes, watched: one that is lost meanwhile is found as later."""
    made: list[Groups] = []

    def connect_all() -> None:
        if owned:
            _initialise(found, timeouts)
        made.append(Groups(timeouts, owned=owned))

    try:
        lane.submit(Entry(0, "connecting the processes", "0" * 16), connect_all).wait()
    except BaseException:
        ended = lane.close(waits=False)
        watchdog.close(words_of(sys.exc_info()[1]) if lane.error is None else "")
        if not ended and found.rank != _keeper(os.environ):
            lane.wait_cut()  # the thread ends when the store goes with its process, which must not be as this one exits
        raise
    return made[0]


def _initialise(found: _Found, timeouts: Timeouts) -> None:
    """Make the default group."""
    # torchrun may keep one store from restart to restart, with the addresses of processes that are gone.
    store = PrefixStore(f"ps_dist/{found.met.call}", found.store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    timeout = timedelta(seconds=timeouts.timeout_s)
    with in_environment(NO_DUMP):
        dist.init_process_group(backend, store=store, rank=found.rank, world_size=found.ranks, timeout=timeout)
