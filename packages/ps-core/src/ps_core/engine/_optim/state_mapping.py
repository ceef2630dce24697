"""Define ``optimizer.state``: a mapping whose values are read from the engine on access.

[Note: written through]
``state[p][key]`` is a copy in CPU memory. An assignment writes to the engine's memory at once. So does every change in
place by PyTorch to the copy, a view of it, or its ``.data``: `StateTensor` compares version counters around each
function. NumPy gets a read-only array, because its writes have no such counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ps_core._errors import InvalidInput
from ps_core.engine._optim.state_format import MASTER, StateEntry, StateFormat

if TYPE_CHECKING:
    from ps_core.engine._parameters.param_state import ParamState

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # C's descriptor, a tensor to the stubs
_AS_ARRAY: tuple[Any, ...] = (torch.Tensor.numpy, torch.Tensor.__array__)


class OptimizerState(MutableMapping[torch.Tensor, MutableMapping[str, Any]]):
    """Map each parameter to its entry, from the first step on; see [Note: written through]."""

    def __init__(
        self,
        form: StateFormat,
        records: Sequence[ParamState],
        keys: Callable[[ParamState], tuple[str, ...]],
        replace: Callable[[Mapping[ParamState, StateEntry]], None],
    ) -> None:
        """Make the mapping; ``keys`` names the values of a parameter's entry; ``replace`` writes checked entries."""
        self._form, self._keys_of, self._replace = form, keys, replace
        self._records = {id(record.parameter): record for record in records}

    def add(self, records: Sequence[ParamState]) -> None:
        """Include parameters that were added to the model."""
        self._records.update({id(record.parameter): record for record in records})

    def _keys(self, record: ParamState) -> tuple[str, ...]:
        return self._keys_of(record) if self._stepped() else ()

    def _stepped(self) -> bool:
        return any(record.steps for record in self._records.values())

    def _record(self, parameter: object) -> ParamState:
        try:
            return self._records[id(parameter)]
        except KeyError:
            raise KeyError(
                "optimizer.state: this is no parameter of the optimizer that chunked(...) returned"
            ) from None

    def __contains__(self, parameter: object) -> bool:
        record = self._records.get(id(parameter))
        return record is not None and bool(self._keys(record))

    def __getitem__(self, parameter: torch.Tensor) -> ParameterState:
        """Return a parameter's entry; an empty one if it has none, as in PyTorch's ``defaultdict``."""
        record = self._record(parameter)
        return ParameterState(self._form, record, lambda: self._keys(record))

    def __setitem__(self, parameter: torch.Tensor, entry: Mapping[str, Any]) -> None:
        record = self._record(parameter)
        self._replace({record: self._form.check(record, entry)})

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        self._replace({self._record(parameter): StateEntry(0, {}, None)})

    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = self._records.values() if self._stepped() else ()
        return iter([record.parameter for record in rows if self._keys_of(record)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's entry; ``default`` if it has none."""
        if parameter not in self:
            return default
        return self[parameter]

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        """Return a copy of a parameter's state, and reset the parameter to before its first step."""
        if parameter not in self and default:
            return default[0]
        found = self[parameter].copy()
        del self[parameter]
        return found

    def clear(self) -> None:
        """Set all states to zeros, as before the first step. Masters stay: they are the parameters."""
        self._replace(dict.fromkeys(self._records.values(), StateEntry(0, {}, None)))

    def assign(self, entries: Mapping[Any, Mapping[str, Any]]) -> None:
        """Replace all entries: parameters without an entry are reset to before their first step."""
        if entries is self:
            return
        found = dict.fromkeys(self._records.values(), StateEntry(0, {}, None))
        for parameter, entry in entries.items():
            record = self._record(parameter)
            found[record] = self._form.check(record, entry)
        self._replace(found)

    def __repr__(self) -> str:
        rows = [f"  {record.name}: {', '.join(self._keys(record))}" for record in self._records.values()]
        return "\n".join(["OptimizerState:", *rows])


class ParameterState(MutableMapping[str, Any]):
    """One parameter's entry of ``optimizer.state``; see [Note: written through]."""

    def __init__(self, form: StateFormat, record: ParamState, keys: Callable[[], tuple[str, ...]]) -> None:
        self._form, self._record, self._keys = form, record, keys

    def __contains__(self, key: object) -> bool:
        return key in self._keys()

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._keys():
            raise KeyError(key)
        form, record = self._form, self._record
        return StateTensor.over(form.read(record, key), lambda value: form.set(record, key, value))

    def __setitem__(self, key: str, value: Any) -> None:
        self._form.set(self._record, key, value)

    def __delitem__(self, key: str) -> None:
        if key not in self._keys():
            raise KeyError(key)
        if any(other not in (key, MASTER) for other in self._keys()):
            raise InvalidInput(
                f"{key!r} of {self._record.name!r} cannot be deleted alone: del optimizer.state[p] makes a parameter's "
                "state as before its first step"
            )
        self.clear()

    def clear(self) -> None:
        """Set all states to zeros, as before the first step."""
        self._form.clear(self._record)

    def copy(self) -> dict[str, torch.Tensor]:
        """Read all values into an ordinary dictionary of ordinary tensors."""
        return {key: self._form.read(self._record, key) for key in self._keys()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __reduce__(self) -> Any:
        """Copy and pickle as an ordinary dictionary."""
        return dict, (self.copy(),)

    def __repr__(self) -> str:
        return f"ParameterState({self._record.name}: {', '.join(self._keys())})"


class StateTensor(torch.Tensor):
    """A copy of one value of ``optimizer.state``, whose changes in place go to the engine's memory."""

    _whole: torch.Tensor
    """All of the copy, of which this may be a view."""
    _write: Callable[[torch.Tensor], None]

    @classmethod
    def over(cls, value: torch.Tensor, write: Callable[[torch.Tensor], None]) -> StateTensor:
        """Wrap a copy; ``write`` is called with all of it after each change."""
        return _viewed(value, value, write)

    # Any: torch passes whatever the caller did.
    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, then write back what it changed."""
        if func == _SET_DATA:  # a descriptor makes another wrapper each time
            args[0].set_(args[1])
            return None
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, StateTensor)]
        with torch._C.DisableTorchFunctionSubclass():
            before = [each._version for each in found]
            result = func(*args, **(kwargs or {}))
            for each, version in zip(found, before, strict=True):
                if each._version != version:
                    each._write(each._whole)
            if func in _AS_ARRAY:
                result.flags.writeable = False
                return result
            return tree_map_only(torch.Tensor, lambda value: _as_view(value, found), result)

    # PyTorch does not ask `__torch_function__` about this one.
    def set_(self, value: Any = None, *place: Any) -> StateTensor:
        """Copy values into the state, where PyTorch would let it have other memory."""
        if place or not isinstance(value, torch.Tensor) or value.shape != self.shape:
            found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise InvalidInput(
                f"a value of optimizer.state was given other memory ({found}); allowed is a tensor of shape "
                f"{tuple(self.shape)}, whose values are copied"
            )
        self.copy_(value)
        return self

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return _plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _plain(value: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def _viewed(value: torch.Tensor, whole: torch.Tensor, write: Callable[[torch.Tensor], None]) -> StateTensor:
    made = value.as_subclass(StateTensor)
    made._whole, made._write = whole, write
    return made


def _as_view(value: torch.Tensor, sources: Sequence[StateTensor]) -> torch.Tensor:
    """Make a result that shares a source's memory write its changes back too."""
    if isinstance(value, StateTensor):
        return value
    for source in sources:
        if value.untyped_storage().data_ptr() == source._whole.untyped_storage().data_ptr():
            return _viewed(value, source._whole, source._write)
    return value
