"""Represent ``param.grad`` of a managed parameter without memory: norms and factors are known, the rest is computed.

The gradient itself is in a chunk, perhaps on another tier, perhaps over its weight. Its norm is known, and a factor is
kept until the step applies it. So every form of ``clip_grad_norm_`` works, and costs no pass over gradients. Any other
operator gets a copy of the gradient on the compute tier. An operator that changes the gradient in place changes that
copy, which is then stored in the gradient's place.

[Note: in which type]
Operators get the gradient in the parameter's type, as with PyTorch. A copy that is changed in place stays in fp32 if 16
bits do not hold the gradient. That is so for a sum of several passes, after a multiplication, and mostly with a loss
scale. So results depend on the gradient's values, and not on where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import frexp, inf
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils._pytree import tree_leaves, tree_map_only

from ps_core._errors import InvalidInput
from ps_core.engine._gradients.loss_scale import LARGEST
from ps_core.engine._parameters.function_kinds import SET_DATA
from ps_core.engine._support.calling_code import calling_code
from ps_core.engine._support.not_compiled import not_compiled

if TYPE_CHECKING:
    from ps_core.engine._gradients.loss_scale import LossScale
    from ps_core.engine._parameters.param_state import ParamState

aten = torch.ops.aten
_GET_DTYPE = getattr(torch.Tensor, "dtype").__get__  # noqa: B009 - torch's stubs type the property as its value
View = Callable[[torch.Tensor], torch.Tensor]

MEMORY = frozenset(
    {"data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "pin_memory", "__dlpack__"}
)
"""Methods that return a tensor's memory, or move it, without the dispatcher; these gradients have none."""
COPYING = frozenset({"numpy", "tolist", "__array__", "__deepcopy__", "__reduce_ex__"})
"""Methods that read a tensor's memory without the dispatcher."""


class GradientAccess(Protocol):
    """Protocol of the engine that stores the gradient, as `ManagedGrad` uses it."""

    def gradient_norm(self, record: ParamState) -> float:
        """Return the 2-norm of the stored gradient times its factor."""

    def scale_gradient(self, record: ParamState, factor: float) -> None:
        """Multiply the gradient by a factor when it is stepped."""

    def read_gradient(self, record: ParamState) -> torch.Tensor:
        """Copy the stored gradient to the compute tier, in fp32 and times its factor."""

    def write_gradient(self, record: ParamState, value: torch.Tensor) -> None:
        """Replace the stored gradient by a tensor in fp32."""

    def assign_gradient(self, record: ParamState, value: Any) -> None:
        """Do as ``parameter.grad = value`` does; the same `ManagedGrad` then stands for the new gradient."""


