"""Define the class of managed parameters, which fetches their memory before any operation on them.

A parameter keeps its identity. Only its class changes, and changes back when the model is released. Questions about
shape, type or device are answered at once. The engine answers what reads the gradient. Any other function first fetches
each managed parameter among its arguments. So no function can meet memory that is not there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch._functorch import vmap
from torch.autograd.graph import get_gradient_edge

from ps_core._errors import UnsupportedParameter
from ps_core.engine._parameters.function_kinds import (
    AUTOGRAD,
    DEL_GRAD,
    GET_DATA,
    GET_GRAD,
    GET_IS_LEAF,
    PLAIN,
    SET_DATA,
    SET_GRAD,
    SHAPED,
    STRIDED,
    Function,
    changes_in_place,
)
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._support.calling_code import calling_code
from ps_core.engine._support.not_compiled import called_by_compiler
from ps_core.engine._support.refuse_programs import not_a_program, tracing_state


class ParameterOwner(Protocol):
    """Protocol of the engine that manages a parameter, as the parameter uses it."""

    def call(self, records: list[ParamState], function: Function, args: Any, kwargs: Any) -> Any:
        """Fetch these parameters, and call the function."""

    def get_gradient(self, record: ParamState) -> Any:
        """Return the value of ``parameter.grad``."""

    def set_gradient(self, record: ParamState, value: Any) -> None:
        """Assign ``parameter.grad = value``."""

    def overwrite(self, record: ParamState, function: Function, args: Any) -> None:
        """Load the parameter if a state dict is being loaded; raise for any other function that changes it in place."""

    def detached(self, record: ParamState) -> torch.Tensor | None:
        """Return a copy for the state dict that is being collected; None if none is."""

    def arrive(self, record: ParamState, gradient: torch.Tensor) -> None:
        """Store a gradient that autograd just made."""

    def deliver(self, record: ParamState) -> None:
        """Store the gradient of a table on the host, which autograd did not see."""

    def hold_for_vmap(self, records: list[ParamState]) -> None:
        """Fetch parameters that ``torch.vmap`` maps over, and keep them on the compute tier until that returns."""


LEAVES = frozenset({torch.Tensor, int, float, bool, str, type(None), torch.Size})
"""Types of most arguments that cannot contain a parameter."""
_NESTS = (list, tuple, dict)


class _CompiledWhole(UnsupportedParameter, AssertionError):
    """Make `UnsupportedParameter` pass ``torch.compile`` unwrapped: it wraps all errors but a few kinds, like
    this one.
    """


@called_by_compiler
def _refuse_compiled() -> NoReturn:
    raise _CompiledWhole(
        "a compiled model or function read a parameter that is under management, whose memory comes and goes: "
        "compile the model's blocks instead, before or after: `for block in model.layers: block.compile()`; "
        "give a compiled block other modules' parameters as arguments, and a compiled function copies: "
        "`weight.clone()`; clip gradients outside of compiled functions, or give those the gradients: "
        "`[p.grad for p in model.parameters()]`"
    )


_VMAP = getattr(getattr(vmap, "_process_batched_inputs", None), "__code__", None)
"""The code of ``torch.vmap`` that looks at what it is to map over."""

_OTHER_DATA = (
    "release(model), convert or move it, and call chunked again; to change values use materialized(model, write=True)"
)
"""Remedy named by a refusal to give a parameter other memory."""


class ManagedParameter(nn.Parameter):
    """A parameter whose memory is fetched and evicted."""

    _record: ParamState
    _owner: ParameterOwner

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            _refuse_compiled()
        if tracing_state() is not None:
            raise not_a_program()
        if func in PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = managed(args)
        if kwargs:
            for target in managed((kwargs["out"],)) if "out" in kwargs else ():
                target._owner.overwrite(target._record, func, args)
            others = managed(kwargs.values())
            found = list(dict.fromkeys((*found, *others))) if found and others else found or others
        else:
            kwargs = {}
        if not found:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in AUTOGRAD:
            return func(*_as_edges(args), **dict(zip(kwargs, _as_edges(kwargs.values()), strict=True)))
        first = found[0]
        if args and args[0] is first:
            special = _SPECIAL.get(func)
            if special is not None:
                return special(first, func, args, kwargs)
        if changes_in_place(func):
            for target in managed((args[0],) if args else kwargs.values()):
                return target._owner.overwrite(target._record, func, args)
        return call_fetched(found, func, args, kwargs)

    @staticmethod
    def answers(func: Function, args: Any) -> bool:
        """Return True for a function that needs no memory, or that the class itself answers or refuses."""
        if func in PLAIN or func in AUTOGRAD:
            return True
        return bool(args) and type(args[0]) is ManagedParameter and (func in _SPECIAL or changes_in_place(func))

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse(
            "copied",
            "copy the model inside `with materialized(model):`, or release(model) first; for a moving average of the "
            "weights use WeightAverage(model)",
        )

    # PyTorch hands neither of these to `__torch_function__` before it is too late.
    def set_(self, *args: Any, **kwargs: Any) -> ManagedParameter:
        """Do nothing for the parameter itself, as parametrizations without an inverse ask for; refuse other memory."""
        if kwargs or [id(each) for each in args] != [id(self)]:
            self._refuse("given other memory by set_()", _OTHER_DATA)
        return self

    def dim(self) -> int:
        """Return the number of dimensions, which ``torch.vmap`` asks for before it maps over the parameter."""
        caller = sys._getframe(1)
        if caller.f_code is _VMAP:
            mapped_over = [each._record for each in _mapped_over(**caller.f_locals) if each._owner is self._owner]
            self._owner.hold_for_vmap(mapped_over)
        with torch._C.DisableTorchFunctionSubclass():
            return super().dim()

    def _use_count(self) -> NoReturn:
        self._refuse("swapped with another tensor (torch.utils.swap_tensors)", _OTHER_DATA)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickled", "save model.state_dict(), or pickle copy.deepcopy(model) inside materialized(model)")

    def _refuse(self, what: str, suggestion: str) -> NoReturn:
        raise UnsupportedParameter(f"{self._record.name!r} is under management and cannot be {what}: {suggestion}")


def managed(values: Iterable[Any]) -> list[ManagedParameter]:
    """Return the managed parameters among arguments, also in nested lists, tuples and dicts; each once."""
    found: list[ManagedParameter] = []
    for value in values:
        kind = type(value)
        if kind is ManagedParameter:
            found.append(value)
        elif kind not in LEAVES and isinstance(value, _NESTS):
            found += managed(value.values() if isinstance(value, dict) else value)
    if len(found) == 2 and found[0] is not found[1]:
        return found
    return list(dict.fromkeys(found)) if found else found


def _mapped_over(flat_args: list[Any], flat_in_dims: list[int | None], **_: Any) -> list[ManagedParameter]:
    """Return the parameters that a call of ``torch.vmap`` maps over, by the local variables of `_VMAP`."""
    return managed(value for value, place in zip(flat_args, flat_in_dims, strict=True) if place is not None)


def aliased(values: Any, records: list[ParamState], every: bool) -> Any:
    """Return ``values`` with plain aliases for these parameters: for all if ``every``, else for frozen ones.

    Parameters of another engine are left as they are: it may not have fetched them yet.
    """
    if type(values) is ManagedParameter:
        if values._record not in records:
            return values
        if not values.requires_grad:
            return values.detach()
        return values.view_as(values) if every else values
    if type(values) in (list, tuple):
        return type(values)(aliased(value, records, every) for value in values)
    if isinstance(values, dict):
        return {name: aliased(value, records, every) for name, value in values.items()}
    return values


def call_fetched(found: list[ManagedParameter], func: Function, args: Any, kwargs: Any) -> Any:
    """Fetch the parameters that were found among a function's arguments, and call it."""
    owner, records = found[0]._owner, []
    for parameter in found:
        if parameter._owner is not owner:
            return _call_of_several(found, func, args, kwargs)
        records.append(parameter._record)
    return owner.call(records, func, args, kwargs)


