"""Save the Python state that a model's code can reach, and restore it after a pass on fake tensors.

[Note: what is saved]
The pass runs on a copy of the model. Its code also reaches objects that no copy has: closures, globals, class
attributes, weak references. Through these it may reach the model itself. `Snapshot` walks from the modules, their
classes and their hooks to what functions refer to by name. On the way it saves dictionaries, lists, sets, deques,
attributes, cells and random generators. Afterwards each has the same entries again, by identity. An iterator in a
variable that the model's own code names cannot be rewound: the pass reads a copy. Not saved are

- tensors, which `fake_copy` protects from writes,
- containers of more than `_LARGE` entries, and iterators in containers,
- objects of PyTorch and of the standard library,
- objects that are more than `_DEPTH` steps away.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_LARGE = 10_000
_MOST, _DEPTH = 200_000, 9
"""The most objects that are visited, and their distance from a module: its hooks' variables are six steps away."""
_FOREIGN = {"torch", "numpy", "ps_core", "ps_kernels", "ps_dist", "builtins", *sys.stdlib_module_names} - {"__main__"}
"""Packages whose functions and objects are skipped."""
_ABSENT = object()
_CONTAINERS = (dict, list, set, deque)
_ITERATORS = ("builtins", "itertools", "_collections")
"""Modules of Python's iterators and generators."""
_CONTENTS: Any = CellType.cell_contents
_ATOMS = (str, bytes, int, float, complex, type(None), torch.Tensor, torch.dtype, torch.device, BuiltinFunctionType)


class CannotRewind(Exception):
    """Say that the model's code can read a generator outside of the model, which cannot be read twice."""


class Snapshot:
    """Save objects that a model's code can reach and change; see [Note: what is saved]."""

    def __init__(self, model: nn.Module) -> None:
        self.generators: list[torch.Generator] = []
        """PyTorch's random generators that were found, whose states are saved; they cannot be copied."""
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        """Visited objects by id; they are kept so that no other object gets their id."""
        self._variables: dict[tuple[int, bool], _Variables] = {}
        """Variables by the id of a module's dictionary, and whether the model's own code reads them."""
        self._own = {type(module).__module__.partition(".")[0] for module in model.modules()} - _FOREIGN
        """Packages of the model's own classes; other packages' code may not run at all."""
        try:
            self._walk(model.modules())
        except BaseException:
            self.restore()  # iterators, which copies have replaced already
            raise

    def restore(self) -> None:
        """Restore the saved entries of every object, the last saved first: an object may have been saved with a
        copy.
        """
        try:
            while self._undo:
                self._undo.pop()()
        finally:
            if self._undo:
                self.restore()  # go on with the others if one raised
            self.discard()

    def discard(self) -> None:
        """Forget what was saved: the code has run for its user."""
        self._undo.clear()
        self._seen.clear()
        self._variables.clear()

    def _walk(self, near: Iterable[Any]) -> None:
        seen = self._seen
        for _ in range(_DEPTH):
            further: list[Any] = []
            for each in near:
                if id(each) not in seen and not isinstance(each, _ATOMS) and len(seen) < _MOST:
                    seen[id(each)] = each
                    further.extend(self._save(each))
            near = further

    def _save(self, each: Any) -> Iterable[Any]:
        """Save one object; return the objects that it refers to."""
        if isinstance(each, _CONTAINERS):
            return self._container(each) if len(each) <= _LARGE else ()
        if isinstance(each, tuple | frozenset):
            return tuple(each) if len(each) <= _LARGE else ()
        if isinstance(each, FunctionType):
            return self._function(each)
        if isinstance(each, MethodType):
            return each.__self__, each.__func__
        if isinstance(each, functools.partial):
            return each.func, each.args, each.keywords
        if isinstance(each, weakref.ref):
            return (each(),)
        if isinstance(each, type):
            return self._class(each)
        if (undo := _generator(each)) is not None:
            self._undo.append(undo)
            self.generators += [each] if isinstance(each, torch.Generator) else []
        elif isinstance(each, nn.Module) or not _is_foreign(type(each)):
            return self._attributes(each)
        return ()

    def _container(self, each: Any) -> list[Any]:
        before = _entries(each)
        self._undo.append(functools.partial(_refill, each, before))
        return before

    def _cell(self, cell: CellType, *, own: bool) -> Any:
        """Save a variable of a closure; return its value."""
        before = _value(_CONTENTS, cell)
        self._undo.append(functools.partial(_reset, _CONTENTS, cell, before))
        if own and (during := _read_ahead(before)) is not before:
            cell.cell_contents = during
        return before

    def _function(self, function: FunctionType) -> Iterable[Any]:
        if _is_foreign(function):
            return ()
        own = (function.__module__ or "").partition(".")[0] in self._own
        found = [function.__defaults__, function.__kwdefaults__, vars(function)]
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                found.append(self._cell(cell, own=own))
        self._names(function.__globals__, _names_in(function.__code__), found, own=own)
        return found

    def _names(self, variables: dict[str, Any], names: set[str], found: list[Any], *, own: bool) -> None:
        """Save the variables of a module that code names, present or not, and of modules that it names."""
        left, done = [(variables, names, own)], set[int]()
        while left:
            variables, named, own = left.pop()
            if id(variables) in done:
                continue
            done.add(id(variables))
            saved = self._variables.get((id(variables), own))
            if saved is None:
                saved = self._variables[id(variables), own] = _Variables(variables)
                self._undo.append(saved.restore)
            saved.add(named, found, own=own)
            for name in saved.modules & named:
                module = vars(saved.before[name])
                left.append((module, names & module.keys(), False))

    def _class(self, kind: type) -> Iterable[Any]:
        if _is_foreign(kind):
            return ()
        before = {name: value for name, value in vars(kind).items() if not name.startswith("__") or name == "__call__"}

        def undo() -> None:
            now = dict(vars(kind))
            for name in now.keys() - before.keys():
                if not name.startswith("__"):
                    type.__delattr__(kind, name)  # its metaclass may refuse `delattr`
            for name, value in before.items():
                if now.get(name) is not value:
                    type.__setattr__(kind, name, value)

        self._undo.append(undo)
        functions = [getattr(value, "__func__", getattr(value, "fget", value)) for value in before.values()]
        return *kind.__mro__[1:], *functions

    def _attributes(self, each: Any) -> list[Any]:
        found = [type(each), *([vars(each)] if type(each).__dictoffset__ else ())]
        for kind in type(each).__mro__:
            for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
                if isinstance(slot, MemberDescriptorType):
                    found.append(before := _value(slot, each))
                    self._undo.append(functools.partial(_reset, slot, each, before))
        return found