class ManagedGrad(torch.Tensor):
    """The gradient of one managed parameter, or a view of it, with the loss scale divided out."""

    _record: ParamState
    _gradients: GradientAccess
    _loss_scale: LossScale | None
    _views: tuple[View, ...]
    """The operators that make this view of the gradient; none: this is the whole gradient."""
    _root: ManagedGrad | None
    """The gradient that this one is a view of, or equal to; None: this one."""
    _assignments: int
    """How often the whole gradient was replaced through ``.data``; of a view: by the time it was made."""

    @staticmethod
    def __new__(
        cls: type[ManagedGrad],
        record: ParamState,
        gradients: GradientAccess,
        loss_scale: LossScale | None = None,
        root: ManagedGrad | None = None,
        views: tuple[View, ...] = (),
        like: torch.Tensor | None = None,
    ) -> ManagedGrad:
        """Make a tensor without storage; the parameter must have a gradient. ``like`` has a view's shape."""
        shape, strides = (record.shape, None) if like is None else (like.shape, like.stride())
        self: ManagedGrad = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=record.dtype, device=record.parameter.device
        )
        self._record, self._gradients, self._loss_scale = record, gradients, loss_scale
        self._views, self._root = views, root
        self._assignments = 0 if root is None else root._assignments
        return self

    @property
    def root(self) -> ManagedGrad:
        """Return the gradient that ``parameter.grad`` returned."""
        return self if self._root is None else self._root

    @property
    def is_whole(self) -> bool:
        """Return True if this is all of the gradient, not a view of a part."""
        return not self._views

    def view_by(self, views: tuple[View, ...] = (), like: torch.Tensor | None = None) -> ManagedGrad:
        """Return a view of this gradient, through which it can be read and changed."""
        shape = self if like is None and self._views else like
        return ManagedGrad(self._record, self._gradients, self._loss_scale, self.root, (*self._views, *views), shape)

    @property
    def _scale(self) -> float:
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    def norm_of_all(self) -> torch.Tensor:
        """Return the norm in fp32 for every type of gradient: 16 bits would round it."""
        self.check_current()
        norm = self._gradients.gradient_norm(self._record) / self._scale
        return torch.tensor(norm, dtype=torch.float32, device=self.device)

    def scale_by(self, factor: float) -> None:
        """Multiply the gradient when it is stepped."""
        self.check_current()
        self._gradients.scale_gradient(self._record, factor)

    def check_current(self) -> None:
        """Raise `InvalidInput` if the parameter does not have this gradient any more."""
        root = self.root
        if getattr(self._record, "grad_proxy", root) is not root or self._assignments != root._assignments:
            self.refuse(
                "an operation",
                "that gradient was stepped, forgotten or replaced; read parameter.grad again, "
                "or keep a clone() of it beforehand",
            )

    def base(self) -> torch.Tensor:
        """Copy all of the gradient, in the type that [Note: in which type] says for changes in place."""
        self.check_current()
        value = self._gradients.read_gradient(self._record).contiguous()
        value = value.div_(self._scale) if self._scale != 1.0 else value
        rounded = value.to(self.dtype)
        again = rounded.float()
        same = self.dtype is not value.dtype and bool(((again == value) | (again.isnan() & value.isnan())).all())
        return rounded if same else value

    def seen(self, base: torch.Tensor) -> torch.Tensor:
        """Return this view's part of a copy of the gradient."""
        for view in self._views:
            base = view(base)
        return base

    def value(self) -> torch.Tensor:
        """Copy the gradient or the view, in the parameter's type."""
        return self.seen(self.base().to(self.dtype))

    def store(self, base: torch.Tensor) -> None:
        """Store a changed copy in the gradient's place."""
        value = base.float()
        self._gradients.write_gradient(self._record, value.mul_(self._scale) if self._scale != 1.0 else value)

    def assign(self, value: Any) -> None:
        """Take a tensor in place of the gradient, as ``parameter.grad.data = value`` does."""
        self.check_current()
        if self._root is not None:
            self.refuse("an assignment to .data", "this is a view of the gradient; assign to parameter.grad")
        if not isinstance(value, torch.Tensor):
            self.refuse("an assignment to .data", f"found a {type(value).__name__}; allowed is a tensor")
        self._gradients.assign_gradient(self._record, value)
        self._assignments += 1  # so that views of the old values are refused

    def refuse(self, what: str, why: str) -> NoReturn:
        """Raise `InvalidInput` for an unsupported use."""
        raise InvalidInput(f"{what} on the gradient of {self._record.name!r}: {why}")

    # Any: torch passes whatever the caller did.
    @classmethod
    @not_compiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Give functions that read memory a copy; raise for those that return it; pass all others to the dispatcher."""
        name = getattr(func, "__name__", "")
        if name == "__set__" and func == SET_DATA and isinstance(args[0], cls):
            return args[0].assign(args[1])
        if name in MEMORY and isinstance(args[0], cls):
            args[0].refuse(f"{name}()", "the gradient is in a chunk, and has no memory of its own: .clone() it first")
        if name == "__get__" and func == _GET_DTYPE and calling_code() is GradScaler._unscale_grads_.__code__:
            _unscale(args)  # GradScaler would refuse 16-bit gradients
        copied = name in COPYING and isinstance(args[0], cls)
        if copied:
            args = (args[0].value(), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if copied and hasattr(found, "setflags"):
            found.setflags(write=False)  # an array, in which a change would be lost
        return found

    @classmethod
    @not_compiled
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for a method
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return norms, and store factors, without the gradient; compute everything else with a copy of it."""
        kwargs = kwargs or {}
        answer = ANSWERS.get(func)
        found = NotImplemented if answer is None else answer(*args, **kwargs)
        return _compute(func, tuple(args), dict(kwargs)) if found is NotImplemented else found

    # torch's own takes keywords for the contents, of which there are none.
    def __repr__(self) -> str:  # type: ignore[override]
        return f"ManagedGrad(of={self._record.name!r}, norm={self.norm().item():g}, shape={tuple(self.shape)})"


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator with copies of gradients, and store those that it changed."""
    if func.is_view:
        return _view(func, args, kwargs)
    given = dict(zip([each.name for each in func._schema.arguments], args, strict=False)) | kwargs
    if not func._schema.name.startswith("aten::_foreach_"):
        return _compute_one(func, given)
    # One gradient at a time, so that copies of all are never there together.
    several = {name: value for name, value in given.items() if isinstance(value, list | tuple)}
    found: list[Any] = []
    for index in range(max(map(len, several.values()))):
        found += _compute_one(func, given | {name: [value[index]] for name, value in several.items()}) or []
    return found or None


def _compute_one(func: Any, given: dict[str, Any]) -> Any:
    arguments = [each for each in func._schema.arguments if each.name in given]
    written = [given[each.name] for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    changed = [each for each in tree_leaves(written) if isinstance(each, ManagedGrad)]
    unrounded = bool(changed) or (func is aten._to_copy.default and given.get("dtype") is not None)
    bases: dict[int, torch.Tensor] = {}

    def copy_of(grad: ManagedGrad) -> torch.Tensor:
        if not unrounded:
            return grad.value()
        if id(grad.root) not in bases:
            bases[id(grad.root)] = grad.base()
        return grad.seen(bases[id(grad.root)])

    plain = {name: tree_map_only(ManagedGrad, copy_of, value) for name, value in given.items()}
    by_name = {each.name: plain.pop(each.name) for each in arguments if each.kwarg_only}
    result = func(*plain.values(), **by_name)
    for grad in changed:
        grad.store(bases[id(grad.root)])
    return changed[0] if changed and isinstance(result, torch.Tensor) else result


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return views of a gradient, through which it can be changed."""
    grad, *rest = args
    shape = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device="meta")
    seen = func(shape, *rest, **kwargs)
    if isinstance(seen, torch.Tensor):
        return grad.view_by((lambda base: func(base, *rest, **kwargs),), seen)

    def part(index: int) -> View:
        return lambda base: func(base, *rest, **kwargs)[index]

    return [grad.view_by((part(index),), each) for index, each in enumerate(seen)]


