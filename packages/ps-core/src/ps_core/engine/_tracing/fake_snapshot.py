"""Saves the Python state that a model's code can reach, and restores it after a pass on fake tensors.

[Note: what is saved]
The pass runs on a copy of the model, but its code also reaches objects that no copy has: closures, globals, class
attributes, weak references, and through them perhaps the model itself. From the modules, their classes and their hooks
this walks to what functions refer to by name, and saves dictionaries, lists, sets, deques, attributes, cells and random
generators on the way. Afterwards each has the same entries again, by identity. Not saved: tensors (which `fake_copy`
lets nobody write to), containers of more than `_LARGE` entries, objects of torch and of the standard library, and
objects that are more than `_DEPTH` steps away.
"""

from __future__ import annotations

import copy
import functools
import operator
import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_LARGE = 10_000
_MOST, _DEPTH = 200_000, 9
"""So many objects are visited, and so far from a module: its hooks' variables are six steps away."""
_FOREIGN = {"torch", "numpy", "ps_core", "ps_kernels", "ps_dist", "builtins", *sys.stdlib_module_names} - {"__main__"}
"""Packages whose functions and objects are passed by."""
_ATOMS = (str, bytes, int, float, complex, type(None), torch.Tensor, torch.dtype, torch.device, BuiltinFunctionType)


class CannotRewind(Exception):
    """The model's code can read a generator outside of the model, which cannot be read twice."""


class Snapshot:
    """What code reached from a model may change, as it was; see [Note: what is saved]."""

    def __init__(self, model: nn.Module) -> None:
        self.generators: list[torch.Generator] = []
        """PyTorch's random generators that were found, whose states are saved; they cannot be copied."""
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        """By id: objects that were visited, which are kept for that."""
        self._own = {type(module).__module__.partition(".")[0] for module in model.modules()} - _FOREIGN
        """Packages of the model's own classes; what other code may read is less sure to be read."""
        near = list[Any](model.modules())
        for _ in range(_DEPTH):
            further: list[Any] = []
            for each in near:
                if not isinstance(each, _ATOMS) and id(each) not in self._seen and len(self._seen) < _MOST:
                    self._seen[id(each)] = each
                    further.extend(self._save(each))
            near = further

    def restore(self) -> None:
        """Give everything that was saved its old entries."""
        for undo in self._undo:
            undo()
        self.discard()

    def discard(self) -> None:
        """Forget what was saved: the code has run, as its user sees it."""
        self._undo.clear()
        self._seen.clear()

    def _save(self, each: Any) -> Iterator[Any]:
        """Save one object; yield the objects that it leads to."""
        if isinstance(each, dict | list | set | deque):
            if len(each) <= _LARGE:
                yield from self._container(each)
        elif isinstance(each, tuple | frozenset):
            yield from each if len(each) <= _LARGE else ()
        elif isinstance(each, FunctionType):
            yield from self._function(each)
        elif isinstance(each, MethodType):
            yield from (each.__self__, each.__func__)
        elif isinstance(each, functools.partial):
            yield from (each.func, each.args, each.keywords)
        elif isinstance(each, weakref.ref):
            yield each()
        elif isinstance(each, type):
            yield from self._class(each)
        elif (undo := _generator(each)) is not None:
            self._undo.append(undo)
            self.generators += [each] if isinstance(each, torch.Generator) else []
        elif isinstance(each, nn.Module) or not _is_foreign(type(each)):
            yield from self._attributes(each)

    def _container(self, each: Any) -> Iterator[Any]:
        before = _entries(each)
        self._undo.append(functools.partial(_refill, each, before))
        yield from before

    def _cell(self, cell: CellType, *, own: bool) -> Iterator[Any]:
        try:
            before = cell.cell_contents
        except ValueError:  # nothing is in it yet
            return

        def undo() -> None:
            cell.cell_contents = before

        self._undo.append(undo)
        if own and (during := _read_ahead(before)) is not before:
            cell.cell_contents = during
        yield before

    def _function(self, function: FunctionType) -> Iterator[Any]:
        if _is_foreign(function):
            return
        own = (function.__module__ or "").partition(".")[0] in self._own
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                yield from self._cell(cell, own=own)
        yield from (function.__defaults__, function.__kwdefaults__, vars(function))
        yield from self._names(function.__globals__, set(_names_in(function.__code__)), own=own)

    def _names(self, variables: dict[str, Any], names: set[str], *, own: bool) -> Iterator[Any]:
        """Save the variables of a module that code names, present or not."""
        absent = object()
        before = {name: variables.get(name, absent) for name in names}

        def undo() -> None:
            for name, value in before.items():
                if value is absent:
                    variables.pop(name, None)
                elif variables.get(name, absent) is not value:
                    variables[name] = value

        self._undo.append(undo)
        for name, value in before.items():
            if own and (during := _read_ahead(value)) is not value:
                variables[name] = during
            if isinstance(value, ModuleType):
                if value.__name__.partition(".")[0] not in _FOREIGN:
                    yield from self._names(vars(value), names & vars(value).keys(), own=False)
            else:
                yield value

    def _class(self, kind: type) -> Iterator[Any]:
        if _is_foreign(kind):
            return
        before = {name: value for name, value in vars(kind).items() if not name.startswith("__") or name == "__call__"}

        def undo() -> None:
            now = dict(vars(kind))
            for name in now.keys() - before.keys():
                if not name.startswith("__"):
                    delattr(kind, name)
            for name, value in before.items():
                if now.get(name) is not value:
                    setattr(kind, name, value)

        self._undo.append(undo)
        yield from kind.__mro__[1:]
        for value in before.values():
            yield getattr(value, "__func__", getattr(value, "fget", value))

    def _attributes(self, each: Any) -> Iterator[Any]:
        yield type(each)
        if hasattr(each, "__dict__"):
            yield each.__dict__
        for kind in type(each).__mro__:
            names = vars(kind).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__dict__", "__weakref__") and hasattr(each, name):
                    before = getattr(each, name)
                    self._undo.append(functools.partial(_reset, each, name, before))
                    yield before


