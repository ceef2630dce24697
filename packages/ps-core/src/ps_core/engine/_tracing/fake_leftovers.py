"""Remove fake tensors that a model's code stored outside of the copy: in caches and globals.

The model's next pass would compute with them, and fail. They are removed from containers and ``functools`` caches.
Variables and attributes that hold one become None.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import MutableSet
from functools import _lru_cache_wrapper
from types import CellType, FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_DEPTH = 4
"""The most immutable objects, such as tuples, that may enclose a tensor."""


def remove_leftovers(mode: FakeTensorMode, made: list[weakref.ref[torch.UntypedStorage]]) -> list[str]:
    """Remove this mode's tensors wherever they are referenced; return the types of objects that keep theirs.

    ``made`` are the tensors' storages. If any is alive, garbage is collected; if one still is, the heap is searched.
    """
    if not _any_alive(made):
        return []
    gc.collect()
    if not _any_alive(made):
        return []
    gc.unfreeze()  # or the search would pass by what `gc.freeze` has hidden
    values: list[Any] = [
        each for each in gc.get_objects() if issubclass(type(each), FakeTensor) and each.fake_mode is mode
    ]
    kept: set[str] = set()
    for _ in range(_DEPTH + 1):
        values = _remove(values, kept)
    return sorted(kept | {type(each).__name__ for each in values})


def _any_alive(made: list[weakref.ref[torch.UntypedStorage]]) -> bool:
    return any(storage() is not None for storage in made)


def _remove(values: list[Any], kept: set[str]) -> list[Any]:
    """Remove values from their holders; return the tuples and frozensets among these, to be removed from theirs.

    Other types that cannot be changed are added to ``kept``. The heap is searched once for all values, not for each.
    """
    holders = _holders(values)
    owners = _holders([holder for holder, _ in holders if isinstance(holder, dict)])
    enclosing = []
    for holder, held in holders:
        if isinstance(holder, dict):
            _remove_from_dict(holder, held, [owner for owner, its in owners if any(each is holder for each in its)])
        elif isinstance(holder, tuple | frozenset):
            enclosing.append(holder)
        else:
            kept |= {type(holder).__name__ for value in held if not _remove_from(holder, value)}
    return enclosing


def _holders(values: list[Any]) -> list[tuple[Any, list[Any]]]:
    """Return the objects that hold some of the values, each with these; no stack frame, and none of this function."""
    wanted = {id(value) for value in values}
    arguments = tuple(values)  # named, to be left out: in Python 3.13 the search finds it
    found = gc.get_referrers(*arguments) if values else []
    own = (id(values), id(arguments))
    holders = [each for each in found if id(each) not in own and type(each) is not FrameType]
    return [(each, [*{id(x): x for x in gc.get_referents(each) if id(x) in wanted}.values()]) for each in holders]


def _remove_from_dict(holder: dict[Any, Any], held: list[Any], owners: list[Any]) -> None:
    for value in held:
        if not any(_clear_attributes(owner, value) for owner in owners):
            for key in [key for key, each in holder.items() if each is value]:
                del holder[key]


def _remove_from(holder: Any, value: Any) -> bool:
    """Remove a value from an object; return False if the object's type does not allow that."""
    if isinstance(holder, _lru_cache_wrapper):
        holder.cache_clear()
    elif isinstance(holder, CellType):
        holder.cell_contents = None
    elif isinstance(holder, list):
        holder[:] = [each for each in holder if each is not value]
    elif isinstance(holder, MutableSet):
        holder.discard(value)
    elif isinstance(holder, deque):
        for _ in range(len(holder)):
            each = holder.popleft()
            if each is not value:
                holder.append(each)
    else:
        return _clear_attributes(holder, value)
    return True


def _clear_attributes(owner: Any, value: Any) -> bool:
    """Set attributes with this value to None, of an object, class or module; return True if any existed."""
    names = [name for name, each in getattr(owner, "__dict__", {}).items() if each is value]
    for name in names:
        setattr(owner, name, None)
    return bool(names)
