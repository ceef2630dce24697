"""Answer for ``param.grad`` of a managed parameter, without memory: norms and factors, as clipping needs them.

The gradient itself is in a chunk, perhaps on another tier, perhaps over its weight. Its norm is known, and a factor
is kept until the step applies it. So every form of ``clip_grad_norm_`` works, and costs no pass over gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ps_core._errors import InvalidInput

if TYPE_CHECKING:
    from ps_core.engine._gradients.loss_scale import LossScale
    from ps_core.engine._parameters.param_state import ParamState

aten = torch.ops.aten

# These return a gradient's memory without the dispatcher, and there is no such memory.
MEMORY = frozenset(
    {"data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "pin_memory", "numpy", "tolist"}
    | {"__array__", "__dlpack__", "__deepcopy__", "__reduce__", "__reduce_ex__"}
)

SUGGESTION = (
    "clip with chunked(..., max_grad_norm=...) or clip_grad_norm_ (norm_type=2); in place of an optimizer of "
    "torch.optim step the one that chunked(model, AdamW(...)) returns; or release(model) to work on plain gradients"
)


class GradientScaler(Protocol):
    """The engine that stores the gradient, as `ManagedGrad` sees it."""

    def gradient_norm(self, record: ParamState) -> float:
        """Return the 2-norm of the stored gradient times its factor."""

    def scale_gradient(self, record: ParamState, factor: float) -> None:
        """Multiply the gradient by a factor when it is stepped."""


class ManagedGrad(torch.Tensor):
    """The gradient of one managed parameter, with the loss scale divided out."""

    _record: ParamState
    _gradients: GradientScaler
    _loss_scale: LossScale | None

    @staticmethod
    def __new__(
        cls: type[ManagedGrad], record: ParamState, gradients: GradientScaler, loss_scale: LossScale | None = None
    ) -> ManagedGrad:
        """Make a tensor without storage; the parameter must have a gradient."""
        self: ManagedGrad = torch.Tensor._make_wrapper_subclass(
            cls, record.shape, dtype=record.dtype, device=record.parameter.device
        )
        self._record, self._gradients, self._loss_scale = record, gradients, loss_scale
        return self

    def _norm(self) -> torch.Tensor:
        """Return the norm in fp32 for every type of gradient: 16 bits would round it."""
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        norm = self._gradients.gradient_norm(self._record) / scale
        return torch.tensor(norm, dtype=torch.float32, device=self.device)

    def _multiply(self, factor: float) -> None:
        if getattr(self._record, "grad_proxy", self) is not self:
            self._refuse("an operation, after it was forgotten or stepped,")
        self._gradients.scale_gradient(self._record, factor)

    def _refuse(self, what: str, suggestion: str = SUGGESTION) -> NoReturn:
        raise InvalidInput(
            f"{what} on the gradient of {self._record.name!r}: it is in a chunk, and here it has a norm and can be "
            f"multiplied by a number, no more; {suggestion}"
        )

    # Any: torch passes whatever the caller did.
    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise `InvalidInput` for functions that return memory; leave the rest to the dispatcher."""
        name = getattr(func, "__name__", "")
        if name in MEMORY and isinstance(args[0], cls):
            args[0]._refuse(f"{name}()")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for a method
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return norms, store factors, and raise `InvalidInput` for everything else."""
        answer = ANSWERS.get(func)
        if answer is None:
            _first((args, kwargs))._refuse(str(func.overloadpacket))
        return answer(*args, **(kwargs or {}))

    # torch's own takes keywords for the contents, of which there are none.
    def __repr__(self) -> str:  # type: ignore[override]
        return f"ManagedGrad(of={self._record.name!r}, norm={self._norm().item():g}, shape={tuple(self.shape)})"


def _first(values: Any) -> ManagedGrad:
    """Return the first managed gradient among an operator's arguments; torch calls us only if there is one."""
    return next(each for each in tree_leaves(values) if isinstance(each, ManagedGrad))


def _norm(
    grad: ManagedGrad, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if float(order) != 2.0:
        grad._refuse(f"a norm of order {order}")
    if dim is not None or keepdim:
        grad._refuse("a norm over some dimensions")
    return grad._norm() if dtype is None else grad._norm().to(dtype)


def _norms(grads: Sequence[ManagedGrad], order: Any = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [_norm(_managed(each, grads), order, dtype=dtype) for each in grads]


def _multiply(grad: Any, factor: Any) -> Any:
    _managed(grad, (grad, factor))._multiply(_number(factor, grad))
    return grad


def _multiply_all(grads: Sequence[ManagedGrad], factor: Any) -> None:
    """Multiply several gradients. Return nothing, because torch takes any other value for a kernel's error."""
    factors = factor if isinstance(factor, list | tuple) else [factor] * len(grads)
    # All are looked at before the first is changed.
    pairs = [(_managed(grad, grads), _number(each, grad)) for grad, each in zip(grads, factors, strict=True)]
    for grad, each in pairs:
        grad._multiply(each)


def _managed(grad: Any, among: Sequence[Any]) -> ManagedGrad:
    """Return the gradient if it is a managed one; else raise `InvalidInput`."""
    if not isinstance(grad, ManagedGrad):
        _first(among)._refuse("an operation that mixes it with plain tensors")
    return grad


def _number(factor: Any, grad: ManagedGrad) -> float:
    """Return a factor as a number; a product in 16 bits would round once more."""
    if isinstance(factor, ManagedGrad) or (isinstance(factor, torch.Tensor) and factor.numel() != 1):
        grad._refuse("multiplication by a tensor")
    return float(factor)


def _unscale(grads: Sequence[Any], *_: Any) -> NoReturn:
    _first(grads)._refuse(
        "torch.amp.GradScaler (_amp_foreach_non_finite_check_and_unscale_)",
        "leave torch's scaler out, or for fp16 use chunked(..., precision='fp16') and optimizer.scaler in its place",
    )


def _same(grad: ManagedGrad) -> ManagedGrad:
    """Return another tensor for the same gradient: like a view, changes go to the original."""
    return ManagedGrad(grad._record, grad._gradients, grad._loss_scale)


ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten._foreach_norm.Scalar: _norms,
    aten.mul_.Tensor: _multiply,
    aten.mul_.Scalar: _multiply,
    aten._foreach_mul_.Tensor: _multiply_all,
    aten._foreach_mul_.Scalar: _multiply_all,
    aten._foreach_mul_.ScalarList: _multiply_all,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.is_pinned.default: lambda grad: False,
}
"""The functions that a managed gradient supports, by operator."""
