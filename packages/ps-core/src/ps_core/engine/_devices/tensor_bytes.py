"""Count non-model bytes on the CPU: tensors besides the engine's own, now and at the peak.

A `TorchDispatchMode` sees every operator's outputs. An output whose storage no argument shares is new. Its bytes count
until the C++ storage is freed. A Python tensor, the autograd graph or a cache may hold it.

[Note: the mode lies at the bottom of the stack]
Autograd runs backward under the modes of the `backward()` call. So this mode is pushed before the forward pass, and
stays through the user's code in between. A mode of PyTorch leaves by popping the top of the stack, whichever mode that
is. On top, this mode would be popped in place of a user's mode, and the user's would never be removed. So it is
inserted below all of the user's modes, where no properly nested mode can pop it. It is removed from there. It then also
sees the operators that really run, behind all modes above it.

[Note: what no dispatch mode sees]
Some memory is not seen. Scratch memory within one operator's kernel, and what compiled code allocates inside itself.
Storages that `untyped_storage().resize_()` changed, until the tensor is next an output. Tensors that arrive by
`from_numpy` or DLPack (`count` adds one by hand). In `inference_mode`, what a composite operator makes
inside itself.

[Note: composite operators]
PyTorch defines some operators by others (`linear`, `lstm`). A mode gets these others, but in `inference_mode` it gets
the composite operator itself. While a mode's own code runs, PyTorch turns off autocast, and what notes that a
transposed weight requires a gradient. Within `linear` this decides how some shapes are multiplied, and so how they are
rounded. So this mode turns both on again for composite operators.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from threading import RLock, local
from typing import Any

import torch
from torch._C import _TorchDispatchModeKey
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ps_core.engine._support.interrupts import callback
from ps_core.engine._support.not_compiled import not_compiled

_INFRASTRUCTURE = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL, _TorchDispatchModeKey.PROXY)
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
_lift_fresh = torch.ops.aten.lift_fresh.default
_in_inference_mode = torch.is_inference_mode_enabled
_Key = torch._C.DispatchKey
_as_called = torch._C._RestorePythonTLSSnapshot  # type: ignore[attr-defined]  # torch.overrides uses it, its stubs lack it
_OFF_IN_MODES = (_Key.ADInplaceOrView, _Key.Conjugate, _Key.Negative, _Key.ZeroTensor)
"""Dispatch keys that PyTorch excludes while a mode's code runs; see [Note: composite operators]."""


class _TrackedStorage(weakref.ref[torch.UntypedStorage]):
    """One counted storage. PyTorch keeps its Python object alive as long as the C++ storage."""

    __slots__ = ("bytes", "key")
    bytes: int
    key: int


class _Pause(local):
    """Stop the counting on this thread while it holds its lock, once or several times.

    A lock is released in C, so no interrupt (Ctrl-C) comes between the end of the block and the release.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.entered: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]  # `Condition` uses it too


_PAUSE = _Pause()
"""One for all trackers: what one model's engine makes is no other model's activation."""


class TensorBytesTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """Count the bytes of tensor storages that are made on one device type while counting is on.

    Storages made before `start` or within `paused()` are not counted, nor are their views. Freed storages are noticed
    at any time, also after `stop`.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's own wrapper imports dynamo (seconds, much memory); `not_compiled` does its work

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else a compiled submodule would run uncompiled while it is being recorded

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.current_bytes = 0
        self._peak_bytes = 0
        self._counting = False
        self._guards_before = 0
        self._lives: dict[int, _TrackedStorage] = {}
        self._died_callback: Callable[[Any], None] = self._died

    # ---- on and off

    def start(self) -> None:
        """Start, or start again, to count. Do nothing under a fake-tensor, functionalising or tracing mode."""
        if not self._sees_fakes() and any(torch._C._get_dispatch_mode(key) is not None for key in _INFRASTRUCTURE):
            return
        self._counting = True
        if self._is_on_stack():
            if _sees_operators():
                return
            _take_out(self)  # an inference_mode ended that was on when it began
        self._guards_before = _restoring_contexts()
        _put_at_bottom(self)

    def stop(self) -> bool:
        """Stop counting; a second call does nothing. Return True if this took the mode off the stack.

        The mode may stay on the stack, without counting, until `start` or `stop` is next called. That happens in three
        cases:

        - the caller is on another thread than `start` was;
        - a backward pass runs, whose end restores the stack of its beginning;
        - an `inference_mode` or a compiled function was entered since `start`: its end makes operators look for the
          earlier mode.
        """
        self._counting = False
        found = self._is_on_stack() and not self._restored_later()
        if found:
            _take_out(self)
        return found

    def _sees_fakes(self) -> bool:
        return False

    def _restored_later(self) -> bool:
        """Return True if what restores the stack as it ends was entered since `start`, maybe on another thread."""
        return _sees_operators() and _restoring_contexts() > self._guards_before

    def _is_on_stack(self) -> bool:
        with _NoCollection():
            return any(mode is self for mode in _get_current_dispatch_mode_stack())

    def paused(self) -> AbstractContextManager[object]:
        """Return a context within which no tracker counts on this thread: for tensors that an engine makes itself."""
        return _PAUSE.lock

    # ---- what counts

    def take_peak(self) -> int:
        """Return the most bytes alive at once since the last call, and start anew."""
        peak, self._peak_bytes = self._peak_bytes, self.current_bytes
        return peak

    def count(self, tensor: torch.Tensor) -> None:
        """Count this tensor's storage although no operator was seen to make it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._lives:
            self._born(storage)

    def forget(self, tensor: torch.Tensor) -> None:
        """Stop counting this tensor's storage."""
        if self._counts(tensor):
            life = self._lives.get(tensor.untyped_storage()._cdata)
            if life is not None:
                self._died(life)

    def _born(self, storage: torch.UntypedStorage) -> None:
        life = _TrackedStorage(storage, self._died_callback)
        life.key = storage._cdata
        life.bytes = storage.nbytes()
        self._lives[life.key] = life
        self._rise(life.bytes)

    def _rise(self, bytes: int) -> None:
        self.current_bytes += bytes
        self._peak_bytes = max(self._peak_bytes, self.current_bytes)

    @callback
    @not_compiled
    def _died(self, life: _TrackedStorage) -> None:
        if self._lives.get(life.key) is life:
            del self._lives[life.key]
            self.current_bytes -= life.bytes

    # ---- operators

    @not_compiled
    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and count the new storages among its outputs."""
        for kind in types:
            if not self._is_transparent(kind):
                return NotImplemented  # a wrapper subclass: its own dispatch runs operators on what it wraps
        if _in_inference_mode() and _is_composite(func):
            with _as_without_modes(func):
                result = func(*args, **(kwargs or {}))
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        if self._counting and not _PAUSE.entered():
            self._look(func, result, args, kwargs)
        return result

    def _is_transparent(self, kind: Any) -> bool:
        """Return True for classes without a dispatch of their own: plain (and sparse) tensors, and fake ones."""
        return kind.__torch_dispatch__ is _PLAIN_DISPATCH or issubclass(kind, FakeTensor)

    def _look(self, func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if isinstance(result, torch.Tensor):
            self._look_at(func, result, args, kwargs)
        elif isinstance(result, list | tuple):
            for one in result:
                self._look(func, one, args, kwargs)

    def _look_at(self, func: Any, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if tensor.layout is torch.sparse_coo:
            for part in (tensor._indices(), tensor._values()):
                self._look_at(func, part, args, kwargs)
            return
        if not self._counts(tensor):
            return
        storage = tensor.untyped_storage()
        life = self._lives.get(storage._cdata)
        if life is not None:
            grown = storage.nbytes() - life.bytes  # resize_, or an out= that was too small
            if grown:
                life.bytes += grown
                self._rise(grown)
        elif func is _lift_fresh or not _shared(storage._cdata, args, kwargs):
            self._born(storage)

    def _counts(self, tensor: torch.Tensor) -> bool:
        kind = type(tensor)
        if kind is not torch.Tensor and kind.__torch_dispatch__ is not _PLAIN_DISPATCH:
            return False  # a wrapper: what it wraps was seen when it was made
        return tensor.device.type == self.device and tensor.layout is torch.strided


def _shared(key: int, args: Iterable[Any], kwargs: dict[str, Any] | None) -> bool:
    """Return True if an argument uses this storage; the operator then did not allocate it."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if arg.layout is torch.strided and arg.untyped_storage()._cdata == key:
                return True
        elif isinstance(arg, list | tuple) and _shared(key, arg, None):
            return True
    return kwargs is not None and _shared(key, kwargs.values(), None)


