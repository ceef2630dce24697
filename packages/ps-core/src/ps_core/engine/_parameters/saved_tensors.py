"""Save parameters for backward without their memory: autograd keeps a handle that fetches the parameter again.

[Note: whose hooks see what]
PyTorch asks only the innermost pair of saved-tensor hooks. Ours surround the root module's forward. So a checkpoint's
own pair, inside, keeps nothing of a block until it is recomputed. What a recomputation then saves are views of slots,
and the use count of their storage pins these. A function called on a managed parameter where no pair is active at all
gets ours around that one call. Where another library's pair is active, it sees plain tensors that alias a slot, and so
pins the slot. A parameter that the pair would be given itself would be elsewhere by the time backward reads it. So it
goes into the call as such an alias. (PyTorch's checkpoints make one themselves, but not of frozen ones.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from ps_core.engine._memory.chunk import SlotView
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._support.interrupts import defer_interrupts

_STRIDED = torch.strided


class AliasPolicy(Enum):
    """Parameters that are given to a call as aliases of their memory."""

    NONE = ""
    FROZEN = "frozen"
    ALL = "all"

    def __bool__(self) -> bool:
        return self is not AliasPolicy.NONE


class Fetcher(Protocol):
    """The engine, as unpacking sees it."""

    def fetch(self, record: ParamState) -> SlotView:
        """Return the record's view on the compute tier, fetching its group if need be."""

    def check_placeholder(self, storage: torch.UntypedStorage) -> None:
        """Raise if a storage is what a parameter has while it is elsewhere."""


class SavedParameterRef:
    """A saved view of a parameter, without its memory."""

    __slots__ = ("_held", "offset", "record", "shape", "stride", "update_count")

    def __init__(self, record: ParamState, view: torch.Tensor) -> None:
        self.record = record
        self.update_count = record.update_count
        self.shape = view.shape
        self.stride = view.stride()
        self.offset = view.storage_offset()
        self._held = record.saved_token


Packed: TypeAlias = torch.Tensor | SavedParameterRef | tuple[torch.Tensor, int]
"""Other tensors are kept as ``(detached tensor, version)``. An operator that saved its own output would form a cycle
with ``grad_fn``, and leak if backward never runs.
"""


class SavedTensors:
    """The pair of hooks of one engine."""

    def __init__(
        self, fetcher: Fetcher, owners: Mapping[int, ParamState], count: Callable[[torch.Tensor], None]
    ) -> None:
        """``count``: add a tensor to the non-model bytes."""
        self._fetcher, self._count = fetcher, count
        self._owners = owners
        """The record whose parameter is bound to a storage, by the storage's address."""
        self._pushed: list[saved_tensors_hooks] = []
        self._counts = False
        """True if the bytes of every saved tensor that is not a parameter are counted."""

    def count_kept(self, *, on: bool) -> None:
        """Count every tensor that is kept as it is, or stop: compiled code makes tensors that nothing else counts."""
        self._counts = on

    @property
    def depth(self) -> int:
        """The number of our pairs on the stack."""
        return len(self._pushed)

    @property
    def innermost(self) -> bool:
        """True if the engine's pair of hooks is the innermost one, which autograd calls."""
        pair = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return pair is not None and bool(pair[0] == self.pack)

    @defer_interrupts
    def push(self) -> None:
        """Make ours the innermost pair, unless another is active."""
        if not active():
            context = saved_tensors_hooks(self.pack, self.unpack)
            context.__enter__()
            self._pushed.append(context)

    def kept_by_others(self) -> AliasPolicy:
        """Return which parameters another active pair of saved-tensor hooks would keep alive if it saved them now."""
        pair = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if pair is None or pair[0] == self.pack:
            return AliasPolicy.NONE
        return AliasPolicy.FROZEN if getattr(pair[0], "__module__", "") == checkpoint.__name__ else AliasPolicy.ALL

    @defer_interrupts
    def pop_to(self, depth: int) -> None:
        """Undo every `push` since there were so many."""
        while len(self._pushed) > depth:
            self._pushed.pop().__exit__(None, None, None)

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Return what autograd keeps of a tensor for backward: a reference to a parameter, or tensor and version."""
        if tensor.is_meta or tensor.layout is not _STRIDED:
            return tensor
        storage = tensor.untyped_storage()
        record = self._owners.get(storage._cdata)
        if record is None:
            if storage.nbytes() < tensor.nbytes and 0 in tensor.stride():
                self._fetcher.check_placeholder(storage)
        elif record.dtype is tensor.dtype:
            return SavedParameterRef(record, tensor)
        if self._counts:
            self._count(tensor)
        return tensor.detach(), tensor._version

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the tensor that `pack` was given."""
        if isinstance(packed, tuple):
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tensor.dtype} {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}"
                )
            return tensor
        if not isinstance(packed, SavedParameterRef):
            return packed
        record = packed.record
        if packed.update_count != record.update_count:
            raise _was_stepped(record)
        bound = self._fetcher.fetch(record)
        if packed.update_count != record.update_count:  # a plan may step a group while it goes on to the next moment
            raise _was_stepped(record)
        return bound.view.as_strided(packed.shape, packed.stride, packed.offset)


def _was_stepped(record: ParamState) -> RuntimeError:
    """Return the error of a parameter that was stepped since it was saved, in PyTorch's words."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{record.name!r} was saved for backward before step {record.update_count}, which changed it"
    )


def active() -> bool:
    """Return True if any pair of saved-tensor hooks is active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def recomputing() -> bool:
    """Return True while non-reentrant checkpointing repeats a forward, within the backward pass that it is for."""
    pair = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return pair is not None and getattr(pair[0], "__qualname__", "").startswith("_recomputation_hook")
