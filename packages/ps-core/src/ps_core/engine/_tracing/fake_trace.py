"""Trace a model without computing: one forward and backward on fake tensors, in a copy of the model.

The trace runs in this process, whatever device the model is on (`fake_copy`, `isolation`). Operators are those of the
CPU.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ps_core._errors import InvalidInput
from ps_core._extents import Precision
from ps_core._trace import Tensor, Trace
from ps_core.engine._support.interrupts import defer_interrupts_installing
from ps_core.engine._support.log import log_line
from ps_core.engine._tracing.fake_copy import CannotCopy, FakeTensors
from ps_core.engine._tracing.fake_isolation import Isolation
from ps_core.engine._tracing.fake_leftovers import remove_leftovers
from ps_core.engine._tracing.fake_recorder import FakePassRecorder
from ps_core.engine._tracing.fake_snapshot import CannotRewind, Snapshot

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call: by position and by name."""

_TORCH = str(Path(torch.__file__).parent)
_ENGINE = str(Path(__file__).parents[1])
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class CannotTrace(InvalidInput):
    """Say that the model does something that fake tensors cannot follow."""


class NoLoss(InvalidInput):
    """Say that the model returns no scalar loss with a gradient."""


@dataclass(frozen=True, kw_only=True)
class FakePassOptions:
    """Options of a fake pass."""

    training: bool = True
    """True if backward follows forward."""
    loss: Callable[[Any], torch.Tensor] | None = None
    """Makes the loss from the model's output; None: its ``loss``, or the scalar itself."""
    unit_of: Callable[[str], int] | None = None
    """The unit of a parameter's name; None: the module that owns it."""
    dtype_of: Callable[[str], torch.dtype] | None = None
    """The type that a floating-point parameter is computed in; None: its own."""
    input_dtype: torch.dtype | None = None
    """The type that floating-point inputs are cast to; None: their own."""
    stays_on_host: Callable[[str], bool] | None = None
    """True if a parameter, by name, is a table of which only rows are moved; None: none is."""
    timeout_s: float = 120.0
    """Seconds after which the next operator ends the pass."""


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
    """Trace what one iteration of ``model`` on ``batch`` touches, on fake tensors in a copy of the model.

    ``batch`` is a mapping (keyword arguments), a tuple or list (positional ones), or the only argument. Only shapes and
    dtypes matter. ``loss`` makes the loss from the model's output (default: its ``loss``, or the scalar itself). With
    ``precision``, floating parameters and inputs are taken to be of that type; without, as they are. The trace says
    which type that is. ``unit_of`` maps a parameter's name to the unit whose touches make a moment (default: the owning
    module). Parameters may be on meta.
    The bytes are those of the CPU's operators, so for an accelerator they are an estimate.

    `CannotTrace` is raised if the model does what fake tensors cannot follow, or if the pass exceeds ``timeout_s``. The
    model's Python code runs once, on the copy: what it prints or writes elsewhere is done.
    """
    if precision is not None and precision not in _DTYPES:
        raise InvalidInput(f"precision must be one of {', '.join(Precision)}, found {precision!r}")
    dtype = None if precision is None else _DTYPES[precision]
    options = FakePassOptions(
        training=training,
        loss=loss,
        unit_of=unit_of,
        dtype_of=None if dtype is None else lambda _: dtype,
        input_dtype=dtype,
        timeout_s=timeout_s,
    )
    args, kwargs = _arguments(batch)
    try:
        traced = fake_pass(model, args, kwargs, options)
        return replace(traced, precision=_own_precision(model) if precision is None else precision)
    except InvalidInput:
        raise
    except Exception as error:
        raise CannotTrace(
            f"{type(model).__name__} cannot be traced with fake tensors, so it will be recorded on its first iteration "
            f"instead: {describe(error)}"
        ) from error


@defer_interrupts_installing
def fake_pass(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: FakePassOptions,
    shared: Iterable[object] = (),
) -> Trace:
    """Trace one pass of a copy of the model; see [Note: what a fake pass leaves alone] in `isolation`.

    Objects in ``shared`` belong to the model and are not copied. Whatever the model's code raises is raised here. An
    interrupt ends the pass at its next operator: within FakeTensorMode's own code it could end the process.
    """
    with Isolation.alone():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        made: list[weakref.ref[torch.UntypedStorage]] = []
        try:
            return _traced(mode, model, (args, dict(kwargs)), options, shared, made)
        except Exception as error:
            _forget_frames(error)
            raise
        finally:
            kept = remove_leftovers(mode, made)
            if kept:
                log_line(f"{type(model).__name__}: fake tensors of its traced pass are still held by {', '.join(kept)}")


