"""Define plans as data: the instruction set, segments, and the meaning of each.

[Note: what a plan means]
A plan has one *home* placement and some segments. Every segment begins and ends in home, so any segment may follow any
other whose contents agree. Home slots are numbered 0, 1, ... in the order of ``Plan.home``. Slots that a segment
reserves have higher numbers, used once each.

Order. An instruction runs when every earlier instruction *of its queue* and every instruction in ``after`` is complete.
Nothing else may be assumed: any order this allows must give the same bytes. Across segments the executor orders by
address: an instruction waits for earlier segments' instructions on the same bytes. Micro-batch segments end with
`Decide`; its result says whether `step` or `skip` follows.

Memory. A tier is an address space of ``capacity_bytes``. A slot owns its range from `Reserve` to `Release`. On the
compute tier (tier 0) non-model data owns a range at the top. While a moment runs, that has its ``nonmodel_bytes``.
Between two moments it is the smaller of the two; at a segment's beginning and end, nothing. Owned ranges never overlap.
That keeps a budget, in every order.

Contents. A fresh slot holds poison. A `Copy` names the version it carries; reading anything but the expected version is
an error. See [Note: extents and versions] in `_extents`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import is_
from typing import TypeAlias

from ps_core._errors import InvalidInput, PlanMismatch
from ps_core._extents import Extent, SegmentName
from ps_core._units import check_whole, shown
from ps_core._waiting_order import order_by_waits


class Queue(IntEnum):
    """A queue, which executes one instruction at a time, in order."""

    COMPUTE = 0
    H2D = 1
    D2H = 2
    DISK_R = 3
    DISK_W = 4
    COLL = 5
    CPU = 6


@dataclass(frozen=True, slots=True)
class Tier:
    """One level of memory, fastest first; the first one computes."""

    name: str
    """``device``, ``host`` or ``disk``."""
    capacity_bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidInput(f"a tier's name must be device, host or disk; found {self.name!r}")
        check_whole(f"capacity_bytes of tier {self.name!r}", self.capacity_bytes)


TIER_STACKS = (("device",), ("host",), ("device", "host"), ("host", "disk"), ("device", "host", "disk"))


def check_tiers(tiers: tuple[Tier, ...]) -> None:
    """Raise `InvalidInput` for a list of tiers that is not one of `TIER_STACKS`."""
    if not isinstance(tiers, tuple | list) or not all(isinstance(tier, Tier) for tier in tiers):
        raise InvalidInput(f"tiers must be a tuple of Tier(name, capacity_bytes), found {shown(tiers)}")
    if tuple(tier.name for tier in tiers) not in TIER_STACKS:
        stacks = ", ".join("-".join(stack) for stack in TIER_STACKS)
        found = "-".join(tier.name for tier in tiers)
        raise InvalidInput(f"tiers must be one of {stacks}; found {found!r}")


def link(source: str, target: str) -> Queue:
    """Return the queue that copies from one tier to the next."""
    return {
        ("host", "device"): Queue.H2D,
        ("device", "host"): Queue.D2H,
        ("disk", "host"): Queue.DISK_R,
        ("host", "disk"): Queue.DISK_W,
    }[source, target]


def worker(tiers: tuple[Tier, ...], tier: int) -> Queue:
    """Return the queue that computes on (or shifts within) a tier."""
    if tier == 0:
        return Queue.COMPUTE
    return Queue.CPU if tiers[tier].name == "host" else Queue.DISK_W


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve ``bytes`` at ``offset``; both are multiples of the alignment."""

    slot: int
    tier: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Release:
    """Release a slot's bytes; its contents are lost."""

    slot: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy an extent between adjacent tiers, on the queue of their link."""

    extent: Extent
    version: int
    source: int
    target: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Shift:
    """Move a slot within its tier, on the tier's worker queue; ranges may overlap."""

    slot: int
    offset: int


@dataclass(frozen=True, slots=True)
class Gather:
    """All-gather a group's weight shards (version 0) into a FULL slot, on the compute tier."""

    group: int
    shard: int
    full: int
    seq: int


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Sum a group's complete gradient over processes on the compute tier, and keep this process's shard.

    With ``overwrites`` FULL version K becomes the weight chunk's version K. Without, GRAD version K becomes RGRAD
    version K. ``wire`` is scratch memory for the other processes' values; its contents are lost.
    """

    group: int
    source: int
    wire: int
    shard: int
    seq: int


@dataclass(frozen=True, slots=True)
class Run:
    """Run a moment (COMPUTE). ``slots`` names the slot of each extent of `Program.uses`, in its order."""

    visit: int
    slots: tuple[int, ...]
    nonmodel_bytes: int


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add a complete local gradient (GRAD or RGRAD, version K) to ACC on the same tier; ``first`` starts the sum."""

    group: int
    gradient: int
    accumulator: int
    first: bool


@dataclass(frozen=True, slots=True)
class Norm:
    """Compute the square sum and finite flag of a final gradient (weight version K, or ACC), for part ``group``."""

    group: int
    slot: int