def _call_of_several(found: list[ManagedParameter], func: Function, args: Any, kwargs: Any) -> Any:
    """Call a function with parameters of several engines: each engine fetches its own."""
    keepers: dict[ParameterOwner, list[ParamState]] = {}
    for parameter in found:
        keepers.setdefault(parameter._owner, []).append(parameter._record)
    inner, *others = keepers.items()
    for owner, records in others:
        func = _brought_by(owner, records, func)
    return inner[0].call(inner[1], func, args, kwargs)


def _as_edges(values: Any) -> list[Any]:
    """Replace managed parameters by their edges in the autograd graph, for functions that read no memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            get_gradient_edge(value)
            if type(value) is ManagedParameter
            else [get_gradient_edge(each) if type(each) is ManagedParameter else each for each in value]
            if isinstance(value, list | tuple)
            else value
            for value in values
        ]


def _brought_by(owner: ParameterOwner, records: list[ParamState], func: Function) -> Function:
    """Wrap the function, so that another engine fetches its own parameters before the call."""
    return lambda *args, **kwargs: owner.call(records, func, args, kwargs)


# Functions that the engine answers itself.


def _get_grad(parameter: ManagedParameter, func: Function, args: Any, kwargs: Any) -> Any:
    if parameter._record.dropped and getattr(calling_code(), "co_name", "") == "zero_grad":
        parameter._record.dropped = False  # the caller forgets the gradient next
    return parameter._owner.get_gradient(parameter._record)


def _set_grad(parameter: ManagedParameter, func: Function, args: Any, kwargs: Any) -> None:
    parameter._owner.set_gradient(parameter._record, args[1] if len(args) > 1 else None)


def _get_data(parameter: ManagedParameter, func: Function, args: Any, kwargs: Any) -> Any:
    """Return ``parameter.data`` as ``detach()``: it shares the version counter, so changes in place are noticed."""
    return _detach(parameter, torch.Tensor.detach, args, kwargs)


def _set_data(parameter: ManagedParameter, func: Function, args: Any, kwargs: Any) -> None:
    value = args[1]
    if value is not parameter:
        suggestion = _OTHER_DATA
        if value.dtype is torch.float32 and value.dtype is not parameter._record.dtype:
            pattern = _pattern(parameter._record.name)
            suggestion += f"; if the model's forward does this, give chunked options=Options(keep_fp32=({pattern!r},))"
        parameter._refuse(f"given other data ({tuple(value.shape)}, {value.dtype}, {value.device})", suggestion)


def _pattern(name: str) -> str:
    """Return a pattern of names of parameters that all layers call alike, as ``*router.classifier.*``; or the name."""
    tail = name.split(".")[-3:-1]
    return f"*{'.'.join(tail)}.*" if len(tail) == 2 and not any(map(str.isdigit, tail)) else name


def _is_leaf(parameter: ManagedParameter, func: Function, args: Any, kwargs: Any) -> bool:
    if calling_code() is nn.Module._apply.__code__:  # it asks before it puts another parameter in this one's place
        parameter._refuse(
            "replaced by a parameter elsewhere, as model.to(...) or model.to_empty(...) would", _OTHER_DATA
        )
    return True


def _detach(parameter: ManagedParameter, func: Function, args: Any, kwargs: Any) -> Any:
    if calling_code() is nn.Parameter.__new__.__code__:
        parameter._refuse(
            "made into another parameter, as parametrizations do it",
            "release(model), register what is to be registered, and call chunked again",
        )
    copy = parameter._owner.detached(parameter._record)
    return call_fetched([parameter], func, args, kwargs) if copy is None else copy


def _share(parameter: ManagedParameter, func: Function, args: Any, kwargs: Any) -> NoReturn:
    parameter._refuse(
        "put in shared memory by share_memory()",
        "release(model) first, or share a copy.deepcopy(model) from inside materialized(model)",
    )


def _strided(parameter: ManagedParameter, func: Function, args: Any, kwargs: Any) -> Any:
    record = parameter._record
    twin = torch.empty_strided(record.shape, record.stride, dtype=record.dtype, device="meta")
    return func(twin, *args[1:], **kwargs)


def _shaped(parameter: ManagedParameter, func: Function, args: Any, kwargs: Any) -> Any:
    if kwargs.get("device") is None:
        kwargs = kwargs | {"device": parameter.device}
    return _strided(parameter, func, args, kwargs)


_SPECIAL: dict[Function, Callable[[ManagedParameter, Function, Any, Any], Any]] = {
    GET_GRAD: _get_grad,
    SET_GRAD: _set_grad,
    DEL_GRAD: _set_grad,
    GET_DATA: _get_data,
    SET_DATA: _set_data,
    GET_IS_LEAF: _is_leaf,
    torch.Tensor.detach: _detach,
    torch.Tensor.share_memory_: _share,
    **dict.fromkeys(STRIDED, _strided),
    **dict.fromkeys(SHAPED, _shaped),
}


# The tensor beneath.


def clear_grad(parameter: nn.Parameter) -> None:
    """Clear the gradient that autograd keeps itself."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None


