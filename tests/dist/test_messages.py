"""Sums of what came: the same bits in fewer passes. In which order messages are begun."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ps_dist import Mesh
from ps_dist._messages import ConnectionBroken, PeerMessages
from ps_dist._reduce import OrderedReduceScatter, ordered_sum
from ps_kernels import _backends
from ps_kernels._native import NativeBackend

PIECE_NUMEL = 32_768
LONG = 3 * PIECE_NUMEL + 5
KINDS = [torch.bfloat16, torch.float16, torch.float32]


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Operators that write, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    # Any: whatever torch passes.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("add", "add_", "copy_"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def patterns(count: int, kind: torch.dtype) -> list[torch.Tensor]:
    """Every finite and infinite number of 16 bits, or numbers of all sizes; another order in each."""
    rng = torch.Generator().manual_seed(0)
    if kind is torch.float32:
        sizes = [10.0 ** torch.randint(-9, 9, (LONG,), generator=rng) for _ in range(count)]
        return [torch.randn(LONG, generator=rng) * size for size in sizes]
    every = torch.arange(-32_768, 32_768).to(torch.int16).view(kind)
    every = torch.where(every.isnan(), 1.0, every).repeat(2)[:LONG].to(kind)
    return [every[torch.randperm(LONG, generator=rng)] for _ in range(count)]


@pytest.mark.parametrize("place", ["host", "accelerator"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("into", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_sum(kind: torch.dtype, into: torch.dtype, count: int, place: str) -> None:
    parts = patterns(count, kind)
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted = wanted + part.float()
    found = torch.zeros(LONG, dtype=into)
    ordered_sum(parts, found, None if place == "host" else torch.empty(PIECE_NUMEL))
    torch.testing.assert_close(found, wanted.to(into), rtol=0, atol=0, equal_nan=True)  # infinities of two signs


@pytest.mark.parametrize("kind", KINDS)
def test_two_are_added_in_one_pass(kind: torch.dtype) -> None:
    parts, total = patterns(2, kind), torch.zeros(LONG, dtype=kind)
    with Calls() as calls:
        ordered_sum(parts, total, torch.empty(PIECE_NUMEL))
    assert calls.names == ["add"]


def test_the_host_sums_all_parts_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch took a copy and an addition a part, in pieces that fit the cache: four times as long for four parts."""
    backend = _backends.fastest()
    assert isinstance(backend, NativeBackend), "the kernels are compiled here"
    calls: list[int] = []
    whole = backend._sum_in_order
    monkeypatch.setattr(backend, "_sum_in_order", lambda told: calls.append(1) or whole(told))
    with Calls() as by_torch:
        ordered_sum(patterns(4, torch.bfloat16), torch.zeros(LONG, dtype=torch.bfloat16))
    assert (len(calls), by_torch.names) == (1, [])


class Done:
    """A message that has come."""

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("me", [0, 1, 2])
def test_all_sends_are_begun_before_any_receive(me: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or gloo's thread spins for a lock while this one writes; see [Note: sends first]."""
    begun: list[tuple[str, int]] = []

    def message(kind: str) -> Any:
        def call(buffer: torch.Tensor, peer: int, group: Any, tag: int) -> Done:
            begun.append((kind, peer))
            return Done()

        return call

    monkeypatch.setattr(dist, "isend", message("send"))
    monkeypatch.setattr(dist, "irecv", message("receive"))
    others = [peer for peer in range(3) if peer != me]
    messages = PeerMessages(None, me)
    messages.gather("gather", 1, range(3), torch.zeros(6), torch.ones(2))
    assert begun == [("send", peer) for peer in others] + [("receive", peer) for peer in others]
    begun.clear()
    rows, scratch = list(torch.ones(3, 2)), torch.empty(4)
    total = OrderedReduceScatter(messages, Mesh(me, 3, 1), torch.empty(4))
    total.exchange_sum("sum", 2, range(3), torch.zeros(2), rows, scratch)
    assert begun == [("send", peer) for peer in others] + [("receive", peer) for peer in others]


def test_an_error_without_a_text_still_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(dist, "isend", fail)
    with pytest.raises(ConnectionBroken, match="RuntimeError") as raised:
        PeerMessages(None, 0).begin("trial", 1, [(1, torch.zeros(4))], [])
    assert raised.value.peer == 1
