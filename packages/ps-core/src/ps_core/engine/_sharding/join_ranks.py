"""Processes that begin to train one model together: what must be alike, and who keeps what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import accumulate
from mmap import PAGESIZE
from pathlib import Path
from platform import node as node_name
from typing import TypeAlias

import torch
from torch import nn

from ps_core._errors import InvalidInput
from ps_core._extents import Kind
from ps_core._simulate.machine import Machine
from ps_core._simulate.machine import machine as find_machine
from ps_core._simulate.transport import transport
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._devices.device import Device
from ps_core.engine._memory.common_memory import CommonMemory, CommonWeights
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._optim.rules import OptimizerRule
from ps_core.engine._parameters.grouping import Grouping
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives
from ps_core.engine._support.checksum import checksum
from ps_core.engine._support.log import log_line

Values: TypeAlias = Iterator[tuple[str, nn.Parameter, torch.Tensor]]
"""Of `initial_values`."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class SingleProcess:
    """One process that has all of the model."""

    sharers = 1

    def check(self, device: Device, machine: str | None = None) -> None:
        """Do nothing: one process can use any device."""

    def share(self, packing: Grouping, optimizer: OptimizerRule | None, how: str) -> None:
        """Do nothing: there is one process."""

    def place_weights(self, store: TierStore, packing: Grouping) -> None:
        """Do nothing: one process reads no other's memory."""

    def values(self, values: Values) -> Values:
        """Return the values themselves: there are no other ranks to compare with."""
        return values


class GroupJoin:
    """One process on its way into the group."""

    def __init__(self, together: AsyncCollectives) -> None:
        self._together = together
        self.sharers = together.local_ranks
        """Processes that divide this computer's memory."""

    def check(self, device: Device, machine: str | None = None) -> None:
        """Refuse what several processes cannot have; ``machine``: the machine to plan for, see `Options`."""
        self._together.agree("the kind of device", device.name)
        if self._together.why_not_shared and self._together.process == 0:
            log_line(f"processes send what they share over sockets: {self._together.why_not_shared}")
        if isinstance(device, CpuDevice) and self._together.host_memory is not None:
            device.use_memory(self._together.host_memory)
        if device.torch_device.type == "cuda":
            self._check_cards(device)
            # Before free memory is measured: connections take some.
            rates = device.machine if machine is None else find_machine(machine)
            why_by_host = "" if rates is None else self._why_by_host(rates)
            proposals = self._together.reach(device.torch_device, why_by_host)
            if proposals is not None and self._together.process == 0:
                log_line(proposals)

    def _why_by_host(self, rates: Machine) -> str:
        """Return why shared host memory is faster than NCCL by the machine's rates; empty if it is not."""
        chosen = transport(rates, ranks=self._together.processes, ranks_per_node=self._together.local_ranks)
        return f"{chosen.why} ({rates.name})" if chosen.by_host else ""

    def _check_cards(self, device: Device) -> None:
        """Refuse that processes share a card while others are idle."""
        card = self._together.card
        if card not in (None, device.torch_device.index):
            raise InvalidInput(
                f"device={str(device.torch_device)!r}: collectives were connected for cuda:{card}; expected the same "
                "device, other collectives (ps_dist.connect() again), or connect(transport='gloo')"
            )
        node = blake2b(computer().encode(), digest_size=6).digest()
        mine = (int.from_bytes(node, "little"), device.torch_device.index, torch.cuda.device_count())
        found = shared_card_error(self._together.all_values(mine, "which process has which device"))
        if found is not None:
            raise InvalidInput(
                f"device={str(device.torch_device)!r}: {found}; before chunked(...) call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), or give each process its own 'cuda:0', 'cuda:1'"
            )

    def share(self, packing: Grouping, optimizer: OptimizerRule | None, how: str) -> None:
        """Cut every group into shards; `RanksDiverged` unless all have the same model and train it alike."""
        for group in packing.groups:
            group.share(self._together.rank, self._together.ranks)
        rows = [
            (name, tuple(record.shape), record.stride, str(record.dtype), record.trainable, record.group.index)
            for name, record in packing.records.items()
        ]
        layout = blake2b(repr(rows).encode(), digest_size=4).hexdigest()
        numel = sum(group.numel for group in packing.groups)
        self._together.agree(
            "the model and its groups",
            f"{len(rows)} tensors of {numel:,} elements in {len(packing.groups)} groups ({layout})",
        )
        self._together.agree("how it is trained", f"{how}, {'' if optimizer is None else optimizer}")

    def place_weights(self, store: TierStore, packing: Grouping) -> None:
        """Put fp32 weights that the CPU computes from where all ranks map them, if they are all on one computer."""
        make, groups = self._together.common_file, packing.groups
        wanted = len(store.tiers) == 1 and all(group.weight is Kind.P32 for group in groups)
        if make is None or store.device.torch_device.type != "cpu" or not wanted:
            return
        sizes = [group.chunk_numel * group.dtype.itemsize for group in groups]
        starts = list(accumulate((-(-size // PAGESIZE) * PAGESIZE for size in sizes), initial=0))
        file, common = make(), None
        if file is None:
            return
        with suppress(OSError, ValueError):
            common = CommonMemory(file, starts[-1])
        mapped = self._together.all_values([float(common is not None)], "who maps all weights")
        if common is None or not all(row[0] for row in mapped):
            return
        for group, start, size in zip(groups, starts, sizes, strict=False):
            own = size // group.ranks
            group.map_weights(CommonWeights(common, start, size, slice(own * group.rank, own * (group.rank + 1))))

    def values(self, values: Values) -> Values:
        """Yield the same values; at the end raise `RanksDiverged` if ranks were given different ones."""
        digest = blake2b(digest_size=8)
        for name, parameter, value in values:
            digest.update(f"{value.dtype} {checksum(value)}".encode())
            yield name, parameter, value
        self._together.agree(
            "the initial parameters (give every rank the same torch.manual_seed before the model is made)",
            digest.hexdigest(),
        )


def computer() -> str:
    """Return a text that is the same on two ranks if they number the same accelerators.

    Names alone are not enough: copies of an image, and containers, have the same on many computers. A kernel's boot id
    is of one computer. Containers there may be given different cards, but have names of their own as a rule.
    Namespaces of processes or networks are not looked at: who is in different ones may have the same cards.
    """
    try:
        boot = _BOOT.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        boot = ""  # no Linux
    return f"{boot} {node_name()}"


def shared_card_error(rows: Sequence[Sequence[float]]) -> str | None:
    """Return an error text if ranks share a card while others are free; None if not.

    A rank's row: its computer, its card, how many cards it sees.
    """
    for node, card, seen in rows:
        here = [rank for rank, row in enumerate(rows) if row[0] == node]
        sharing = [rank for rank in here if rows[rank][1] == card]
        if len(sharing) > 1 and seen >= len(here):
            ranks = ", ".join(map(str, sharing))
            return f"ranks {ranks} share cuda:{card:.0f}, while their computer has {seen:.0f} for {len(here)} processes"
    return None
