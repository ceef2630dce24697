"""Pack parameters into groups, and cut each group into one equal shard for every process.

A *group* is one contiguous run of whole tensors in order of first use, about one layer. It is cut into as many equal,
128-byte-aligned *shards* as there are processes. A *chunk* is one process's shard. Tensors may span shards, never
groups, so a gathered group holds every tensor in one piece. Three sorts of tensors never share a group: tensors with a
gradient, trainable ones without one, and frozen ones. So a frozen group has no optimizer state and is never written
back. A group gets gradients either for all its tensors or for none.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_core._trace import Trace
from ps_core._units import check_whole

SHARD_ALIGNMENT_NUMEL = 64
"""Elements in 128 bytes of 16 bits. Optimizer steps are bitwise the same only if cut at multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One contiguous run of whole tensors. ``offsets`` counts elements from the start of the gathered group."""

    index: int
    tensors: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    shard_numel: int
    trainable: bool
    common: bool = False
    """True if every process computes from the shards of all where they are, so that a gather copies nothing."""
    fp32: bool = False
    """True: computed in fp32, whatever the program's precision is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """List all groups of a model, in order of first use."""

    ranks: int
    groups: tuple[Group, ...]
    group_of: tuple[int, ...]
    """The group of each tensor of the trace."""

    @property
    def padded_numel(self) -> int:
        """Return the number of elements stored on all processes together, padding included."""
        return sum(group.shard_numel for group in self.groups) * self.ranks

    @property
    def padding_numel(self) -> int:
        """Return the number of elements that hold nothing."""
        return self.padded_numel - sum(group.numel for group in self.groups)

    @property
    def utilisation(self) -> float:
        """Return the fraction of stored elements that hold something."""
        return 1 - self.padding_numel / self.padded_numel if self.groups else 1.0


def lay_out(trace: Trace, *, group_numel: int, ranks: int = 1) -> Layout:
    """Pack the trace's tensors into groups of about ``group_numel`` elements.

    Tensors first used at the same moment stay together where they fit, so that groups end where layers do.
    """
    check_whole("group_numel", group_numel, 1)
    check_whole("ranks", ranks, 1)
    runs: list[tuple[int, list[int]]] = []
    open_run: dict[tuple[bool, bool], int] = {}
    filled: list[int] = []
    for sort, unit in units(trace):
        size = sum(trace.tensors[index].numel for index in unit)
        for piece in [unit] if size <= group_numel else [[index] for index in unit]:
            numel = sum(trace.tensors[index].numel for index in piece)
            run = open_run.get(sort)
            if run is None or filled[run] + numel > group_numel:
                run = open_run[sort] = len(runs)
                runs.append((run, []))
                filled.append(0)
            runs[run][1].extend(piece)
            filled[run] += numel
    groups = tuple(_group(trace, index, tensors, ranks) for index, tensors in runs)
    owner = {tensor: group.index for group in groups for tensor in group.tensors}
    return Layout(ranks=ranks, groups=groups, group_of=tuple(owner[index] for index in range(len(trace.tensors))))


def units(trace: Trace) -> list[tuple[tuple[bool, bool], list[int]]]:
    """Return tensors in order of first use, those of one moment and one sort together; unused ones last."""
    learning = {index for moment in trace.moments for index in moment.grads}
    units: list[tuple[tuple[bool, bool], list[int]]] = []
    seen: set[int] = set()
    touched = [(*moment.reads, *moment.grads) for moment in trace.moments]
    for indices in [*touched, tuple(range(len(trace.tensors)))]:
        sorts: dict[tuple[bool, bool], list[int]] = {}
        for index in dict.fromkeys(indices):
            if index not in seen:
                sorts.setdefault((trace.tensors[index].trainable, index in learning), []).append(index)
        seen.update(indices)
        units += sorts.items()
    return units


def _group(trace: Trace, index: int, tensors: list[int], ranks: int) -> Group:
    offsets, numel = [], 0
    for tensor in tensors:
        offsets.append(numel)
        numel += trace.tensors[tensor].numel
    step = ranks * SHARD_ALIGNMENT_NUMEL
    return Group(
        index=index,
        tensors=tuple(tensors),
        offsets=tuple(offsets),
        numel=numel,
        shard_numel=max(1, -(-numel // step)) * SHARD_ALIGNMENT_NUMEL,
        trainable=trace.tensors[tensors[0]].trainable,
    )
