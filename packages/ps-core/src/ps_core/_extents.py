"""Name what moves, the segments of training, and how a moment uses what it needs: the words of every plan.

[Note: extents and versions]
An *extent* moves as a whole: one kind of one group's chunk, or one activation. Its contents, the *payload*, change in a
fixed order. So an integer, its *version*, says exactly which bytes a copy should contain:

    weight   P16 (16-bit) or P32 (fp32); one process reads it directly, several gather shards into FULL first.
             With a 16-bit precision, groups that are kept in fp32 (`Group.fp32`) are like groups of an fp32 program.
             0 = the parameters. With ``overwrites`` the gradient is written over them: 1..K after each of the group's
             K gradient moments (a last read of the payload after these is one more: until then a gradient is kept
             aside). K+1 (K = 0 without ``overwrites``) = rebuilt by a step, a skipped step, the prologue.
             (fp32: P32 itself is the weight, and a step takes it from 0 to 1.)
    FULL     0 = gathered parameters; with ``overwrites`` 1..K as above. The chunk goes from 0 to K in one
             reduce-scatter.
    GRAD     without ``overwrites``: a group's gradient on its way to the accumulator, 1..K.
    RGRAD    without ``overwrites``: the sum of GRAD over processes, this one's shard of it in fp32; version K.
    ACC      the fp32 accumulator: micro_first (or a lone micro_last) takes it from nothing to 1, every later one from 1
             to 2; at the next segment's start 2 is called 1 again.
    P32, M, V, S3, S4    0 before a step, 1 after it. The master, and what the optimizer keeps besides: `STATES`.
    ACT      0.
    WIRE     scratch of a reduce-scatter; has no version.

Every segment begins and ends in the plan's *home* placement. At a segment's start versions are counted anew.
`Program.entry` and `Program.exit` say what home slots must hold at either end. An extent that is not listed there may
not be read.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Precision(StrEnum):
    """The type that parameters are computed in. The 16-bit ones keep fp32 masters."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Kind(StrEnum):
    """The kinds of data; see [Note: extents and versions]."""

    P16 = "p16"
    P32 = "p32"
    M = "m"
    V = "v"
    S3 = "s3"
    S4 = "s4"
    ACC = "acc"
    FULL = "full"
    GRAD = "grad"
    RGRAD = "rgrad"
    WIRE = "wire"
    ACT = "act"


STATES = (Kind.M, Kind.V, Kind.S3, Kind.S4)
"""The kinds of an optimizer's states, of which a program has the first few: fp32, one element for each parameter."""


class Extent(NamedTuple):
    """Data that moves as a whole. ``index`` is the group's, or the activation's for ACT."""

    kind: Kind
    index: int  # type: ignore[assignment]  # no one looks for a tuple's method here


class Use(NamedTuple):
    """Say how a moment uses an extent on the compute tier.

    ``before`` is the version that it must find. None means any contents: the extent is new, or its data are not needed.
    ``after`` is the version that it leaves; equal means read only.
    """

    extent: Extent
    before: int | None
    after: int
    held: bool = False
    """True if the memory has been referenced since the moment before: the extent must be in the same slot."""


class SegmentName(StrEnum):
    """Name the segments of a plan. ``MICRO_LAST`` is the only micro-batch if there is one."""

    PROLOGUE = "prologue"
    MICRO_FIRST = "micro_first"
    MICRO_MID = "micro_mid"
    MICRO_LAST = "micro_last"
    STEP = "step"
    SKIP = "skip"
    EVAL = "eval"

    @property
    def is_micro(self) -> bool:
        """Return True if the segment runs forward and backward."""
        return self in (SegmentName.MICRO_FIRST, SegmentName.MICRO_MID, SegmentName.MICRO_LAST)
