"""Name the tensors of a managed model by section, and give access to the chunks that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ps_core._errors import InvalidInput
from ps_core._extents import Kind
from ps_core._plan import Queue
from ps_core.engine._checkpoint.dense_memory import not_dense
from ps_core.engine._checkpoint.safetensors_format import TensorEntry, in_order
from ps_core.engine._checkpoint.shard_ranges import Layout
from ps_core.engine._execution.engine import Engine
from ps_core.engine._optim.optimizer import ChunkedOptimizer
from ps_core.engine._parameters.managed_parameter import ManagedParameter
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._sharding.sharded_residency import ShardedResidency

MASTERS, WEIGHTS, BUFFERS, EXTRA = "masters", "weights", "buffers", "extra"
TensorSource = tuple[ParamState, Kind] | torch.Tensor
"""A place of a tensor's values: a chunk of this kind, or the tensor itself."""
Sections = dict[str, dict[str, TensorSource]]


def contents(model: nn.Module, engine: Engine, optimizer: ChunkedOptimizer | None) -> Sections:
    """Return every tensor of a model and its optimizer, by section.

    Parameters are in the order in which modules register them. So a checkpoint shows neither groups nor tiers: the same
    training gives the same bytes wherever it ran.
    """
    states = {} if optimizer is None else optimizer.rule.states
    found: Sections = {MASTERS: {}, **{name: {} for name in states}, WEIGHTS: {}}
    for record in engine.records:
        if record.trainable:
            found[MASTERS][record.name] = (record, Kind.P32)
            for name, kind in states.items():
                found[name][record.name] = (record, kind)
        else:
            found[WEIGHTS][record.name] = (record, record.group.weight)
    found[BUFFERS] = dict(plain_tensors(model))
    return found


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what else ``state_dict`` contains: persistent buffers, and parameters that are not managed."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        rows = {**module._buffers, **module._parameters}
        for name, tensor in rows.items():
            left_out = name in module._non_persistent_buffers_set or isinstance(tensor, ManagedParameter)
            if tensor is None or left_out or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            full = f"{prefix}.{name}" if prefix else name
            if why := not_dense(tensor):
                raise InvalidInput(f"{full!r} is {why}, which a checkpoint cannot hold: make it dense")
            yield full, tensor.detach()


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return the modules' ``get_extra_state`` values by module name."""
    return {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def entries(section: dict[str, TensorSource], shard: int = 0) -> list[TensorEntry]:
    """Return what a rank writes of a section's tensors, in the order of the files; see [Note: parts]."""
    found = [_entry(name, source, shard) for name, source in section.items()]
    return in_order(each for each in found if each is not None)


def _entry(name: str, source: TensorSource, shard: int) -> TensorEntry | None:
    if isinstance(source, torch.Tensor):
        return None if shard else TensorEntry(name, source.dtype, tuple(source.shape))
    record, kind = source
    dtype = record.group.dtype_of(kind)
    mine = elements_of(record, shard)
    if mine == range(record.numel):
        return None if shard and not record.numel else TensorEntry(name, dtype, tuple(record.shape))
    if not mine:
        return None
    return TensorEntry(f"{name}[{mine.start}:{mine.stop}]", dtype, (len(mine),), name, mine.start)


def layout_of(record: ParamState) -> Layout:
    """Return where a parameter's elements are in its group."""
    return Layout(record.offset, record.group.shard_numel)


def elements_of(record: ParamState, shard: int) -> range:
    """Return the elements of a tensor that a shard has, in memory order."""
    first = shard * record.group.shard_numel - record.offset
    start, stop = (min(max(each, 0), record.numel) for each in (first, first + record.group.shard_numel))
    return range(start, stop)


def largest_chunk_bytes(engine: Engine) -> int:
    """Return the size of the largest chunk that this rank keeps."""
    return max(chunk.bytes for group in engine.groups for kind, chunk in group.chunks.items() if kind is not Kind.FULL)


class OpenChunks(AbstractContextManager["OpenChunks"]):
    """Chunks that the host can read: one at a time from a disk, and those pinned in memory.

    With several ranks a chunk is this rank's shard.
    """

    def __init__(self, engine: Engine, *, write: bool) -> None:
        self._engine = engine
        self._write = write
        self._open: dict[tuple[ParamGroup, Kind], tuple[ExitStack, torch.Tensor, list[ParamState]]] = {}

    def tensor(self, source: TensorSource) -> torch.Tensor:
        """Return a tensor that this rank has whole, to be read or written before the next call."""
        if isinstance(source, torch.Tensor):
            return source
        record, kind = source
        flat = self._elements(record, kind)
        return flat.as_strided(record.shape, record.stride, flat.storage_offset())

    def elements(self, source: tuple[ParamState, Kind], first: int, count: int) -> torch.Tensor:
        """Return some of this rank's elements, in memory order, to be read or written before the next call."""
        record, kind = source
        before = elements_of(record, record.group.rank).start
        return self._elements(record, kind)[first - before : first - before + count]

    def _elements(self, record: ParamState, kind: Kind) -> torch.Tensor:
        key = (record.group, kind)
        if key not in self._open:
            for other in [each for each in self._open if not each[0].pinned]:
                self._close(other)
            stack = ExitStack()
            flat = stack.enter_context(_own(self._engine, record.group, kind, write=self._write))
            self._open[key] = (stack, flat, [])
        _, flat, records = self._open[key]
        records.append(record)
        return flat[record.piece]

    def _close(self, key: tuple[ParamGroup, Kind]) -> None:
        (group, kind), (stack, flat, records) = key, self._open.pop(key)
        changed = self._write and kind in (Kind.P32, group.weight)
        for record in records[::-1] if changed else []:
            for other in record.others:  # the last one read decides, as if they shared memory
                flat[other.piece].copy_(flat[record.piece])
                records.append(other)
        stack.close()
        if not changed:
            return
        if kind is not group.weight:
            self._engine.residency.rebuild(group, list(dict.fromkeys(records)))
        for record in records:
            record.mark_replaced()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for key in list(self._open):
            self._close(key)


@contextmanager
def _own(engine: Engine, group: ParamGroup, kind: Kind, *, write: bool) -> Iterator[torch.Tensor]:
    """Give access to this rank's part of one kind of a group."""
    residency = engine.residency
    if not isinstance(residency, ShardedResidency):
        with engine.updater.opened(group, kind, write=write) as flat:
            yield flat
        return
    chunk = group.chunks[kind]
    shard = residency.own_bytes(chunk).view(group.dtype_of(kind))
    what = f"{'write' if write else 'read'} {kind.value} of {group.name}"
    engine.store.device.declare_access(Queue.CPU, what, (shard,), (shard,) if write else ())
    try:
        yield shard
    finally:
        if write:
            residency.save(chunk, slice(0, shard.numel()), shard)
