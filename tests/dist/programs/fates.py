"""Small groups of processes, each with a fate of its own, as copies of this one, which has imported everything.

    fates.py FOLDER CASE:RANKS:LOST...

Every process writes to FOLDER/CASE-RANKS-LOST-RANK.txt; standard output has a JSON list [case, rank, status].
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Timer
from typing import Any

import torch
from torch import nn

import ps_core
import ps_dist
from ps_core.engine import chunked, release
from ps_core.engine._execution.find_hooks import hooks_of
from ps_dist import _connect, _transport

TIMEOUT_S = 600.0
"""Where the others are to end at once, or when all is well."""
SHORT_S, MIDDLE_S, AWAY_S = 20.0, 30.0, 18.0
"""Where they are to wait until it is over; where a rank is away for so long, and comes back."""
MOST_PROCESSES = 48
"""At a time, or so."""
TIMEOUTS = {
    **dict.fromkeys(("held_gil", "stopped_and_continued"), MIDDLE_S),
    **dict.fromkeys(("stopped", "stopped_meeting", "stopped_forming", "killed_importing", "killed_meeting"), SHORT_S),
}


class Fate:
    """What a case has to work with."""

    def __init__(self, case: str, rank: int, lost: int, gone: int) -> None:
        self.rank, self.is_lost, self._gone = rank, rank == lost, gone
        self.together = ps_dist.connect(timeout_s=TIMEOUTS.get(case, TIMEOUT_S))
        self.together.barrier()

    def until_it_is_gone(self) -> None:
        """Compute, say, until the process that is to be lost has ended."""
        assert os.read(self._gone, 1) == b""

    def wait(self) -> None:
        """For the others, in vain."""
        self.together.barrier()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def big(fate: Fate) -> ps_dist.Pending:
    """A gather that takes a while."""
    shard = torch.ones(1 << 22)
    return fate.together.start_all_gather(torch.empty(fate.together.ranks << 22), shard, "something large")


def killed_computing(fate: Fate) -> None:
    if fate.is_lost:
        killed()
    fate.wait()


def killed_beside_its_child(fate: Fate) -> None:
    """A child, like a worker that loads data, keeps its connections for longer than the others need to find out."""
    if fate.is_lost:
        if os.fork() == 0:
            time.sleep(2 * SHORT_S)
            os._exit(0)
        killed()
    fate.wait()


def killed_sending(fate: Fate) -> None:
    pending = big(fate)
    if fate.is_lost:
        killed()
    pending.wait()
    fate.wait()


def killed_waiting(fate: Fate) -> None:
    """In a collective that the others come to when it is gone.

    It came there, so the first may end for one that sent to it before the kernel broke the connection.
    """
    if fate.is_lost:
        Timer(0.1, killed).start()
    else:
        fate.until_it_is_gone()
    fate.wait()
    fate.wait()


def killed_beside(fate: Fate) -> None:
    """Where another is silent, whom the others wait for first: it lives, and is not the one to name."""
    if fate.is_lost:
        killed()
    if fate.rank == 1:
        hold_gil()
    fate.wait()


class Connects:
    """NCCL, which waits for ever for one that is gone."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate

    def connect_nccl(self) -> None:
        if self._fate.is_lost:
            killed()
        Event().wait()

    def abort_nccl(self) -> None:
        """There is nothing to let go of."""


def killed_connecting(fate: Fate) -> None:
    """While cards are connected, the others wait for it in a call that nothing ends."""
    own: list[float] = [1.0, float(fate.rank)]
    _transport.own_card = lambda where: own
    choice = _transport.TransportChoice(None, Connects(fate), fate.together._watchdog._store, deadline_s=1.0)
    choice(fate.together, torch.device("cpu"))


def stopped(fate: Fate) -> None:
    """For good, as far as the others know."""
    if fate.is_lost:
        stop()
    fate.wait()


def hold_gil() -> None:
    """No other thread of this process runs Python meanwhile."""
    ctypes.PyDLL(None).sleep(int(AWAY_S))


