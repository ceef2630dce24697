"""What every rank of a crew does to decide what memory of CUDA devices travels by; gloo plays NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import ps_dist
from _cuda_cases import Quiet, Reached
from _fake_cuda import FakeRuntime
from ps_core import SGD, InvalidInput
from ps_core.engine import chunked, release
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_dist import _process_groups, _transport
from ps_dist._nccl import NcclMessages
from ps_dist._transport import TransportChoice

CPU = torch.device("cpu")
ERROR = (
    "NCCL error in: a.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO)\nmore\nLast error:\nno shared memory\n"
)
gather = NcclMessages.gather


class Played:
    """NCCL: whoever connects waits for the others, if need be for ever."""

    def __init__(self, each: ps_dist.TorchCollectives, fault: str, at_rank: int) -> None:
        self._group, self._fault, self._is_it = each._groups.host, fault, each.mesh.rank == at_rank
        self.dropped = 0
        self.over = Event()
        """Nobody waits any more."""

    def connect_nccl(self) -> Any:
        if self._fault == "raises" and self._is_it:
            raise RuntimeError(ERROR)
        if self._fault in ("raises", "hangs"):
            assert self.over.wait(60)
            raise RuntimeError("let go")
        return self._group

    def abort_nccl(self) -> None:
        self.dropped += 1


def spoilt(self: NcclMessages, operation: str, tag: int, peers: Any, into: Tensor, shard: Tensor) -> None:
    """A gather that delivers something else."""
    gather(self, operation, tag, peers, into, shard)
    into[-1] = 77


@contextmanager
def as_if_each_had_a_card(each: ps_dist.TorchCollectives) -> Iterator[None]:
    before = each._session.nccl
    with (
        mock.patch.object(_transport, "own_card", return_value=[1.0, float(each.mesh.rank)]),
        mock.patch.object(NcclMessages, "mark", return_value=Reached(reached=True)),
    ):
        yield
    each._session.nccl = before


def choose(
    each: ps_dist.TorchCollectives, transport: str | None, fault: str = "", at_rank: int = 0, deadline_s: float = 60
) -> tuple[str | None, str, int]:
    """What is said, what memory travels by from then on, and how often NCCL was dropped."""
    played = Played(each, fault, at_rank)
    choice = TransportChoice(transport, played, each._watchdog._store, deadline_s)
    with ExitStack() as stack:
        stack.enter_context(as_if_each_had_a_card(each))
        stack.callback(played.over.set)
        if fault == "spoilt" and each.mesh.rank == at_rank:
            stack.enter_context(mock.patch.object(NcclMessages, "gather", spoilt))
        try:
            words = choice(each, CPU)
        except InvalidInput as error:
            words = f"InvalidInput: {error}"
        assert choice(each, CPU) is None, "decided once, and said once"
        check_gather(each)
        return words, each.statistics().transport, played.dropped


def choose_by_rates(
    each: ps_dist.TorchCollectives, transport: str | None, slow: tuple[int, ...]
) -> tuple[str | None, str, int]:
    """The same, where the links of the cards of some ranks are slower than host memory."""
    played = Played(each, "", 0)
    choice = TransportChoice(transport, played, each._watchdog._store, 60)
    with as_if_each_had_a_card(each):
        words = choice(each, CPU, "links are slow" if each.mesh.rank in slow else "")
        check_gather(each)
        return words, each.statistics().transport, played.dropped


def check_gather(each: ps_dist.TorchCollectives) -> None:
    """Whatever was decided, it works."""
    rank, ranks = each.rank, each.ranks
    whole = torch.zeros(ranks)
    carrier: Any = Quiet()
    carrier.staging, carrier.copy = torch.zeros(1024, dtype=torch.uint8), Tensor.copy_

    def job(session: Any) -> None:
        session.on_device(carrier).all_gather(whole, torch.full((1,), rank + 1.0), "after the choice")

    each.start(job).wait()
    assert whole.tolist() == [1.0 + other for other in range(ranks)]


def alone(each: ps_dist.TorchCollectives) -> None:
    """One process sends nothing, and its model is managed as without collectives."""
    played, runtime = Played(each, "raises", 0), FakeRuntime(4)
    with as_if_each_had_a_card(each), runtime:
        assert TransportChoice(None, played, None, 0.0)(each, CPU) is None
        assert each.statistics().transport == "none"
        assert each.staging_bytes(64, torch.bfloat16) == 0, "nothing of the host's memory is taken for it"
    model, _ = chunked(torch.nn.Linear(8, 8), SGD(lr=0.1), collectives=each)
    assert not isinstance(hooks_of(model).engine.residency, ShardedResidency)
    release(model)


def new_group(fails: Callable[[], bool], seen: list[Any]) -> Any:
    """Torch's, with gloo in NCCL's place."""
    made = dist.new_group

    def make(backend: str, timeout: Any) -> Any:
        if backend == "nccl":
            seen.append({name: os.environ.get(name) for name in _process_groups._HANDLED_HERE})
            if fails():
                raise RuntimeError(ERROR)
        seen.append(made(backend="gloo", timeout=timeout))
        return seen[-1]

    return mock.patch.object(_process_groups.dist, "new_group", make)


def connects(each: ps_dist.TorchCollectives) -> None:
    """By itself, as a program would, twice; what was made for it is taken down."""
    for fails in (False, True, False):
        seen: list[Any] = []
        before = dict(os.environ)
        with new_group(lambda fails=fails: fails, seen):
            joined = ps_dist.connect(timeout_s=30)
            assert len(seen) == 1, "no group of NCCL's before something needs it"
            assert joined.statistics().transport == "shared"
            with as_if_each_had_a_card(joined):
                words = joined.reach(CPU)
                assert joined.statistics().transport == ("shared" if fails else "nccl")
                assert (words is None) != fails
                assert joined.reach(CPU) is None
                check_gather(joined)
                joined.close()
        assert set(seen[1].values()) == {"0"}, "torch ends no process"
        assert dict(os.environ) == before
        made = [seen[0], *seen[2:]]
        assert len(made) == (1 if fails else 2)
        assert not any(group in dist.distributed_c10d._world.pg_map for group in made)
    each.barrier()


def asked_for(each: ps_dist.TorchCollectives) -> str:
    """NCCL, as early as `connect`; there is no such device, so it fails everywhere."""
    with ExitStack() as stack:
        for name in ("torch.cuda.is_available", "torch.distributed.is_nccl_available"):
            stack.enter_context(mock.patch(name, return_value=True))
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value=0))
        stack.enter_context(as_if_each_had_a_card(each))
        try:
            ps_dist.connect(timeout_s=30, transport="nccl")
        except InvalidInput as error:
            each.barrier()
            return str(error)
    raise AssertionError("there is no card")