@dataclass(frozen=True, slots=True)
class Decide:
    """Agree on the norm from every stepped group's part, and so on clipping, step or skip (COLL)."""

    seq: int


@dataclass(frozen=True, slots=True)
class Step:
    """Step a group's chunk; every slot is on one tier, on its worker queue.

    ``slots`` names the slot of each of `Program.home_kinds`, in its order. P32, M, V go from version 0 to 1. A 16-bit
    weight becomes its rebuilt version: over the gradient with ``overwrites``, over anything without. ACC is read.
    """

    group: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    """Rebuild a 16-bit weight from P32 version 0, on one tier's worker queue; the target may hold anything."""

    group: int
    master: int
    weight: int


Op: TypeAlias = (
    Reserve | Release | Copy | Shift | Gather | ReduceScatter | Run | Accumulate | Norm | Decide | Step | Cast
)


def slots_of(op: Op) -> tuple[int, ...]:
    """Return the slots that an instruction names."""
    match op:
        case Copy():
            return (op.source, op.target)
        case Run() | Step():
            return op.slots
        case Gather():
            return (op.shard, op.full)
        case ReduceScatter():
            return (op.source, op.wire, op.shard)
        case Accumulate():
            return (op.gradient, op.accumulator)
        case Cast():
            return (op.master, op.weight)
        case Norm() | Shift() | Reserve() | Release():
            return (op.slot,)
    return ()


@dataclass(frozen=True, slots=True)
class Instr:
    """One instruction. In a new plan ``id`` is its place in the segment, and ``after`` names earlier ones."""

    id: int
    queue: Queue
    op: Op
    after: tuple[int, ...] = ()
    visit: int = -1
    """The moment it serves, for display; -1: none."""


@dataclass(frozen=True, slots=True)
class Held:
    """One home slot: a range of a tier that is kept for one extent."""

    tier: int
    offset: int
    bytes: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class Segment:
    """A list of instructions that begins and ends in the home placement."""

    name: SegmentName
    instrs: tuple[Instr, ...]

    def numbered_by_place(self) -> Segment:
        """Return the segment with each instruction behind all that it waits for, and its place as its ``id``.

        That is the segment itself if it is so already. Raise `PlanMismatch` if there is no such order.
        """
        if all(
            instr.id == place and all(0 <= other < place for other in instr.after)
            for place, instr in enumerate(self.instrs)
        ):
            return self
        listed = {instr.id: place for place, instr in enumerate(self.instrs)}
        if len(listed) < len(self.instrs):
            raise PlanMismatch(f"{self.name.value}: two instructions have the same id")
        waits = []
        tails: dict[Queue, int] = {}
        for place, instr in enumerate(self.instrs):
            try:
                before = {listed[other] for other in instr.after}
            except KeyError as error:
                raise PlanMismatch(f"{self.name.value}: an instruction waits for {error}, which is not there") from None
            waits.append(before | {tails.get(instr.queue, place)} - {place})
            tails[instr.queue] = place
        order = order_by_waits(waits)
        if order is None:
            raise PlanMismatch(f"{self.name.value}: instructions wait for each other")
        places = {self.instrs[number].id: place for place, number in enumerate(order)}
        rows = [
            replace(instr, id=places[instr.id], after=tuple([places[each] for each in instr.after]))
            for instr in map(self.instrs.__getitem__, order)
        ]
        return replace(self, instrs=tuple(rows))


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold everything that an executor needs besides the program."""

    tiers: tuple[Tier, ...]
    home: tuple[Held, ...]
    segments: tuple[Segment, ...]
    policy: str = "belady"
    step_tiers: tuple[int, ...] = ()
    """The tier of each group's step (-1: never stepped)."""
    notes: tuple[str, ...] = ()
    """Exceptional measures of the planner that a reader should know (repairs, fall-backs)."""

    def segment(self, name: SegmentName) -> Segment:
        """Return the segment of that name."""
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise InvalidInput(f"this plan has no segment {str(name)!r}")

    def numbered_by_place(self) -> Plan:
        """Return the plan with the segments so ordered and numbered; itself if they are."""
        segments = tuple([segment.numbered_by_place() for segment in self.segments])
        return self if all(map(is_, segments, self.segments)) else replace(self, segments=segments)

    def home_tier(self, extent: Extent) -> int:
        """Return the tier of an extent's home slot."""
        for held in self.home:
            if held.extent == extent:
                return held.tier
        raise InvalidInput(f"{extent.kind.value} of {extent.index} has no home")

    @property
    def stepped_in_backward(self) -> frozenset[int]:
        """Return the groups that the last pass steps while backward goes on."""
        rows = (segment.instrs for segment in self.segments if segment.name is SegmentName.MICRO_LAST)
        return frozenset(instr.op.group for instrs in rows for instr in instrs if isinstance(instr.op, Step))

    @property
    def fingerprint(self) -> str:
        """Return a text that is equal for equal plans, and practically never for others; processes compare it."""
        return hashlib.sha256(repr((self.tiers, self.home, self.segments)).encode()).hexdigest()[:16]
