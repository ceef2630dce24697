"""Infer from a model how its constructors would have filled its tensors, and record that on a tape.

[Note: the plain run]
A model built without memory gets the numbers of one built on the CPU. Initialisation begins with the same state of the
generator, and leaves the generator in the same state. A model does not say how it was built, so that is inferred:

1. A Hugging Face model is built again from its ``config``, on the tape. The result may have other names, shapes or
   types, if the model was changed since, or built with further arguments. Then it is initialised as in 2, and after
   that by its ``_init_weights``: the same distributions, other numbers. A warning says so.
2. Any other module, as PyTorch's own are built: its children in order of registration, then its own
   ``reset_parameters`` (``_reset_parameters``, ``initialise``). What else a constructor did cannot be known. A tensor
   that nothing initialises raises. What a constructor changed in its children after they were built is not repeated.
   PyTorch counts changes in place, so it shows where there were more of them: a warning names the parameters.

A tensor that several modules share gets the values that the first of them gives it. Tensors with memory stay as they
are.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ps_core._errors import UnsupportedParameter
from ps_core.engine._parameters.meta_init.tape import Tape
from ps_core.engine._parameters.meta_init.tape_entries import ViewSpec, place_of

INITIALISERS = ("reset_parameters", "_reset_parameters", "initialise")
HUGGING_FACE = ("config", "initialize_weights", "_init_weights")
STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)
"""Modules whose layers are copies of one."""
BUILT_OTHERWISE = (nn.AdaptiveLogSoftmaxWithLoss,)
"""Modules whose constructors do not call their initialisers."""
SUGGESTION = "give the module a reset_parameters() that fills it, or build the module on the CPU"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ConstructorRecorder:
    """Record the initialisation of one model; see [Note: the plain run]."""

    def __init__(self, model: nn.Module) -> None:
        self.tape = Tape()
        self.sources: dict[int, ViewSpec | Tensor] = {}
        """Sources of values of tensors without memory, by the tensor's id."""
        self._alive: list[Any] = []
        """References that keep the ids and storages named here from being reused."""
        self._entered: dict[int, int] = {}
        """Modules, numbered in order of their visit."""
        self._filled: dict[int, int] = {}
        """The number of the first module that filled a parameter."""
        self._done: set[int] = set()
        """Modules of Hugging Face models that are initialised."""
        refuse_lazy(model)
        before = {id(each): each._version for each in model.parameters() if each.is_meta}
        self._visit("", model)
        for each in self.sources:
            before.pop(each, None)  # these were built again exactly
        for name, tensor in tensors_of(model):
            if tensor.is_meta:
                self._check_filled(name, tensor)
        self._warn_of_changes(model, before)

    def _warn_of_changes(self, model: nn.Module, before: dict[int, int]) -> None:
        """Warn of parameters that their constructor changed more often, by PyTorch's version counters, than the record
        does.
        """
        names = [
            name
            for name, parameter in model.named_parameters()
            if id(parameter) in before and before[id(parameter)] > parameter._version - before[id(parameter)]
        ]
        if names:
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            warnings.warn(
                f"{names[0]!r}{others} on meta were changed by a constructor after their own modules had initialised "
                "them, which cannot be repeated: they start from other values than on the CPU. Build the model on the "
                "CPU, or do such changes in a reset_parameters() of the module that makes them",
                stacklevel=2,
            )

    def _check_filled(self, name: str, tensor: Tensor) -> None:
        self._alive.append(tensor)
        source = self.sources.setdefault(id(tensor), place_of(tensor))
        if isinstance(source, ViewSpec) and not self.tape.contents.is_complete(source):
            what = "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
            raise UnsupportedParameter(f"the {what} {name!r} is on meta and nothing initialises it: {SUGGESTION}")

    # ---- the walk ----

    def _visit(self, name: str, module: nn.Module) -> None:
        if id(module) in self._entered or not any(tensor.is_meta for _, tensor in tensors_of(module)):
            return
        entered = self._entered[id(module)] = len(self._entered)
        hugging_face = all(hasattr(module, each) for each in HUGGING_FACE)
        if hugging_face and self._build_again(name, module):
            return
        for child_name, child in module.named_children():
            if isinstance(module, STACKS) and child is module.layers:
                self._visit_copies(_join(name, child_name), child)
            else:
                self._visit(_join(name, child_name), child)
        initialiser = self._initialiser(module)
        if initialiser is not None:
            shared = {key for key, first in self._filled.items() if first < entered}
            self._run(module, initialiser, shared)
            for parameter in module.parameters():
                self._filled.setdefault(id(parameter), entered)
        if hugging_face:
            self._run(module, lambda: self._init_weights(module, module), set())

    def _visit_copies(self, name: str, layers: Any) -> None:
        """Record layers that are copies of the first one, as their constructor made them; copies draw no random
        numbers.
        """
        first = layers[0]
        self._visit(_join(name, "0"), first)
        for layer in layers[1:]:
            tensors = zip(tensors_of(layer), tensors_of(first), strict=True)
            pairs = [pair for pair in tensors if pair[0][1].is_meta]
            with self.tape.recording():
                for (_, copy), (_, original) in pairs:
                    copy.copy_(original)
            self._entered.update((id(each), len(self._entered)) for each in layer.modules())

    def _initialiser(self, module: nn.Module) -> Callable[[], object] | None:
        # Look at the class: a submodule may have such a name too.
        name = next((each for each in INITIALISERS if callable(getattr(type(module), each, None))), None)
        if name is None or isinstance(module, BUILT_OTHERWISE):
            return None
        method = getattr(module, name)
        try:
            inspect.signature(method).bind()
        except TypeError:
            return None  # It takes arguments, so it is something else of that name.
        return cast(Callable[[], object], method)

    def _run(self, module: nn.Module, code: Callable[[], object], shared: set[int]) -> None:
        with _spared(module, shared), self.tape.recording():
            code()

    # ---- Hugging Face ----

    def _build_again(self, name: str, module: nn.Module) -> bool:
        """Build the model again from its config; return True if this gave the same model, whose tensors all have
        sources.
        """
        dtype = next((each.dtype for each in module.parameters() if each.dtype in DTYPES), torch.float32)
        with self.tape.attempt() as undo:
            try:
                with _default_dtype(dtype), self.tape.recording():
                    twin = type(module)(deepcopy(module.config))
                why = self._adopt(module, twin)
            # Whatever a constructor raises that wants other arguments: there is another way.
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if why is not None:
                undo()
        if why is None:
            self._entered.update((id(each), len(self._entered)) for each in module.modules())
            self._done.update(id(each) for each in module.modules())
            return True
        warnings.warn(
            f"{name or 'the model'!r} ({type(module).__name__}) is not what its config alone builds ({why}): its "
            "values are drawn from the same distributions as on the CPU, but are not the same numbers",
            stacklevel=2,
        )
        return False

    def _adopt(self, module: nn.Module, twin: nn.Module) -> str | None:
        """Use the tensors of the model that was built again as sources; or return what differs."""
        ours, theirs = dict(tensors_of(module)), dict(tensors_of(twin))
        if ours.keys() != theirs.keys():
            return f"{sorted(ours.keys() ^ theirs.keys())[0]} is in one of them"
        for name, tensor in ours.items():
            other = theirs[name]
            if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
                return f"{name} is {other.dtype} {tuple(other.shape)} there"
        self._alive.append(twin)
        for name, tensor in ours.items():
            self.sources.setdefault(id(tensor), self.tape.source(theirs[name]))
        return None

    def _init_weights(self, owner: Any, module: nn.Module) -> None:
        """Initialise modules in Hugging Face's order: children first, inner models by their own rules, each once."""
        for child in module.children():
            inner = all(hasattr(child, each) for each in HUGGING_FACE)
            self._init_weights(child if inner else owner, child)
        if id(module) not in self._done:
            self._done.add(id(module))
            owner._init_weights(module)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, buffer and tensor attribute of a module, under each of its names."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for tensors in (part._parameters, part._buffers, vars(part)):
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor):
                    yield _join(prefix, name), tensor


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _spared(module: nn.Module, shared: set[int]) -> Iterator[None]:
    """Write nothing, in this context, to tensors with memory or to the module's own parameters that are shared."""
    changed: list[tuple[dict[str, Any], str, Tensor]] = []
    for part in module.modules():
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in holders:
            for name, tensor in tensors.items():
                if tensor is None or (tensor.is_meta and not (part is module and id(tensor) in shared)):
                    continue
                changed.append((tensors, name, tensor))
    try:
        for tensors, name, tensor in changed:
            blank = torch.empty_like(tensor, device="meta")
            tensors[name] = nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
        yield
    finally:
        for tensors, name, tensor in changed:
            tensors[name] = tensor


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def refuse_lazy(model: nn.Module) -> None:
    """Raise `UnsupportedParameter` if a parameter or buffer has no shape yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise UnsupportedParameter(
                f"{name!r} has no shape yet, its module is lazy: call the model once before chunked()"
            )
