"""A trace without running anything: one forward and backward on fake tensors, which have shapes but no memory.

[Note: where it happens]
In a forked copy of the process (`_child`). There every parameter and buffer *becomes* a fake one under its own
identity, so that lists, closures and tied modules which also hold it see the fake as well, and whatever the model's
own code leaves behind disappears with the copy. A fake pass that aborts the process, as one on a device that this
build of torch lacks does, ends the copy only.

[Note: moments of a fake pass]
As in the engine (`_moments`), a moment begins when an operator reads, or a backward node takes out of what was saved,
a parameter of a unit (by default: the module that owns it) that the present moment was not begun for; or when a
gradient arrives for a unit that it neither was begun for nor brought gradients for. Views read nothing. What comes
before the first moment belongs to it, and what lies between the last touch of forward and the first of backward (the
loss) to the former.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from ps_core._errors import InvalidInput
from ps_core._program import Precision
from ps_core._trace import Moment, Phase, Tensor, Trace
from ps_core.engine._child import ChildFailed, in_child
from ps_core.engine._tide import Tide

_aten = torch.ops.aten
_FLOPS = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}
_UNKNOWN_SIZES = (_aten.mkldnn_rnn_layer, _aten._cudnn_rnn, _aten.miopen_rnn)
"""Operators whose fakes say zero bytes of what they keep for backward: a peak several times too low."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class CannotTrace(InvalidInput):
    """The model does something that fake tensors cannot follow."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
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
    wanted = Wanted(
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


def fake_pass(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], wanted: Wanted) -> Trace:
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
    recorder = _Recorder(named, wanted.unit_of)
    for name, parameter in named.items():
        if trainable[name]:
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
        raise InvalidInput(
            f"trace: expected a scalar loss with a gradient, found {what}; pass loss=..., a function that makes the "
            f"loss from what the model returns, or training=False for a forward pass alone"
        )
    return found


# ---- recording


@dataclass(slots=True)
class _Beat:
    """One moment."""

    backward: bool
    name: str
    reads: frozenset[int]
    """Units it was begun for."""
    gains: set[int] = field(default_factory=set)
    """Units gradients arrived for."""
    touched: dict[int, None] = field(default_factory=dict)
    """Parameters, in order."""
    grads: dict[int, None] = field(default_factory=dict)
    nonmodel_bytes: int = 0
    flops: float = 0.0


class _Recorder(Tide):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """The tide of fake tensors, cut into moments by the parameters that the operators read."""

    def __init__(self, named: Mapping[str, nn.Parameter], unit_of: Callable[[str], int] | None) -> None:
        super().__init__("cpu")
        self._names = list(named)
        self._owners = {parameter.untyped_storage()._cdata: index for index, parameter in enumerate(named.values())}
        self._indices = {id(parameter): index for index, parameter in enumerate(named.values())}
        modules = {name.rpartition(".")[0]: None for name in named}
        by_module = {module: unit for unit, module in enumerate(modules)}
        unit_of = unit_of or (lambda name: by_module[name.rpartition(".")[0]])
        self._units = [unit_of(name) for name in named]
        self._beats: list[_Beat] = []
        self._flops_before = 0.0

    def moments(self) -> tuple[Moment, ...]:
        """All that was recorded."""
        return tuple(
            Moment(
                name=beat.name,
                phase=Phase.BACKWARD if beat.backward else Phase.FORWARD,
                reads=tuple(beat.touched),
                grads=tuple(beat.grads),
                nonmodel_bytes=beat.nonmodel_bytes,
                flops=beat.flops,
            )
            for beat in self._beats
        )

    def close(self) -> None:
        """The moment is over."""
        if self._beats:
            self._beats[-1].nonmodel_bytes = self.take_peak()

    def arrive(self, parameter: torch.Tensor) -> None:
        """A gradient came; the engine takes it away at once."""
        index = self._indices[id(parameter)]
        unit = self._units[index]
        beat = self._beats[-1] if self._beats else None
        if beat is None or not beat.backward or unit not in beat.reads | beat.gains:
            beat = self._begin(index, frozenset())
        beat.gains.add(unit)
        beat.grads[index] = None
        parameter.grad = None

    def _begin(self, first: int, reads: frozenset[int]) -> _Beat:
        self.close()
        backward = torch._C._current_graph_task_id() != -1
        owner = self._names[first].rpartition(".")[0] or self._names[first]
        beat = _Beat(backward, f"{'backward' if backward else 'forward'} of {owner}", reads)
        beat.flops, self._flops_before = self._flops_before, 0.0
        self._beats.append(beat)
        return beat

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Saved as it is: only the way back counts."""
        return tensor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        """A backward node takes what it saved; here the engine fetches, before any operator of the node runs."""
        self._touch((tensor,))
        return tensor

    def _touch(self, args: Iterable[Any]) -> None:
        read = dict.fromkeys(self._read(args))
        if not read:
            return
        units = frozenset(self._units[index] for index in read)
        beat = self._beats[-1] if self._beats else None
        backward = torch._C._current_graph_task_id() != -1
        if beat is None or beat.backward is not backward or not units <= beat.reads:
            beat = self._begin(next(iter(read)), units)
        beat.touched.update(read)

    def _read(self, args: Iterable[Any]) -> Iterable[int]:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if arg.layout is torch.strided and (key := arg.untyped_storage()._cdata) in self._owners:
                    yield self._owners[key]
            elif isinstance(arg, list | tuple):
                yield from self._read(arg)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note what the operator reads, run it, note what it made and what it cost."""
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        if packet in _UNKNOWN_SIZES and torch.is_grad_enabled():
            raise RuntimeError(f"what {packet} keeps for backward has no size in a fake pass")
        if not getattr(func, "is_view", False) and getattr(func, "namespace", "") != "prim":  # prim.device asks a fake
            self._touch((*args, *kwargs.values()))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        formula = _FLOPS.get(packet)
        if formula is not None and result is not NotImplemented:
            flops = float(formula(*args, **kwargs, out_val=result))
            if self._beats:
                self._beats[-1].flops += flops
            else:
                self._flops_before += flops
        return result

    def _sees_fakes(self) -> bool:
        return True

    def _counts(self, tensor: torch.Tensor) -> bool:
        return type(tensor) is FakeTensor and tensor.fake_device.type == self.device and tensor.layout is torch.strided