def _reset(each: Any, name: str, before: Any) -> None:
    if getattr(each, name, None) is not before:
        setattr(each, name, before)


def _refill(each: Any, before: list[Any]) -> None:
    now = _entries(each)
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    kind = _kind(each)
    kind.clear(each)
    if isinstance(each, dict):
        for key, value in zip(before[::2], before[1::2], strict=True):
            kind.__setitem__(each, key, value)
    else:
        (kind.update if kind is set else kind.extend)(each, before)


def _entries(each: Any) -> list[Any]:
    """Return what a container holds, though its class may show other items; of a dictionary keys and values in turn."""
    if isinstance(each, dict):
        return [entry for pair in dict.items(each) for entry in pair]
    return list(_kind(each).__iter__(each))


def _kind(each: Any) -> Any:
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(each, kind))


def _generator(each: Any) -> Callable[[], None] | None:
    """Return what restores the state of a random generator; None for anything else."""
    if isinstance(each, random.Random):
        return functools.partial(each.setstate, each.getstate())
    if isinstance(each, torch.Generator):
        state = each.get_state()
        return lambda: (each.set_state(state), None)[1]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(each, numpy.random.Generator):
        return functools.partial(setattr, each.bit_generator, "state", each.bit_generator.state)
    if numpy is not None and isinstance(each, numpy.random.RandomState):
        return functools.partial(each.set_state, each.get_state())
    return None


def _is_foreign(each: Any) -> bool:
    return (getattr(each, "__module__", None) or "builtins").partition(".")[0] in _FOREIGN


def _read_ahead(value: Any) -> Any:
    """Return what a pass may read in place of an iterator, which cannot be rewound; the value itself for all else."""
    if isinstance(value, GeneratorType):
        raise CannotRewind("its code can read a generator outside of the model, which would go on by that")
    return copy.copy(value) if type(value).__module__ == "itertools" else value


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