@cache
def _is_composite(func: Any) -> bool:
    """Return True for an operator that PyTorch defines by others, unless PyTorch notes its views before modes."""
    return (
        isinstance(func, torch._ops.OpOverload) and func._can_decompose() and not _has_kernel(func, "ADInplaceOrView")
    )


def _has_kernel(func: torch._ops.OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)  # type: ignore[no-untyped-call]


def _as_without_modes(func: torch._ops.OpOverload) -> AbstractContextManager[object]:
    """Return a context in which an operator runs as without modes; see [Note: composite operators]."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _OFF_IN_MODES:
        excluded = excluded.remove(key)
    with _as_called():
        autocast = torch.is_autocast_enabled("cpu")
    if autocast and not _has_kernel(func, "AutocastCPU"):  # else its arguments were cast already
        excluded = excluded.remove(_Key.AutocastCPU)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _sees_operators() -> bool:
    """Return True if operators look for modes on this thread's stack; an `inference_mode` restores that as it ends."""
    return torch._C._dispatch_tls_is_dispatch_key_included("Python")


def _restoring_contexts() -> int:
    """Return a number that grows with each `inference_mode` or compiled function entered, until it is left.

    Each of them has a guard that refers to its class; PyTorch itself tells no more than what is on now.
    """
    return sys.getrefcount(torch._C._InferenceMode) + sys.getrefcount(torch._C._ForceDispatchKeyGuard)


def _put_at_bottom(mode: TorchDispatchMode) -> None:
    """Push the mode below all others; see [Note: the mode lies at the bottom of the stack]."""
    replace_modes(lambda modes: [mode, *modes])


def _take_out(mode: TorchDispatchMode) -> None:
    replace_modes(lambda modes: [other for other in modes if other is not mode])


def pop_user_modes() -> list[TorchDispatchMode]:
    """Empty this thread's stack of the modes that are not PyTorch's own; return them, bottom first."""
    return replace_modes(lambda _: [])


def replace_modes(choose: Callable[[list[TorchDispatchMode]], list[TorchDispatchMode]]) -> list[TorchDispatchMode]:
    """Replace this thread's modes by those that ``choose`` returns for them; return the modes before, bottom first.

    PyTorch's own modes are kept elsewhere, and stay.
    """
    with _NoCollection():
        before = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]
        for _ in before:
            torch._C._pop_torch_dispatch_stack(None)
        push_modes(choose(before))
        return before


class _NoCollection:
    """Collect no garbage in this block: that may free an engine, whose mode is then taken off the stack."""

    def __enter__(self) -> None:
        self._before = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._before:
            gc.enable()


def push_modes(modes: Iterable[TorchDispatchMode]) -> None:
    """Push dispatch modes; the last of them is then the first to see an operator."""
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)