def stop_for_a_while() -> None:
    process = os.getpid()
    if os.fork() == 0:
        time.sleep(AWAY_S)
        os.kill(process, signal.SIGCONT)
        os._exit(0)
    stop()
    os.wait()


def held_gil(fate: Fate) -> None:
    away(fate, hold_gil)


def stopped_and_continued(fate: Fate) -> None:
    away(fate, stop_for_a_while)


def away(fate: Fate, how: Callable[[], None]) -> None:
    """Within the timeout: training goes on as if nothing had been."""
    undisturbed = trained(fate, lambda: None)
    assert trained(fate, how if fate.is_lost else lambda: None) == undisturbed
    fate.together.close()
    print("the same bits")


def trained(fate: Fate, between: Callable[[], None]) -> list[Any]:
    """The losses and the parameters after a few steps, and something ``between`` them."""
    torch.manual_seed(0)
    rule: Any = ps_core.SGD(lr=0.1)
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model, optimizer = chunked(layers, rule, precision="fp32", collectives=fate.together)
    data, losses = torch.Generator().manual_seed(fate.rank), []
    for turn in range(4):
        if turn == 2:
            between()
        loss = model(torch.randn(4, 8, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, {name: value.tolist() for name, value in model.state_dict().items()}]


def raised(fate: Fate) -> None:
    if fate.is_lost:
        raise ValueError("no such token: 7\nand more about it")
    fate.wait()


def raised_in_block(fate: Fate) -> None:
    """With something on its way that will never come."""
    with fate.together:
        if fate.is_lost:
            big(fate)
            raise ValueError("no such token: 7")
        fate.until_it_is_gone()
        big(fate).wait()


def raised_and_closed(fate: Fate) -> None:
    try:
        if fate.is_lost:
            big(fate)
            raise ValueError("no such token: 7")
        big(fate)
        fate.wait()
    finally:
        fate.together.close()


def exited(fate: Fate) -> None:
    if fate.is_lost:
        sys.exit(3)
    fate.wait()


def caught(fate: Fate) -> None:
    """Nobody else hears of an exception that was caught."""
    if fate.is_lost:
        try:
            raise ValueError("never mind")
        except ValueError as error:
            print(error)
    fate.wait()
    fate.wait()
    fate.together.close()


def raised_late(fate: Fate) -> None:
    """Whoever waits for nothing any more is not disturbed."""
    if fate.is_lost:
        raise ValueError("could not write")
    fate.until_it_is_gone()
    print("done")
    fate.together.close()


def disk_failed(fate: Fate) -> None:
    """Of one rank's own file, amid training; each rank has a part of every group there."""
    torch.manual_seed(0)
    rule: Any = ps_core.SGD(lr=0.1)
    with TemporaryDirectory() as folder:
        model, optimizer = chunked(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))),
            rule,
            precision="fp32",
            budget=ps_core.Budget(host="320KiB", disk="16MiB", disk_dir=folder),
            collectives=fate.together,
        )
        for turn in range(4):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if fate.is_lost and turn == 1:
                os.truncate(f"/proc/self/fd/{hooks_of(model).engine.store.file._file}", 4096)


def released(fate: Fate) -> None:
    """Without the rank that ended: memory is freed, and what it had part of has no values."""
    torch.manual_seed(0)
    for precision, device in (("fp32", "cpu"), ("bf16", "emulated")):
        budget = ps_core.Budget(device="1MiB" if device == "emulated" else None, host="16MiB")
        layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
        layers.register_buffer("seen", torch.zeros(1))
        model, optimizer = chunked(
            layers, ps_core.AdamW(), precision=precision, device=device, budget=budget, collectives=fate.together
        )
        store = hooks_of(model).engine.store
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if device == "cpu":
            release(model)
            assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    loss = model(torch.ones(2, 64)).sum()
    if fate.is_lost:
        killed()
    try:
        fate.until_it_is_gone()
        loss.backward()
        fate.wait()
    except ps_core.RanksDiverged:
        del loss
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            release(model)
        print(*(each.message for each in caught))
    assert store.arena._memory.numel() == store.ledger.used_bytes[1] == 0
    assert [type(parameter) for parameter in model.parameters()] == [nn.Parameter] * 6
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert model.seen.device.type == "cpu"
    print("memory is free")