class _Variables:
    """Save variables of one module."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._names: set[str] = set()
        self.before = dict(variables)
        """Values of the variables when the module was first visited."""
        self.modules: set[str] = set()
        """Names of modules that the user or other packages wrote."""

    def add(self, names: set[str], found: list[Any], *, own: bool) -> None:
        """Save the variables of these names; append values that were not saved before to ``found``."""
        new = names - self._names
        self._names |= new
        for name in new & self.before.keys():
            value = self.before[name]
            if own and (during := _read_ahead(value)) is not value:
                self._variables[name] = during
            if not isinstance(value, ModuleType):
                found.append(value)
            elif value.__name__.partition(".")[0] not in _FOREIGN:
                self.modules.add(name)

    def restore(self) -> None:
        """Restore the values of the saved variables."""
        for name in self._names:
            before = self.before.get(name, _ABSENT)
            if self._variables.get(name, _ABSENT) is not before:
                if before is _ABSENT:
                    del self._variables[name]
                else:
                    self._variables[name] = before


def _value(slot: Any, owner: Any) -> Any:
    """Return what a slot of an object holds, or ``_ABSENT``."""
    try:
        return slot.__get__(owner)
    except (AttributeError, ValueError):
        return _ABSENT


def _reset(slot: Any, owner: Any, before: Any) -> None:
    if _value(slot, owner) is not before:
        slot.__delete__(owner) if before is _ABSENT else slot.__set__(owner, before)


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
    """Return what a container holds, even if its class shows other items; of a dictionary, keys and values in turn."""
    if isinstance(each, dict):
        return [entry for pair in dict.items(each) for entry in pair]
    return list(_kind(each).__iter__(each))


def _kind(each: Any) -> Any:
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(each, kind))


def _generator(each: Any) -> Callable[[], None] | None:
    """Return a call that restores the state of a random generator; None for anything else."""
    if isinstance(each, random.Random) and not isinstance(each, random.SystemRandom):  # which has no state
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
    """Return a copy in place of an iterator, which cannot be rewound; any other value itself."""
    kind = type(value)
    if kind.__module__ not in _ITERATORS or not hasattr(kind, "__next__"):
        return value
    try:
        with warnings.catch_warnings():  # Python 3.12 and 3.13 warn that 3.14 copies no iterators of itertools
            warnings.simplefilter("ignore", DeprecationWarning)
            make, arguments, *state = value.__reduce__()
            copied = make(*map(_read_ahead, arguments))
            for each in state:
                copied.__setstate__(_read_ahead_of(each))
    except TypeError:
        why = f"its code can read a {kind.__name__} outside of the model, which would go on by that"
        raise CannotRewind(why) from None
    return copied


def _read_ahead_of(state: Any) -> Any:
    """Return an iterator's state with copies of the iterators and lists in it."""
    if isinstance(state, tuple):
        return tuple(map(_read_ahead_of, state))
    return list(state) if isinstance(state, list) else _read_ahead(state)


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names
