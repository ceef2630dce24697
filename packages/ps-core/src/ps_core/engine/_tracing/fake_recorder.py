"""Record the moments of a pass on fake tensors.

[Note: moments of a fake pass]
They are the engine's (`_tracing.pass_recording`), with *units* in place of groups. Each parameter belongs to a unit: by
default, the module that owns it. A moment begins when a parameter of a unit is used that the present moment was not
begun for. A function that is called on it uses it; so does a backward node that saved it. A gradient also begins a
moment, if its unit neither began the present moment nor got a gradient in it. A parameter with live aliases (a
checkpoint's recomputed block) is read by the next moment, too. It is held from the one to the other. What comes before
the first moment belongs to it. The loss lies between forward's last touch and backward's first, and belongs to forward.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ps_core._trace import Amounts, Moment, Phase
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker
from ps_core.engine._parameters.function_kinds import DEL_GRAD, GET_GRAD, PLAIN, SET_GRAD, STRIDED
from ps_core.engine._support.interrupts import interrupt_waits
from ps_core.engine._tracing.activation_log import ActivationLog, TracedActivations
from ps_core.engine._tracing.op_costs import amounts_of

_aten = torch.ops.aten
_UNKNOWN_SIZES = (_aten.mkldnn_rnn_layer, _aten._cudnn_rnn, _aten.miopen_rnn)
"""Operators whose fakes report zero saved bytes for backward: the peak would be several times too low."""
_NO_TOUCH = PLAIN | STRIDED | {GET_GRAD, SET_GRAD, DEL_GRAD}
"""Functions that the engine, too, answers without the parameter's memory."""


@dataclass(slots=True)
class _FakeMoment:
    """One moment of a fake pass."""

    backward: bool
    name: str
    reads: frozenset[int]
    """Units that began the moment."""
    held: frozenset[int]
    """Parameters that had live aliases when the moment began."""
    grad_groups: set[int] = field(default_factory=set)
    """Units for which gradients arrived."""
    touched: dict[int, None] = field(default_factory=dict)
    """Parameters in order of use."""
    grads: dict[int, None] = field(default_factory=dict)
    nonmodel_bytes: int = 0
    amounts: Amounts = Amounts()  # noqa: RUF009 - it cannot be changed


@dataclass(frozen=True, slots=True)
class _Handle:
    """A view of a parameter that autograd saves, and that does not count as an alias."""

    index: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Saved:
    """A tensor that autograd saves, which is cleared after a pass that broke off."""

    tensor: torch.Tensor | None


