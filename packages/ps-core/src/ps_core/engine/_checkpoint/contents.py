"""What a checkpoint holds of a model under management, by section and name; and chunks held open while it moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ps_core._errors import InvalidInput
from ps_core._program import Kind
from ps_core.engine._checkpoint.safetensors import Entry, in_order
from ps_core.engine._engine import Engine
from ps_core.engine._optimizer import STATES, ChunkedOptimizer
from ps_core.engine._parameter import ManagedParameter
from ps_core.engine._records import GroupRecord, Payload, TensorRecord

MASTERS, WEIGHTS, BUFFERS, EXTRA = "masters", "weights", "buffers", "extra"
Held = tuple[TensorRecord, Kind] | torch.Tensor
"""Where a tensor's values are: in a chunk, or by themselves."""
Sections = dict[str, dict[str, Held]]


def contents(model: nn.Module, engine: Engine, optimizer: ChunkedOptimizer | None) -> Sections:
    """Every tensor of a model and its optimizer, by section; parameters in the order in which modules register them.

    So neither groups nor tiers show in a checkpoint: the same training gives the same bytes wherever it ran.
    """
    moments = {} if optimizer is None else STATES[optimizer._rule]
    found: Sections = {MASTERS: {}, **{name: {} for name in moments}, WEIGHTS: {}}
    for record in engine.records:
        if record.trainable:
            found[MASTERS][record.name] = (record, Kind.P32)
            for name, kind in moments.items():
                found[name][record.name] = (record, kind)
        else:
            found[WEIGHTS][record.name] = (record, record.group.weight)
    found[BUFFERS] = dict(plain_tensors(model))
    return found


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What else ``state_dict`` has: buffers, but for those it leaves out, and parameters that are not managed."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        rows = {**module._buffers, **module._parameters}
        for name, tensor in rows.items():
            left_out = name in module._non_persistent_buffers_set or isinstance(tensor, ManagedParameter)
            if tensor is None or left_out or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            full = f"{prefix}.{name}" if prefix else name
            if tensor.layout is not torch.strided:
                raise InvalidInput(f"{full!r} is {tensor.layout}, which a checkpoint cannot hold: make it dense")
            yield full, tensor.detach()


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules want kept besides tensors (``get_extra_state``)."""
    return {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def entries(section: dict[str, Held]) -> list[Entry]:
    """A section's tensors, as they will lie in files."""
    return in_order(_entry(name, held) for name, held in section.items())


def _entry(name: str, held: Held) -> Entry:
    if isinstance(held, torch.Tensor):
        return Entry(name, held.dtype, tuple(held.shape))
    record, kind = held
    return Entry(name, record.group.dtype_of(kind), tuple(record.shape))


def largest_chunk_bytes(engine: Engine) -> int:
    """Of all chunks of all groups."""
    return max(home.bytes for group in engine.groups for home in group.homes.values())


class Chunks(AbstractContextManager["Chunks"]):
    """Chunks held open: one at a time, for it may have to come from a disk; and those that are in memory for good."""

    def __init__(self, engine: Engine, *, write: bool) -> None:
        self._engine = engine
        self._write = write
        self._open: dict[tuple[GroupRecord, Kind], tuple[ExitStack, torch.Tensor, list[TensorRecord]]] = {}

    def tensor(self, held: Held) -> torch.Tensor:
        """The values, to be read or written before the next call."""
        if isinstance(held, torch.Tensor):
            return held
        record, kind = held
        key = (record.group, kind)
        if key not in self._open:
            for other in [each for each in self._open if not each[0].pinned]:
                self._close(other)
            stack = ExitStack()
            flat = stack.enter_context(self._engine.updater.opened(record.group, kind, write=self._write))
            self._open[key] = (stack, flat, [])
        _, flat, records = self._open[key]
        records.append(record)
        return record.shaped(flat)

    def _close(self, key: tuple[GroupRecord, Kind]) -> None:
        (group, kind), (stack, _, records) = key, self._open.pop(key)
        stack.close()
        if not self._write or kind not in (Kind.P32, group.weight):
            return
        if kind is not group.weight:
            self._engine.residency.rebuild(group, records)
        for record in records:
            record.payload = Payload.VALID
            record.epoch += 1
        group.reading = -1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for key in list(self._open):
            self._close(key)
