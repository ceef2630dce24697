"""A trace without running anything: one forward and backward on fake tensors, which have shapes but no memory.

[Note: where it happens]
In a forked copy of the process (`child`). There every parameter and buffer *becomes* a fake one under its own
identity, so that lists, closures and tied modules which also hold it see the fake as well, and whatever the model's
own code leaves behind disappears with the copy. A fake pass that aborts the process, as one on a device that this
build of torch lacks does, ends the copy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from ps_core._errors import InvalidInput
from ps_core._program import Precision
from ps_core._trace import Tensor, Trace
from ps_core.engine._tracing.child import ChildFailed, in_child
from ps_core.engine._tracing.fake_recorder import FakePassRecorder

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class CannotTrace(InvalidInput):
    """The model does something that fake tensors cannot follow."""


class NoLoss(InvalidInput):
    """The model returns no scalar loss with a gradient."""


@dataclass(frozen=True, kw_only=True)
class FakePassOptions:
    """What a fake pass is to do."""

    training: bool = True
    """Whether backward follows forward."""
    loss: Callable[[Any], torch.Tensor] | None = None
    """Makes the loss from what the model returns; None: its ``loss``, or the scalar itself."""
    unit_of: Callable[[str], int] | None = None
    """The unit of a parameter's name; None: the module that owns it."""
    dtype_of: Callable[[str], torch.dtype] | None = None
    """What a floating parameter is computed in; None: as it is."""
    input_dtype: torch.dtype | None = None
    """What floating inputs are cast to; None: as they are."""
    stays_on_host: Callable[[str], bool] | None = None
    """Which parameters are tables that never come; None: none is."""


def trace(
    model: nn.Module,
    batch: Any,
    *,
    training: bool = True,
    loss: Callable[[Any], torch.Tensor] | None = None,
    precision: str | None = None,
    unit_of: Callable[[str], int] | None = None,
    timeout_s: float = 120.0,
) -> Trace:
    """What one iteration of ``model`` on ``batch`` touches, found on fake tensors in a copy of this process.

    ``batch`` is a mapping (keyword arguments), a tuple or list (positional ones), or the only argument; only shapes and
    dtypes matter. ``loss`` makes the loss from what the model returns (default: its ``loss``, or the scalar itself).
    With ``precision``, floating parameters and inputs are taken to be of that; without, as they are. ``unit_of`` maps a
    parameter's name to the unit whose touches make a moment (default: the owning module). Parameters may be on meta.
    The bytes are those of the CPU's operators, so for an accelerator they are an estimate.
    """
    if precision is not None and precision not in _DTYPES:
        raise InvalidInput(f"precision must be one of {', '.join(Precision)}, found {precision!r}")
    dtype = None if precision is None else _DTYPES[precision]
    wanted = FakePassOptions(
        training=training,
        loss=loss,
        unit_of=unit_of,
        dtype_of=None if dtype is None else lambda _: dtype,
        input_dtype=dtype,
    )
    args, kwargs = _arguments(batch)
    try:
        return Trace.from_json(in_child(lambda: fake_pass(model, args, kwargs, wanted).to_json(), timeout_s))
    except ChildFailed as error:
        raise CannotTrace(
            f"{type(model).__name__} cannot be traced with fake tensors, so it will be recorded on its first iteration "
            f"instead: {error}"
        ) from error


def fake_pass(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], wanted: FakePassOptions) -> Trace:
    """One pass on fake tensors. It ruins the model and whatever its code touches: see [Note: where it happens]."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    named = dict(model.named_parameters())
    trainable = {name: parameter.requires_grad for name, parameter in named.items()}
    for name, parameter in named.items():
        _become_fake(name, parameter, fake_mode, wanted.dtype_of)
    for name, buffer in model.named_buffers():
        _become_fake(name, buffer, fake_mode, None)
    inputs = {id(tensor): _fake(tensor, fake_mode, wanted.input_dtype) for tensor in _tensors((args, dict(kwargs)))}
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: inputs[id(tensor)], (args, dict(kwargs)))
    recorder = FakePassRecorder(named, wanted.unit_of)
    away = {name for name in named if wanted.stays_on_host is not None and wanted.stays_on_host(name)}
    for name, parameter in named.items():
        if name in away:
            parameter._away = True  # type: ignore[attr-defined]  # a `FakeParameter` by now
        elif trainable[name]:
            parameter.register_post_accumulate_grad_hook(recorder.arrive)  # type: ignore[no-untyped-call]
    with fake_mode, torch.set_grad_enabled(wanted.training):
        for tensor in (*model.buffers(), *inputs.values()):
            recorder.count(tensor)
        recorder.start()
        try:
            with saved_tensors_hooks(recorder.pack, recorder.unpack):
                result = model(*args, **kwargs)
            if wanted.training:
                loss = _loss(result, wanted.loss)
                del result  # as in ``loss = model(**batch).loss``: what backward does not need is gone
                loss.backward()  # type: ignore[no-untyped-call]
            recorder.close()
        finally:
            recorder.stop()
    return Trace(
        model=type(model).__name__,
        tensors=tuple(
            Tensor(name=name, numel=parameter.numel(), trainable=trainable[name]) for name, parameter in named.items()
        ),
        moments=recorder.moments(),
        tokens=_tokens(args, kwargs),
    )


# ---- from real to fake


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype | None) -> torch.Tensor:
    """A fake tensor of the same shape on the CPU; a managed parameter that is not here has strides of zero."""
    dtype = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    with mode, torch.no_grad():
        made = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        if not expanded:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _become_fake(
    name: str, tensor: torch.Tensor, mode: FakeTensorMode, dtype_of: Callable[[str], torch.dtype] | None
) -> None:
    """Make the very object a fake tensor."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"{name!r} is a {type(tensor).__name__}, whose operators are its own")
    fake = _fake(tensor, mode, dtype_of(name) if dtype_of is not None else None)
    if isinstance(tensor, nn.Parameter):
        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
    attributes = {**vars(tensor), **vars(fake)}
    kind = type(fake)
    torch._C._swap_tensor_impl(tensor, fake)
    tensor.__class__ = kind
    tensor.__dict__.update(attributes)
    if isinstance(tensor, nn.Parameter):
        held: Any = tensor  # torch's stub does not know that None is allowed
        held._post_accumulate_grad_hooks = None  # else torch takes those of the tensor it was for its own


# ---- what goes in and comes out


def _arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        return (), batch
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Elements of the first input of whole numbers: token ids, as a rule."""
    first = kwargs.get("input_ids")
    inputs = [first] if isinstance(first, torch.Tensor) else _tensors((args, kwargs))
    return next((tensor.numel() for tensor in inputs if tensor.dtype in (torch.int64, torch.int32)), 0)


def _loss(result: Any, make: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    found: Any
    if make is not None:
        found = make(result)
    elif isinstance(result, Mapping):
        found = result.get("loss")
    else:
        found = getattr(result, "loss", result)
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        raise NoLoss(
            f"trace: expected a scalar loss with a gradient, found {what}; pass loss=..., a function that makes the "
            f"loss from what the model returns, or training=False for a forward pass alone"
        )
    return found
