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

import ps_core
from ps_core._errors import InvalidInput, PatrickStarError, RanksDiverged
from ps_dist._abandonable_call import AbandonableCall
from ps_dist._collective_history import CollectiveHistory, HistoryEntry
from ps_dist._collectives import TorchCollectives
from ps_dist._comm_thread import CommThread
from ps_dist._error_text import describe_exception, first_line
from ps_dist._mesh import Mesh
from ps_dist._messages import PeerMessages
from ps_dist._process_groups import NO_DUMP, DefaultGroup, ProcessGroups, in_environment
from ps_dist._roster import Roster, find_ranks
from ps_dist._share_memory import Sharing, ranks_by_computer, share_memory
from ps_dist._timeouts import AwakeClock, Timeouts
from ps_dist._torchrun_variables import check_variables
from ps_dist._transport import TransportChoice
from ps_dist._version import __version__
from ps_dist._watchdog import Watchdog

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TRY_S = 2.0
"""Seconds in which a store answers that is there; then it is tried again."""
_GRACE_S = 10.0
"""Seconds beyond the timeout in which processes that could not all join tell each other why."""
_MOST_TRIAL_S = 120.0
"""Seconds in which NCCL connects the devices, if it works; or half of the timeout, if that is less."""
_DEFAULT_GROUP = DefaultGroup()
"""Owns torch's default group, of which a process has one."""


def transports() -> tuple[str, ...]:
    """Return what memory of CUDA devices can travel by, with this build of PyTorch."""
    return ("gloo", "nccl") if dist.is_nccl_available() else ("gloo",)