UNLIKE: dict[str, tuple[Any, str]] = {
    "ps-core": (ps_core, "__version__"),
    "ps-dist": (_connect, "__version__"),
    "torch": (torch, "__version__"),
    "byte-order": (sys, "byteorder"),
}


def unlike(fact: str, differs: bool) -> None:
    """Join with something that is not as the others have it."""
    if fact in UNLIKE and differs:
        setattr(*UNLIKE[fact], "other")
    ps_dist.connect(
        timeout_s=TIMEOUT_S,
        replicate=2 if fact == "replicate" and differs else 1,
        transport="nccl" if fact == "transport" and differs else None,
    )


CASES: dict[str, Callable[[Fate], None]] = {
    each.__name__: each
    for each in (
        killed_computing,
        killed_sending,
        killed_waiting,
        killed_connecting,
        killed_beside,
        killed_beside_its_child,
        stopped,
        held_gil,
        stopped_and_continued,
        raised,
        raised_in_block,
        raised_and_closed,
        exited,
        caught,
        raised_late,
        disk_failed,
        released,
    )
}


def importing(case: str, at: Callable[[], None]) -> None:
    """Be lost before the others are met."""
    at()


def meeting(case: str, at: Callable[[], None]) -> None:
    """Be lost with a connection to the store."""

    def find_ranks(*args: Any, **kwargs: Any) -> Any:
        at()

    _connect.find_ranks = find_ranks
    connect(case)


def forming(case: str, at: Callable[[], None]) -> None:
    """Be lost when all have met, and connect to each other."""

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        at()

    torch.distributed.init_process_group = init_process_group
    connect(case)


def connect(case: str) -> None:
    ps_dist.connect(timeout_s=TIMEOUTS.get(case, TIMEOUT_S))


JOINING = {
    f"{name}_{phase.__name__}": (phase, how)
    for phase in (importing, meeting, forming)
    for name, how in (("killed", killed), ("stopped", stop))
}
"""What the one that is lost does; the others connect."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def become(folder: Path, name: str, rank: int, ranks: int, port: int) -> None:
    """One rank, as torchrun would have started it."""
    out = os.open(folder / f"{name.replace(':', '-')}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else each copy would look through all that was imported when it ends
    running: dict[int, tuple[str, int]] = {}
    ended = []
    while names or running:
        while names and len(running) < MOST_PROCESSES:
            running |= start(folder, names.pop(0))
        child, status = os.wait()
        name, rank = running.pop(child)
        ended.append([name, rank, os.waitstatus_to_exitcode(status)])
        left = [(child, rank) for child, (of, rank) in running.items() if of == name]
        if name.split(":")[0] in ("stopped", *JOINING) and [rank for _, rank in left] == [int(name.split(":")[2])]:
            os.kill(left[0][0], signal.SIGKILL)  # nobody waits for it any more
    print(json.dumps(ended))


def start(folder: Path, name: str) -> dict[int, tuple[str, int]]:
    """A case's processes."""
    case, ranks, lost = name.split(":")
    reader, writer = os.pipe()
    port, running = free_port(), {}
    for rank in range(int(ranks)):
        child = os.fork()
        if child == 0:
            if rank != int(lost):
                os.close(writer)
            become(folder, name, rank, int(ranks), port)
            play(case, rank, int(lost), reader)
            sys.exit()  # and end as any program does
        running[child] = (name, rank)
    os.close(reader)
    os.close(writer)
    return running


def play(case: str, rank: int, lost: int, gone: int) -> None:
    if case.startswith("unlike-"):
        unlike(case.removeprefix("unlike-"), rank == lost)
    elif case not in JOINING:
        CASES[case](Fate(case, rank, lost, gone))
    elif rank == lost:
        phase, how = JOINING[case]
        phase(case, how)
    else:
        connect(case)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