def set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Point the parameter at another tensor's memory."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = data


def version_of(parameter: nn.Parameter) -> int:
    """Return autograd's version counter of the parameter, which counts changes in place."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version


def find_shared_versions(records: Collection[ParamState]) -> None:
    """Note which parameters share a version: raised for one, it would tell that the other was changed in place.

    ``load_state_dict(assign=True)`` makes such parameters of tied ones, and so does `nn.Parameter` of views of one
    tensor.
    """
    with torch._C.DisableTorchFunctionSubclass():
        before = [record.parameter._version for record in records]
        torch._C._increment_version([record.parameter for record in records])
        for record, version in zip(records, before, strict=True):
            record.note_raised(version)


def accept_changes(record: ParamState) -> None:
    """Note that the parameter's changes in place so far were meant, so that nothing refuses them."""
    record.counted_version = version_of(record.parameter)
    record.group.forget_moment()


def plain_value(record: ParamState, read: Callable[[ParamState], torch.Tensor]) -> torch.Tensor:
    """Return the value that a parameter has once it is plain: a copy, or the memory of a tied one."""
    for other in record.others:
        if type(other.parameter) is not ManagedParameter:
            return other.parameter.detach()
    return read(record)


def unmanage(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Make a managed parameter an ordinary one for good, with this value."""
    assert isinstance(parameter, ManagedParameter), "only managed parameters are to become plain"
    make_plain(parameter)
    del parameter._record, parameter._owner
    set_data(parameter, value)


def is_ordinary_for_a_block(parameter: nn.Parameter) -> bool:
    """Return True for a managed parameter that is an ordinary one inside `materialized`."""
    return not isinstance(parameter, ManagedParameter) and hasattr(parameter, "_owner")


def make_plain(parameter: nn.Parameter) -> None:
    """Restore the class that a managed parameter had before."""
    assert isinstance(parameter, ManagedParameter), "only managed parameters are to become plain"
    given: type[Any] = parameter._record.given[0]
    parameter.__class__ = given