class FakePassRecorder(TensorBytesTracker):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """Count the bytes and operations of a fake pass, moment by moment."""

    def __init__(
        self, named: Mapping[str, torch.Tensor], unit_of: Callable[[str], int] | None, timeout_s: float
    ) -> None:
        super().__init__("cpu")
        self._timeout_s, self._end_s = timeout_s, time.monotonic() + timeout_s
        self._names = list(named)
        self._parameters = list(named.values())
        self._indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        by_module = {module: unit for unit, module in enumerate(dict.fromkeys(map(_owner, named)))}
        unit_of = unit_of or (lambda name: by_module[_owner(name)])
        self._units = [unit_of(name) for name in named]
        self._storages = [parameter.untyped_storage() for parameter in self._parameters]
        self._owners = {storage._cdata: index for index, storage in enumerate(self._storages)}
        self._uses = [torch._C._storage_Use_Count(storage._cdata) for storage in self._storages]
        self._saved: list[weakref.ref[_Saved]] = []
        self._moments: list[_FakeMoment] = []
        self._activations = ActivationLog()
        self._before = _FakeMoment(False, "", frozenset(), frozenset())
        """The moment that holds everything before the first real one."""
        each: Any  # no longer what its type says
        for each in self._parameters:
            each.__class__ = FakeParameter
            each._recorder = self

    # Moments.

    def touch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that something reads these parameters."""
        read = dict.fromkeys(self._indices[id(parameter)] for parameter in parameters)
        units = frozenset(self._units[index] for index in read)
        moment = self._moments[-1] if self._moments else None
        if moment is None or moment.backward is not _in_backward() or not units <= moment.reads:
            moment = self._begin(next(iter(read)), units)
        moment.touched.update(read)

    def arrive(self, parameter: torch.Tensor) -> None:
        """Note a gradient, and drop it at once, as the engine does."""
        index = self._indices[id(parameter)]
        unit = self._units[index]
        moment = self._moments[-1] if self._moments else None
        if moment is None or not moment.backward or unit not in moment.reads | moment.grad_groups:
            moment = self._begin(index, frozenset())
        moment.grad_groups.add(unit)
        moment.grads[index] = None
        parameter.grad = None

    def _begin(self, first: int, reads: frozenset[int]) -> _FakeMoment:
        held = self.close()
        backward = _in_backward()
        name = f"{'backward' if backward else 'forward'} of {_owner(self._names[first]) or self._names[first]}"
        moment = _FakeMoment(backward, name, reads, held)
        if not self._moments:
            moment.amounts = self._before.amounts
        self._moments.append(moment)
        return moment

    def close(self) -> frozenset[int]:
        """End the moment; return the ids of its parameters that have live aliases."""
        if not self._moments:
            return frozenset()
        moment = self._moments[-1]
        moment.nonmodel_bytes = self.take_peak()
        counts = (torch._C._storage_Use_Count(storage._cdata) for storage in self._storages)
        aliased = (index for index, (count, uses) in enumerate(zip(counts, self._uses, strict=True)) if count > uses)
        units = moment.reads | {self._units[index] for index in moment.held}
        return frozenset(index for index in aliased if self._units[index] in units)

    def release(self) -> list[weakref.ref[torch.UntypedStorage]]:
        """Release all tensors, and return the storages that were counted; do not use this object afterwards.

        An operator that saves its own result forms a cycle with it, which no garbage collector sees until backward
        runs.
        """
        for saved in self._saved:
            if (holder := saved()) is not None:
                holder.tensor = None
        counted = [storage for life in list(self._lives.values()) if (storage := life()) is not None]
        for parameter in self._parameters:
            del parameter._recorder  # type: ignore[attr-defined]
        found = [weakref.ref(storage) for storage in (*counted, *self._storages)]
        vars(self).clear()
        return found

    def make_activation(self, size_bytes: int) -> str:
        """Note an offloaded activation; return its name, which is empty for one that backward makes."""
        if _in_backward():
            return ""
        return self._activations.make(size_bytes, max(0, len(self._moments) - 1))

    def take_activation(self, name: str) -> None:
        """Note that an activation is copied back."""
        if name:
            self._activations.note_taken(name, len(self._moments) - 1)

    def moved_activations(self) -> TracedActivations:
        """Return the activations that a plan of the pass moves."""
        return self._activations.in_trace([moment.backward for moment in self._moments])

    def moments(self) -> tuple[Moment, ...]:
        """Return the moments recorded."""
        found: list[Moment] = []
        _, makes, takes = self.moved_activations()
        for number, moment in enumerate(self._moments):
            before = found[-1].reads if found else ()
            found.append(
                Moment(
                    name=moment.name,
                    phase=Phase.BACKWARD if moment.backward else Phase.FORWARD,
                    reads=tuple(self._reads(moment)),
                    grads=tuple(moment.grads),
                    makes=makes[number],
                    takes=takes[number],
                    holds=tuple(sorted(moment.held.intersection(before))),
                    nonmodel_bytes=moment.nonmodel_bytes,
                    **moment.amounts._asdict(),
                )
            )
        return tuple(found)

    def _reads(self, moment: _FakeMoment) -> dict[int, None]:
        """Return the parameters that a moment touched or held, and one parameter of each other unit that began it."""
        reads = dict.fromkeys((*moment.touched, *sorted(moment.held)))
        kept = moment.reads - {self._units[index] for index in reads}
        reads.update(dict.fromkeys(self._units.index(unit) for unit in sorted(kept)))
        return reads

    # What autograd saves.

    def pack(self, tensor: torch.Tensor) -> _Saved | _Handle:
        """Save a handle in place of a parameter's alias, as the engine does."""
        with torch._C.DisableTorchFunction():  # a `Function` of the user's may save a parameter itself: no touch
            index = self._owners.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if index is None or tensor.dtype is not self._parameters[index].dtype:
            saved = _Saved(tensor)
            self._saved.append(weakref.ref(saved))
            return saved
        return _Handle(index, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: _Saved | _Handle) -> torch.Tensor:
        """Return what a backward node saved, before any of its operators runs."""
        if isinstance(packed, _Saved):
            assert packed.tensor is not None, "the pass is on"
            return packed.tensor
        parameter = self._parameters[packed.index]
        self.touch((parameter,))
        return parameter.detach().as_strided(packed.shape, packed.stride, packed.offset)

    # Operators.

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator; note the tensors that it made and its cost."""
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        if packet in _UNKNOWN_SIZES and torch.is_grad_enabled():
            raise RuntimeError(f"what {packet} keeps for backward has no size in a fake pass")
        with torch._C.DisableTorchFunctionSubclass():  # what torch's own C++ does to a parameter is no touch
            result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self._check(func, result)
            moment = self._moments[-1] if self._moments else self._before
            moment.amounts = moment.amounts.plus(amounts_of(func, args, kwargs, result))
        return result

    def _check(self, func: Any, result: Any) -> None:
        """Raise if the pass has to end. Not within a question or a view: C++ calls such where it cannot raise."""
        made = [each for each in tree_leaves(result) if isinstance(each, FakeTensor)]
        if not made or getattr(func, "is_view", False):
            return
        for each in made:
            if not _has_device(each.fake_device.type):
                raise RuntimeError(f"a tensor is made on {each.fake_device}, and this computer has no such device")
        if interrupt_waits():
            raise RuntimeError("an interrupt came (Ctrl-C)")
        if time.monotonic() > self._end_s:
            raise TimeoutError(f"a pass on fake tensors was not done after {self._timeout_s:g} s")

    def _sees_fakes(self) -> bool:
        return True

    def _restored_later(self) -> bool:
        return False  # the pass leaves what it entered; the rest is other threads'

    def _counts(self, tensor: torch.Tensor) -> bool:
        return type(tensor) is FakeTensor and tensor.fake_device.type == self.device and tensor.layout is torch.strided


class FakeParameter(FakeTensor):
    """A fake parameter that tells a recorder of every function that uses it, also during recomputation in backward."""

    _recorder: FakePassRecorder
    _on_host: bool = False
    """True if the parameter is a table that stays on the host: lookups return rows without a fetch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the parameters that a function is given, then call it."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _NO_TOUCH:
                found = [value for value in tree_leaves((args, kwargs)) if isinstance(value, FakeParameter)]
                if found:
                    found[0]._recorder.touch(found)
                    if _in_backward():
                        args, kwargs = tree_map_only(FakeParameter, _as_given, (args, kwargs))
            return func(*args, **kwargs)


def _as_given(parameter: FakeParameter) -> torch.Tensor:
    """Return a frozen parameter as a tensor of its own, as the engine gives it to functions.

    A recomputed block keeps what is frozen as it is, and so an alias of the parameter.
    """
    return parameter if parameter.requires_grad else parameter.detach()


@cache
def _has_device(kind: str) -> bool:
    """Return True if this computer has devices of a type; without one, autograd would end the process."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return kind in ("cpu", "meta") or (accelerator is not None and accelerator.type == kind)


def _owner(name: str) -> str:
    """Return the name of the module that a parameter belongs to."""
    return name.rpartition(".")[0]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
