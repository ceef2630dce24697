"""Refuse conversions of modules with managed parameters before any buffer is converted, and TorchScript of them.

``nn.Module._apply`` carries out ``to``, ``half``, ``to_empty`` and the like: children first, then parameters, then
buffers. A managed parameter refuses only when that reaches it, after other buffers have changed. So each module above a
managed parameter has an ``_apply`` of its own. That first runs the class's ``_apply`` with a function that converts
nothing, to find the managed parameters that the conversion reaches. It converts these, then the rest. No class of
PyTorch's or the user's is changed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import nn

from ps_core._errors import UnsupportedParameter
from ps_core.engine._gradients.managed_grad import ManagedGrad
from ps_core.engine._parameters.managed_parameter import ManagedParameter
from ps_core.engine._support.interrupts import defer_interrupts_installing
from ps_core.engine._support.refuse_programs import not_a_program
from ps_core.engine._tracing.batch_shape import MODULE_CALLS, BatchShape, batch_of

Convert = Callable[[torch.Tensor], torch.Tensor]
_APPLY = "_apply"


class ModuleGuards:
    """The guards on the modules of one model; modules that were moved out of it keep theirs."""

    def __init__(self) -> None:
        self._guards: list[ModuleGuard] = []

    @defer_interrupts_installing
    def install(self, model: nn.Module) -> None:
        """Guard each module that has managed parameters, no guard yet, and no ``_apply`` among its own attributes.

        A shallow copy has the guard of the module that it was made of; it gets its own here.
        """
        self._guards = [guard for guard in self._guards if guard.in_place]
        for module in model.modules():
            found = vars(module).get(_APPLY)
            if (found is None or _is_of_another(found, module)) and _holds_managed(module):
                self._guards.append(ModuleGuard(module))

    @defer_interrupts_installing
    def remove(self, model: nn.Module | None) -> None:
        """Remove all guards, and those that shallow copies in the model have, so that modules can be copied."""
        for guard in self._guards:
            guard.remove()
        self._guards.clear()
        for module in () if model is None else model.modules():
            if _is_of_another(vars(module).get(_APPLY), module):
                del vars(module)[_APPLY]


class ModuleGuard:
    """Take the place of one module's ``_apply``. It holds no reference to the module."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        vars(module)[_APPLY] = self  # not setattr: a compiled module hands attributes on to the one inside

    def __call__(self, fn: Convert, *args: Any, **kwargs: Any) -> Any:
        """Convert the module, unless that would give a managed parameter other memory."""
        module = self._module()
        if module is None:
            raise UnsupportedParameter(
                "this module was made by copy.copy() from one under management, and cannot be converted: use "
                "copy.deepcopy(model) inside `with materialized(model):`"
            )
        cls: Any = type(module)  # `_apply` has no types
        if not isinstance(fn, _SkipManaged) and _holds_managed(module):
            skip = _SkipManaged(fn)
            cls._apply(module, skip, *args, **kwargs)
            skip.convert_managed()
            fn = skip
        return cls._apply(module, fn, *args, **kwargs)

    @property
    def _torchscript_modifier(self) -> Any:
        """Refuse TorchScript: ``torch.jit`` asks every callable attribute of a module for this first."""
        module = self._module()
        if module is not None and _holds_managed(module):
            raise not_a_program()
        raise AttributeError("_torchscript_modifier")

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleGuard:
        """Guard the module's copy, which the engine makes with fake tensors; hooks refuse any other copy."""
        copied = memo.get(id(self._module()))
        if copied is None:
            raise TypeError(
                f"{type(self._module()).__name__}.__deepcopy__ copies attributes without passing on its memo"
            )
        return ModuleGuard(copied)

    @property
    def in_place(self) -> bool:
        """Return True if the module exists, and has this guard."""
        module = self._module()
        return module is not None and vars(module).get(_APPLY) is self

    def remove(self) -> None:
        """Give the module back the ``_apply`` of its class, unless it was replaced since."""
        module = self._module()
        if module is not None and self.in_place:
            del vars(module)[_APPLY]


def called_part() -> BatchShape | None:
    """Return the class and the shapes of the part of a managed model that is being called; None: none is.

    The caller runs in that call. Where parts are nested, it is the outermost one.
    """
    frame: FrameType | None = sys._getframe(1)
    found: FrameType | None = None
    while frame is not None:
        if frame.f_code in MODULE_CALLS and isinstance(vars(frame.f_locals["self"]).get(_APPLY), ModuleGuard):
            found = frame
        frame = frame.f_back
    if found is None:
        return None
    given = found.f_locals
    return replace(batch_of(given["args"], given["kwargs"]), part=type(given["self"]).__qualname__)


class _SkipManaged:
    """Note the managed parameters that a conversion reaches; after `convert_managed` convert all tensors but these."""

    def __init__(self, fn: Convert) -> None:
        self._fn, self._converts = fn, False
        self._managed: dict[str, nn.Parameter] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, ManagedParameter):
            self._managed[str(id(tensor))] = tensor
        elif self._converts and not isinstance(tensor, ManagedGrad):
            return self._fn(tensor)
        return tensor

    def convert_managed(self) -> None:
        """Convert the managed parameters and their gradients as a module's: they raise if their memory would change."""
        module = nn.Module()
        module._parameters.update(self._managed)
        apply: Any = module._apply  # which has no types
        apply(self._fn)
        self._converts = True

    def __repr__(self) -> str:
        return repr(self._fn)  # by which metrics of torchmetrics tell conversions apart


def _is_of_another(found: object, module: nn.Module) -> bool:
    """Return True if a module's ``_apply`` is the guard of the module that it is a shallow copy of."""
    return isinstance(found, ModuleGuard) and found._module() is not module


def _holds_managed(module: nn.Module) -> bool:
    """Return True if a module or one of its children has managed parameters."""
    return any(isinstance(parameter, ManagedParameter) for parameter in module.parameters())