def _traced(
    mode: FakeTensorMode,
    model: nn.Module,
    given: Arguments,
    options: FakePassOptions,
    shared: Iterable[object],
    made: list[weakref.ref[torch.UntypedStorage]],
) -> Trace:
    """Do the work of `fake_pass`, and append the storages of all fake tensors to ``made``."""
    fakes, recorder, copied = FakeTensors(mode), None, None
    originals = dict(model.named_parameters())
    isolation, snapshot = Isolation(), Snapshot(model)
    try:
        isolation.enter(mode, torch.enable_grad() if options.training else torch.no_grad())
        named = {name: fakes.fake(each, name, _dtype_of(name, options)) for name, each in originals.items()}
        given = fakes.replace(given, options.input_dtype)
        recorder = FakePassRecorder(named, options.unit_of, options.timeout_s)
        isolation.add(fakes)
        copied = fakes.copy(model, (*shared, *snapshot.generators))
        for name, parameter in named.items():
            if options.stays_on_host is not None and options.stays_on_host(name):
                parameter._on_host = True  # type: ignore[attr-defined]  # a `FakeParameter` by now
            elif originals[name].requires_grad:
                parameter.register_post_accumulate_grad_hook(recorder.arrive)  # type: ignore[no-untyped-call]
        for tensor in (*copied.buffers(), *_tensors(given)):
            recorder.count(tensor)
        isolation.track(recorder)
        _forward_backward(copied, given, options, recorder)
        return Trace(
            model=type(model).__name__,
            tensors=tuple(
                Tensor(name=name, numel=each.numel(), trainable=each.requires_grad) for name, each in originals.items()
            ),
            moments=recorder.moments(),
            activations=recorder.moved_activations().activations,
            tokens=_tokens(*given),
        )
    except (KeyboardInterrupt, SystemExit):
        snapshot.discard()  # raised by the model's call, which is not repeated
        raise
    finally:
        isolation.restore()
        snapshot.restore()
        made += () if recorder is None else recorder.release()
        for module in () if copied is None else list(copied.modules()):
            vars(module).clear()  # break cycles with its hooks, so that it is freed at once


def _forward_backward(model: nn.Module, given: Arguments, options: FakePassOptions, recorder: FakePassRecorder) -> None:
    args, kwargs = given
    with saved_tensors_hooks(recorder.pack, recorder.unpack):
        result = model(*args, **kwargs)
    if options.training:
        loss = _loss(result, options.loss)
        del result  # as in ``loss = model(**batch).loss``: what backward does not need is gone
        _check_leaves(loss)
        torch.autograd.backward(loss)  # unlike `Tensor.backward`, it leaves function modes on
    recorder.close()


def describe(error: Exception) -> str:
    """Return one line that says what ended a fake pass, and where in the user's code."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, CannotCopy | CannotRewind | TimeoutError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}{_where(error)}"


def _forget_frames(error: BaseException) -> None:
    """Clear the variables of all frames of an exception, which hold fake tensors."""
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and each not in seen:
            seen.append(each)
            traceback.clear_frames(each.__traceback__)
            left += [each.__context__, each.__cause__]


def _where(error: Exception) -> str:
    """Return the innermost line outside PyTorch and this package: usually the model's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_TORCH, _ENGINE, "<")):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def _check_leaves(loss: torch.Tensor) -> None:
    """Raise if backward would give a gradient without memory to a real tensor."""
    left, seen = [loss.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None
        if leaf is not None and not isinstance(leaf, FakeTensor):
            raise RuntimeError(
                f"a function of the model's own (torch.autograd.Function) takes a tensor of shape {tuple(leaf.shape)} "
                "that is not reached through the model"
            )
        left += [following for following, _ in node.next_functions]


def _dtype_of(name: str, options: FakePassOptions) -> torch.dtype | None:
    return None if options.dtype_of is None else options.dtype_of(name)


# ---- what goes in and comes out


def _arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        return (), batch
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


def _own_precision(model: nn.Module) -> str:
    """Return the precision of most elements of the model's floating-point parameters; "" if it has no name here."""
    counts = Counter[torch.dtype]()
    for parameter in model.parameters():
        counts[parameter.dtype] += parameter.numel() * parameter.is_floating_point()
    most = max(counts, key=counts.__getitem__, default=None)
    return next((name for name, dtype in _DTYPES.items() if dtype is most), "")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of elements of the first integer input: usually token ids."""
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
