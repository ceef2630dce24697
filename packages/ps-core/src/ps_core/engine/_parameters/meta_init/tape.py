"""Record initialisation without carrying it out, and carry it out later, tensor by tensor, with the same numbers.

[Note: the tape]
Initialisers are Python code that fills tensors in place, some of them more than once. Under a `Tape` that code runs on
tensors without memory: on device ``meta``, though it is told ``cpu``. Every operation that would write memory is
recorded instead. The records name memory, not tensors: a view or an ``nn.Parameter`` made of a tensor needs no record.
A small operation that draws no random numbers, and whose tensors no recorded operation wrote, is computed at once.

A `TapePlayer` (in `playback`) then makes one tensor at a time from the records that matter for it. Random numbers come
out as if everything had been done in order. A draw whose result is overwritten later is made and thrown away. So is a
draw that is needed out of order. The generator's state before it is kept, and the draw is repeated on demand. Code that
looks at values while it is on tape gets them replayed. ``trunc_normal_`` looks, to draw again what falls outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ps_core.engine._parameters.meta_init.playback import TapePlayer
from ps_core.engine._parameters.meta_init.tape_entries import TapedCall, TapedCalls, ViewSpec, place_of

SMALL_BYTES = 1 << 16
aten = torch.ops.aten
# Descriptors in C, which the stubs take for plain attributes.
IS_META, DEVICE = (vars(torch._C.TensorBase)[name].__get__ for name in ("is_meta", "device"))
CONTENTS = (torch.Tensor.tolist, torch.Tensor.numpy)
ASKED = (IS_META, DEVICE, *CONTENTS)
LOOKS = (aten._local_scalar_dense.default, aten.equal.default)

EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


class _MetaTensor(TorchFunctionMode):
    """A tensor without memory that tells code it is an ordinary one."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Answer calls that depend on the device."""
        if func in ASKED:
            tensor = args[0]
            with torch._C.DisableTorchFunction():
                unknown = self._tape.is_noted(tensor)
                if func in CONTENTS and unknown:
                    with _disable_current_modes():
                        known = self._tape.replay.value(place_of(tensor))
                    return func(known, *args[1:], **(kwargs or {}))
                if tensor.is_meta and func not in CONTENTS:
                    return False if func == IS_META else torch.device("cpu")
        if kwargs and kwargs.get("out") is not None:
            with torch._C.DisableTorchFunction():  # a default device would be asked of it, though it has one
                return func(*args, **kwargs)
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Record operations that would write memory; see [Note: the tape]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.contents = TapedCalls()
        self.replay = TapePlayer(self.contents)
        self._alive: list[Any] = []
        """Tensors whose memory is recorded: other tensors must not get its address."""
        self._alive_keys: set[int] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all tensor operations in this context on the tape."""
        with torch.no_grad(), torch.device("cpu"), _MetaTensor(self), self:
            yield

    # Any: torch passes whatever the caller did.
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Carry out small operations without random numbers, and record the others."""
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, tuple(args), _on_processor(kwargs or {}))

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        written = _written(func, args, kwargs)
        if func in EMPTY:
            return func(*_without_memory(args), **{**kwargs, "device": "meta"})
        if not written and _is_view(func):
            return func(*args, **kwargs)
        noted = any(self.is_noted(each) for each in tensors)
        if noted and func in LOOKS:
            return func(*tree_map_only(Tensor, self._look, args))
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not random and not noted and (tensors or _size(func, args, kwargs) <= SMALL_BYTES):
            return func(*args, **kwargs)
        return self._note(func, args, kwargs, tensors, written)

    def is_noted(self, tensor: Tensor) -> bool:
        """Return True if the tensor's contents are recorded on the tape, and are computed later."""
        return tensor.is_meta or tensor.untyped_storage()._cdata in self._alive_keys

    def _look(self, tensor: Tensor) -> Tensor:
        return self.replay.value(place_of(tensor)) if self.is_noted(tensor) else tensor

    def _note(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], written: list[Tensor]
    ) -> Any:
        places = {id(each): self._named(each) for each in tensors}
        result: Any = None
        if not written:
            result = func(*_without_memory(args), **_on_meta(func, _without_memory(kwargs)))
        elif func._schema.returns:
            result = written[0] if len(written) == 1 else tuple(written)
        known = {place.memory for place in places.values()}
        made = [self._named(each) for each in tree_leaves(result) if isinstance(each, Tensor)]
        named_args, named_kwargs = tree_map_only(Tensor, lambda each: places[id(each)], (args, kwargs))
        note = TapedCall(
            func,
            named_args,
            named_kwargs,
            reads=known,
            writes=[places[id(each)] for each in written],
            makes=[place for place in made if place.memory not in known],
        )
        self.contents.add(note)
        return result

    def _named(self, tensor: Tensor) -> ViewSpec:
        """Return the tensor as a view of its memory, and remember that memory."""
        place = place_of(tensor)
        if place.memory not in self._alive_keys:
            self._alive_keys.add(place.memory)
            self._alive.append(tensor.untyped_storage())
            if not tensor.is_meta:
                every = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
                self.contents.captured[place.memory] = every.clone()
        return place

    @contextmanager
    def attempt(self) -> Iterator[Callable[[], None]]:
        """Yield a call that removes everything recorded since this context began."""
        mark, position, state = len(self.contents.notes), self.replay.position, torch.default_generator.get_state()

        def undo() -> None:
            self.contents.cut(mark)
            self.replay.rewind(position)
            torch.default_generator.set_state(state)

        yield undo

    def source(self, tensor: Tensor) -> ViewSpec | Tensor:
        """Return the recorded view of a tensor, or the tensor itself if it has memory."""
        return place_of(tensor) if self.is_noted(tensor) else tensor


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes."""
    rows = func._schema.arguments
    pairs: Iterator[tuple[Any, Any]] = zip(rows, args, strict=False)
    named = ((row, kwargs[row.name]) for row in rows if row.name in kwargs)
    return [
        each
        for row, value in (*pairs, *named)
        if row.alias_info is not None and row.alias_info.is_write
        for each in tree_leaves(value)
        if isinstance(each, Tensor)
    ]


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


def _without_memory(values: Any) -> Any:
    def meta(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return tree_map_only(Tensor, meta, values)


def _on_meta(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with ``device="meta"``, to compute shapes only."""
    takes = any(row.name == "device" for row in func._schema.arguments)
    return {**kwargs, "device": torch.device("meta")} if takes else kwargs


def _on_processor(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the CPU in place of ``meta``, which code may have read from another tensor."""
    device = kwargs.get("device")
    return {**kwargs, "device": torch.device("cpu")} if device is not None and device.type == "meta" else {**kwargs}


def _size(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return the bytes of the result of an operation without tensor arguments."""
    result = func(*args, **_on_meta(func, kwargs))
    return sum(each.untyped_storage().nbytes() for each in tree_leaves(result) if isinstance(each, Tensor))