def _first(values: Any) -> ManagedGrad:
    """Return the first managed gradient among an operator's arguments; PyTorch calls this only if there is one."""
    return next(each for each in tree_leaves(values) if isinstance(each, ManagedGrad))


def _norm(
    grad: ManagedGrad, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if float(order) != 2.0 or dim is not None or keepdim or not grad.is_whole:
        return NotImplemented
    return grad.norm_of_all() if dtype is None else grad.norm_of_all().to(dtype)


def _norms(grads: Sequence[torch.Tensor], order: Any = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(each, order, dtype=dtype) for each in grads]


def _multiply(grad: Any, factor: Any) -> Any:
    number = _as_number(factor)
    if number is None or not _is_whole(grad):
        return NotImplemented
    grad.scale_by(number)
    return grad


def _divide(grad: Any, divisor: Any) -> Any:
    """Divide by a power of two, whose reciprocal is exact."""
    number = _as_number(divisor)
    if number is None or not _is_whole(grad) or abs(frexp(number)[0]) != 0.5:
        return NotImplemented
    grad.scale_by(1 / number)
    return grad


def _as_number(factor: Any) -> float | None:
    """Return one number, or None for several, and for a finite one that fp32 cannot hold."""
    if isinstance(factor, torch.Tensor) and (isinstance(factor, ManagedGrad) or factor.numel() != 1):
        return None
    number = float(factor)
    return None if LARGEST < abs(number) < inf else number


def _is_whole(grad: Any) -> bool:
    return isinstance(grad, ManagedGrad) and grad.is_whole


def _multiply_all(grads: Sequence[ManagedGrad], factor: Any) -> Any:
    """Multiply several gradients. Return nothing: PyTorch takes any other value for a kernel's error."""
    numbers = [*map(_as_number, factor)] if isinstance(factor, list | tuple) else [_as_number(factor)] * len(grads)
    if not all(map(_is_whole, grads)) or None in numbers:
        return NotImplemented
    for grad, number in zip(grads, numbers, strict=True):
        grad.scale_by(number)  # type: ignore[arg-type]  # there is no None
    return None


def _unscale(grads: Sequence[Any], *_: Any) -> NoReturn:
    _first(grads).refuse(
        "torch.amp.GradScaler",
        "the engine divides by its own loss scale; leave torch's scaler out, or for fp16 use "
        "chunked(..., precision='fp16') and optimizer.scaler in its place",
    )


ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten._foreach_norm.Scalar: _norms,
    aten.mul_.Tensor: _multiply,
    aten.mul_.Scalar: _multiply,
    aten.div_.Tensor: _divide,
    aten.div_.Scalar: _divide,
    aten._foreach_mul_.Tensor: _multiply_all,
    aten._foreach_mul_.Scalar: _multiply_all,
    aten._foreach_mul_.ScalarList: _multiply_all,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.detach.default: lambda grad: grad.view_by(),
    aten.alias.default: lambda grad: grad.view_by(),
    aten.detach_.default: lambda grad: grad,
    aten.is_pinned.default: lambda grad: False,
}
"""Operators that need no gradient data; an answer of NotImplemented leaves the call to `_compute`."""
