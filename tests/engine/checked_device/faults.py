"""Ordering bugs that a test can ask a `CheckedDevice` for, one at a time."""

from __future__ import annotations

from enum import StrEnum

from ps_core._plan import Queue


class InjectedFault(StrEnum):
    """An ordering bug: waits of one queue for events of another that are ignored, or events that come out wrong.

    Each member's docstring says what goes wrong.
    """

    waiting: Queue | None
    """The queue whose waits are ignored; None: it is the events that are wrong."""
    recorded: Queue | None
    """On which queue the events that it waits for were recorded."""

    def __new__(cls, value: str, waiting: Queue | None, recorded: Queue | None, meaning: str) -> InjectedFault:
        member = str.__new__(cls, value)
        member._value_ = value
        member.waiting, member.recorded, member.__doc__ = waiting, recorded, meaning
        return member

    COMPUTE_BEFORE_FETCH = (
        *("compute-before-fetch", Queue.COMPUTE, Queue.H2D),
        "compute reads a slot that is still being fetched",
    )
    COMPUTE_OVER_COPY_OUT = (
        *("compute-over-copy-out", Queue.COMPUTE, Queue.D2H),
        "compute writes memory that is still being copied out",
    )
    FETCH_OVER_COMPUTE = (
        *("fetch-over-compute", Queue.H2D, Queue.COMPUTE),
        "a fetch lands in a slot that is still computed on",
    )
    FETCH_OVER_COPY_OUT = (
        *("fetch-over-copy-out", Queue.H2D, Queue.D2H),
        "a slot is refilled before its copy out is done",
    )
    COPY_OUT_BEFORE_COMPUTE = (
        *("copy-out-before-compute", Queue.D2H, Queue.COMPUTE),
        "a slot is copied out before compute has written it",
    )
    HOST_BEFORE_COMPUTE = (
        *("host-before-compute", Queue.CPU, Queue.COMPUTE),
        "the host reads a norm or a loss that is still computed",
    )
    STEP_BEFORE_GRADIENT = (
        *("step-before-gradient", Queue.CPU, Queue.D2H),
        "the host steps with a gradient that has not arrived",
    )
    STEP_OVER_FETCH = (
        *("step-over-fetch", Queue.CPU, Queue.H2D),
        "the host writes a weight that is still being copied up",
    )
    FETCH_BEFORE_STEP = (
        *("fetch-before-step", Queue.H2D, Queue.CPU),
        "a weight is copied up that the worker's thread still steps",
    )
    COPY_OUT_OVER_STEP = (
        *("copy-out-over-step", Queue.D2H, Queue.CPU),
        "a gradient is copied down to where the worker's thread still steps",
    )
    STEP_BEFORE_DISK_READ = (
        *("step-before-disk-read", Queue.CPU, Queue.DISK_R),
        "the host steps with states that have not come from the disk",
    )
    STEP_OVER_DISK_WRITE = (
        *("step-over-disk-write", Queue.CPU, Queue.DISK_W),
        "the host writes states that are still being written to the disk",
    )
    FETCH_BEFORE_DISK_READ = (
        *("fetch-before-disk-read", Queue.H2D, Queue.DISK_R),
        "a host slot is copied up before it has come from the disk",
    )
    DISK_READ_OVER_FETCH = (
        *("disk-read-over-fetch", Queue.DISK_R, Queue.H2D),
        "a disk read lands in a host slot that is still being copied up",
    )
    DISK_WRITE_BEFORE_COPY_OUT = (
        *("disk-write-before-copy-out", Queue.DISK_W, Queue.D2H),
        "a host slot is written to the disk before it has come from the device",
    )
    COPY_OUT_OVER_DISK_WRITE = (
        *("copy-out-over-disk-write", Queue.D2H, Queue.DISK_W),
        "a copy out lands in a host slot that is still being written to the disk",
    )
    DISK_READ_BEFORE_WRITE = (
        *("disk-read-before-write", Queue.DISK_R, Queue.DISK_W),
        "the disk is read before what was written there is complete",
    )
    COMPUTE_BEFORE_DISK_READ = (
        *("compute-before-disk-read", Queue.COMPUTE, Queue.DISK_R),
        "where the host computes: it reads a slot that has not come from the disk",
    )
    COMPUTE_OVER_DISK_WRITE = (
        *("compute-over-disk-write", Queue.COMPUTE, Queue.DISK_W),
        "where the host computes: it writes a slot that is still being written to the disk",
    )
    DISK_READ_OVER_COMPUTE = (
        *("disk-read-over-compute", Queue.DISK_R, Queue.COMPUTE),
        "where the host computes: a disk read lands in a slot that is still computed on",
    )
    DISK_WRITE_BEFORE_COMPUTE = (
        *("disk-write-before-compute", Queue.DISK_W, Queue.COMPUTE),
        "where the host computes: a slot is written to the disk before it is computed",
    )
    COMPUTE_BEFORE_GATHER = (
        *("compute-before-gather", Queue.COMPUTE, Queue.COLL),
        "compute reads a group that is still being gathered",
    )
    GATHER_BEFORE_FETCH = (
        *("gather-before-fetch", Queue.COLL, Queue.H2D),
        "a shard is gathered while it is still being fetched",
    )
    GATHER_OVER_COMPUTE = (
        *("gather-over-compute", Queue.COLL, Queue.COMPUTE),
        "a gathered group lands in a buffer that is still computed on",
    )
    FETCH_OVER_GATHER = (
        *("fetch-over-gather", Queue.H2D, Queue.COLL),
        "a slot is refilled while it is still being gathered",
    )
    LOST_EVENT = (
        *("lost-event", None, None),
        "about one event in four stands for nothing, so that waiting for it returns at once",
    )
    STALE_EVENT = (
        *("stale-event", None, None),
        "every event stands for what its queue had done at the event before, as if recorded before its launch",
    )
