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
    found = [each for each in gc.get_objects() if issubclass(type(each), FakeTensor) and each.fake_mode is mode]
    return sorted({name for each in found for name in _remove(each, _DEPTH, {id(found)})})


def _any_alive(made: list[weakref.ref[torch.UntypedStorage]]) -> bool:
    return any(storage() is not None for storage in made)


def _remove(value: Any, depth: int, ignored: set[int]) -> set[str]:
    """Remove a value from its holders, and tuples from theirs; return the types that cannot be changed."""
    holders = [each for each in gc.get_referrers(value) if id(each) not in ignored and type(each) is not FrameType]
    kept: set[str] = set()
    for holder in holders:
        if not _remove_from(holder, value):
            climbs = depth and isinstance(holder, tuple | frozenset)
            kept |= _remove(holder, depth - 1, ignored | {id(holders)}) if climbs else {type(holder).__name__}
    return kept


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
    elif isinstance(holder, dict):
        if not any(_clear_attributes(owner, value) for owner in gc.get_referrers(holder)):
            for key in [key for key, each in holder.items() if each is value]:
                del holder[key]
    else:
        return _clear_attributes(holder, value)
    return True


def _clear_attributes(owner: Any, value: Any) -> bool:
    """Set attributes with this value to None, of an object, class or module; return True if any existed."""
    names = [name for name, each in getattr(owner, "__dict__", {}).items() if each is value]
    for name in names:
        setattr(owner, name, None)
    return bool(names)
