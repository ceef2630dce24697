"""Save parameters for backward without their memory: autograd keeps a handle that fetches the parameter again.

[Note: whose hooks see what]
PyTorch calls only the innermost pair of saved-tensor hooks. The engine's pair surrounds the root module's forward. So a
checkpoint's own pair, inside, keeps nothing of a block until it is recomputed. What a recomputation then saves are
views of slots, and the reference count of their storage pins these. Where no pair is active, the engine's pair is
active for each single call on a managed parameter. Where another library's pair is active, it sees plain tensors that
alias a slot, and so pins the slot. That pair must not save a managed parameter: its memory could be elsewhere when
backward reads it. So such a parameter goes into the call as an alias. (PyTorch's checkpoints make one themselves, but
not of frozen parameters.) Compiled code is called with the parameters themselves. So a pair around the other one makes
the aliases.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from traceback import walk_tb
from typing import Any, Protocol, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from ps_core.engine._devices.hide_from_modes import hidden_from_modes
from ps_core.engine._memory.chunk import SlotView
from ps_core.engine._parameters.managed_parameter import ManagedParameter
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._support.interrupts import defer_interrupts
from ps_core.engine._support.not_compiled import not_compiled

_STRIDED = torch.strided


HookPair: TypeAlias = tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]
"""A function that packs a saved tensor, and one that unpacks what the first returned, whatever it is."""

active_pair: Callable[[bool], HookPair | None] = torch._C._autograd._top_saved_tensors_default_hooks
"""Return the innermost pair of saved-tensor hooks; ``True``: also one that PyTorch ignores now, as while tracing."""


CHECKPOINT = checkpoint.__name__
"""The module of the hooks of PyTorch's checkpointing."""


def close_checkpoints(error: BaseException) -> None:
    """Take away the hooks of checkpoints that an exception left; before 2.13 PyTorch did so once it was freed."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    for frame in reversed(frames):  # the innermost first
        if frame.f_code.co_name == "checkpoint" and frame.f_globals.get("__name__") == CHECKPOINT:
            running = frame.f_locals.get("gen")
            if isinstance(running, Generator):
                running.close()


class Fetcher(Protocol):
    """Protocol of the engine, as unpacking uses it."""

    def fetch(self, record: ParamState) -> SlotView:
        """Return the record's view on the compute tier, fetching its group if need be."""

    def check_placeholder(self, storage: torch.UntypedStorage) -> None:
        """Raise if a storage is a placeholder of a parameter that is on another tier."""


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
"""What autograd saves. Other tensors are saved as ``(detached tensor, version)``.

An operator that saved its own output would form a cycle with ``grad_fn``, and leak if backward never runs.
"""


class SavedTensors:
    """The pair of saved-tensor hooks of one engine."""

    def __init__(
        self, fetcher: Fetcher, owners: Mapping[int, ParamState], count: Callable[[torch.Tensor], None]
    ) -> None:
        """Make the pair of hooks; ``count`` adds a tensor to the non-model bytes."""
        self._fetcher, self._count = fetcher, count
        self._owners = owners
        """The record whose parameter is bound to a storage, by the storage's address."""
        self._pushed: list[saved_tensors_hooks] = []
        self._counts = False
        """True if the bytes of every saved tensor that is not a parameter are counted."""

    def count_kept(self, *, on: bool) -> None:
        """Count every tensor that is saved as it is, or stop: nothing else counts tensors that compiled code makes."""
        self._counts = on

    @property
    def depth(self) -> int:
        """Return the number of the engine's pairs on the stack."""
        return len(self._pushed)

    @defer_interrupts
    def push(self) -> None:
        """Push the engine's pair of hooks, unless another pair is active."""
        if active_pair(True) is None:
            context = saved_tensors_hooks(self.pack, self.unpack)
            context.__enter__()
            self._pushed.append(context)

    @defer_interrupts
    def push_for_compiled(self) -> None:
        """Push a pair for compiled code: the engine's, or one that gives another pair aliases of parameters."""
        other = active_pair(True)
        if other is None or other[0] == self.pack:
            self.push()
            return
        pack, unpack = other

        @not_compiled
        def pack_alias(tensor: torch.Tensor) -> object:
            return pack(tensor.detach() if isinstance(tensor, torch.nn.Parameter) else tensor)

        context = saved_tensors_hooks(pack_alias, unpack)
        context.__enter__()
        self._pushed.append(context)

    @defer_interrupts
    def pop_to(self, depth: int) -> None:
        """Pop the engine's pairs until ``depth`` of them are left."""
        while len(self._pushed) > depth:
            self._pushed.pop().__exit__(None, None, None)

    @not_compiled
    def pack(self, tensor: torch.Tensor) -> Packed:
        """Return what autograd saves of a tensor for backward: a reference to a parameter, or the tensor and its
        version.
        """
        if tensor.is_meta:
            return tensor
        if type(tensor) is ManagedParameter:  # a `Function` of the user's may save a parameter itself
            saved = tensor._record
            if saved.bound and self._owners.get(saved.bound.storage._cdata) is saved:
                return SavedParameterRef(saved, tensor)
        if tensor.layout is not _STRIDED:
            return tensor.detach(), tensor._version
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

    @not_compiled
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
    """Return the error, in PyTorch's words, for a parameter that was stepped after it was saved."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{record.name!r} was saved for backward before step {record.update_count}, which changed it"
    )


def in_checkpoint() -> bool:
    """Return True if the active pair of saved-tensor hooks is that of PyTorch's checkpointing."""
    pair = active_pair(True)
    return pair is not None and getattr(pair[0], "__module__", "") == CHECKPOINT


def recomputing() -> bool:
    """Return True while non-reentrant checkpointing repeats a forward, within its backward pass."""
    pair = active_pair(True)
    return pair is not None and getattr(pair[0], "__qualname__", "").startswith("_recomputation_hook")


@hidden_from_modes
def free_broken_backward() -> None:
    """Free what PyTorch keeps of a backward pass of this thread that raised an exception.

    The thread's queue of nodes keeps the rest of the graph, with its activations, until the next backward pass begins.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.autograd.backward(torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True))