def connect(
    *, timeout_s: float = 600, replicate: int = 1, transport: str | None = None, shared_memory: bool | None = None
) -> TorchCollectives:
    """Join the processes that ``torchrun`` started; initialises the process group if the program has not.

    A process that waits longer than ``timeout_s`` for the others raises `RanksDiverged`. If the others have ended, it
    does so much sooner. ``replicate`` copies of the model are kept, each sharded over consecutive ranks. With as many
    copies as nodes, parameters are gathered within a node, and only sums of gradients cross the network.

    Where a computer has a CUDA device for each of its processes, each gets its own as its current device. It keeps one
    that the program has used already. No memory of a device is taken before something uses it. ``transport`` is what
    memory of CUDA devices travels by: ``"nccl"``, between devices directly, where each process has its own, or
    ``"gloo"``, through the host's memory. None: NCCL where it works on all ranks, else gloo, and a log
    line says why. That is tried when the first model is put on such devices.

    Processes of one computer share their host memory: each reads what the others have where it lies. With several
    computers, a shard crosses the network once for each. ``shared_memory`` False: all is sent over sockets. True: it is
    an error if processes cannot share memory. None: they share it where that works, else a log line says why not.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 10**9:
        raise InvalidInput(f"timeout_s: expected a positive number of seconds, found {timeout_s!r}")
    if transport not in (None, "gloo", "nccl"):
        raise InvalidInput(f"transport: expected 'gloo', 'nccl' or None, found {transport!r}")
    if shared_memory not in (None, True, False):
        raise InvalidInput(f"shared_memory: expected True, False or None, found {shared_memory!r}")
    owned = not dist.is_initialized()
    check_variables(os.environ, joins=owned)
    _choose_card(os.environ)
    found = _found_in_time(timeout_s, replicate, transport, shared_memory, owned=owned)
    timeouts, history = Timeouts(timeout_s=timeout_s), CollectiveHistory()
    thread = CommThread(AwakeClock(), hopeless_s=timeouts.hopeless_s)
    watchdog = Watchdog(
        found.own_store,
        thread,
        history,
        rank=found.mesh.rank,
        locations=found.roster.locations,
        store_rank=_store_rank(),
        timeouts=timeouts,
    )
    groups, sharing = _connect_all(found, thread, watchdog, timeouts, owned=owned, shares=shared_memory is not False)
    choose = TransportChoice(transport, groups, found.own_store, min(timeout_s / 2, _MOST_TRIAL_S))
    joined = TorchCollectives(
        groups=groups,
        thread=thread,
        history=history,
        watchdog=watchdog,
        mesh=found.mesh,
        choose=choose,
        sharing=sharing,
    )
    if shared_memory and sharing.why_not:
        joined.close()  # on all ranks alike
        raise InvalidInput(f"shared_memory=True: {sharing.why_not}; leave it out: then processes use sockets")
    if transport == "nccl":
        _reach_own_card(joined)
    return joined


def _reach_own_card(joined: TorchCollectives) -> None:
    """Try NCCL now; close the connection if it does not work."""
    refused = None
    try:
        joined.reach(torch.device("cuda", torch.cuda.current_device()))
    except InvalidInput as error:
        refused = error
    except BaseException:
        joined.close()
        raise
    if refused is not None:
        joined.close()  # not while the exception is handled: all ranks raise it, and none has to be told
        raise refused


def _why_impossible(transport: str | None) -> str | None:
    """Return why this computer cannot use the transport, or None."""
    if transport == "nccl" and not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    if transport == "nccl" and not dist.is_nccl_available():
        return "this torch was built without NCCL"
    return None


def _choose_card(environment: Mapping[str, str]) -> None:
    """Give this process a CUDA device of its own as its current one, once anything uses CUDA.

    Setting the device now would take memory of it, which a program that trains on the CPU does not need. So it is
    queued in the way in which torch seeds generators of devices that are not in use yet.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if used or not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environment.keys():
        return
    if 1 < int(environment["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count():
        choose = partial(torch.cuda.set_device, int(environment["LOCAL_RANK"]))
        torch.cuda._lazy_call(choose)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Found:
    """The stores and the ranks of one connection. Any: torch's stubs have no base of stores with all methods."""

    store: Any
    own_store: Any
    """For this connection alone, by a link of its own: a wait for a key, as NCCL's, blocks other calls of its link."""
    mesh: Mesh
    roster: Roster


def _found_in_time(
    timeout_s: float, replicate: int, transport: str | None, shared_memory: bool | None, *, owned: bool
) -> _Found:
    """Find all other processes; in a thread that is left behind if the store never answers."""
    if owned and (missing := [name for name in _NEEDED if name not in os.environ]):
        raise InvalidInput(
            f"not started by torchrun: {', '.join(missing)} not set; run torchrun --nproc-per-node=N your_program.py"
        )
    impossible = _why_impossible(transport)
    shown = f"{transport}" if impossible is None else f"{transport} ({impossible})"

    def find() -> _Found:
        deadline_s = monotonic() + timeout_s
        store, rank, ranks = _store(timeout_s) if owned else _store_of_group()
        if owned:
            store.set_timeout(timedelta(seconds=timeout_s))  # before the copy, which connects within it
        own = store.clone()
        if owned:
            own.set_timeout(timedelta(seconds=timeout_s))
        facts = {  # messages and arithmetic depend on these
            "ps-core": ps_core.__version__,
            "ps-dist": __version__,
            "torch": torch.__version__,
            "the byte order": sys.byteorder,
            "the number of processes": str(ranks),
            "replicate": str(replicate),
            "transport": shown,
            "shared_memory": str(shared_memory),
        }
        left_s = max(deadline_s - monotonic(), 0.0)
        roster = find_ranks(PrefixStore("ps_dist/roster", store), facts, rank=rank, ranks=ranks, timeout_s=left_s)
        mesh = Mesh(rank, ranks, replicate)  # only now, as all ranks: they have told each other the same numbers
        return _Found(store, PrefixStore(f"ps_dist/joined/{roster.call}", own), mesh, roster)

    call = AbandonableCall(find)
    late = call.wait(timeout_s + _GRACE_S)
    if call.error is not None:
        _raise_named(call.error, stays_s=2 * Timeouts(timeout_s=timeout_s).look_s)
    if late:
        raise RanksDiverged(f"{_who()} could not join the others: {_store_name()} has not answered for {timeout_s:g} s")
    if impossible is not None:  # only now: the others have been told, and do not wait for this rank
        raise InvalidInput(
            f"transport={transport!r}: {impossible}; leave it out: memory of CUDA devices then goes by way of the "
            "host's"
        )
    found: _Found = call.result
    return found


def _store_rank() -> int | None:
    """Return the rank that keeps the store; None: torchrun keeps it."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


# Any: torch's stubs have no base of stores with all methods.
def _store(timeout_s: float) -> tuple[Any, int, int]:
    """Open the store at the address that torchrun gives; rank 0 keeps it where torchrun does not."""
    timeout = timedelta(seconds=timeout_s)
    address, port, ranks = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    if int(os.environ["RANK"]) == _store_rank():
        # As torch does, but without waiting here for the others, which could not say who is missing.
        own = TCPStore(address, port, ranks, is_master=True, timeout=timeout, multi_tenant=True, wait_for_workers=False)
        return own, 0, ranks
    deadline_s = monotonic() + timeout_s
    while True:
        try:
            create_connection((address, port), timeout=_TRY_S).close()
            # rendezvous() goes on trying for up to twice its timeout, in a call that nothing ends.
            store, rank, ranks = next(rendezvous("env://", timeout=timedelta(seconds=_TRY_S)))
        except (OSError, RuntimeError):
            if monotonic() >= deadline_s:
                raise
            sleep(_TRY_S / 10)
        else:
            return store, rank, ranks


def _store_of_group() -> tuple[Any, int, int]:
    return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()


def _who() -> str:
    if dist.is_initialized():
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"
    return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"


def _store_name() -> str:
    where = f"at {os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    if _store_rank() is None:
        return f"the store of torchrun {where}"
    return f"rank 0, which keeps the store {where},"


def _raise_named(error: BaseException, stays_s: float) -> NoReturn:
    """Raise the error with the name of what this rank could not reach; first let others notice the same."""
    if isinstance(error, PatrickStarError) or not isinstance(error, OSError | RuntimeError | ValueError):
        raise error
    reason = first_line(error)
    if os.environ.get("RANK") != str(_store_rank()):
        reason = f"{_store_name()} ended or cannot be reached ({reason})"
        sleep(stays_s)
    raise RanksDiverged(f"{_who()} could not join the others: {reason}") from error


def _connect_all(
    found: _Found, thread: CommThread, watchdog: Watchdog, timeouts: Timeouts, *, owned: bool, shares: bool
) -> tuple[ProcessGroups, Sharing]:
    """Connect the processes while the watchdog runs, which finds a rank that is lost meanwhile."""

    def connect_all() -> tuple[ProcessGroups, Sharing]:
        thread.enter(HistoryEntry(0, "connecting the processes", "0" * 16))
        if owned:
            _initialise(found, timeouts)
        computers = ranks_by_computer(found.roster.locations)
        groups, sharing = ProcessGroups(timeouts, _DEFAULT_GROUP, made_default=owned), Sharing(computers)
        if shares:
            control = PeerMessages(groups.host, found.mesh.rank)
            sharing = share_memory(
                control, computers, found.mesh.rank, lambda: thread.error is not None, timeouts.timeout_s
            )
        return groups, sharing

    try:
        made: tuple[ProcessGroups, Sharing] = thread.submit(connect_all).wait()
    except BaseException:
        ended = thread.close(waits=False)
        watchdog.close(describe_exception(sys.exc_info()[1]) if thread.error is None else "")
        if not ended and found.mesh.rank != _store_rank():
            # The thread ends when the store ends with its process, which must not happen while this process exits.
            thread.wait_cut()
        raise
    return made


def _initialise(found: _Found, timeouts: Timeouts) -> None:
    """Make torch's default group."""
    # torchrun may keep one store from restart to restart, with the addresses of processes that are gone.
    store = PrefixStore(f"ps_dist/{found.roster.call}", found.store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    timeout = timedelta(seconds=timeouts.timeout_s)
    with in_environment(NO_DUMP):
        dist.init_process_group(backend, store=store, rank=found.mesh.rank, world_size=found.mesh.size, timeout=timeout)
