"""Wrap every call of a module in a context, however the call ends.

Forward hooks are not enough: an interrupt (Ctrl-C) skips them. ``nn.Module`` calls what ``module.compile()`` stores in
a module in place of the module itself. So the wrapper is stored there. No class is changed, and the module's
``forward`` keeps its signature.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn

Call = Callable[..., Any]
COMPILED_CALL_ATTRIBUTE = "_compiled_call_impl"


class ModuleCallWrapper:
    """Wrap one module's calls until it is removed."""

    def __init__(
        self,
        module: nn.Module,
        around: Callable[[Call, Any, Mapping[str, Any]], Any],
        before_script: Callable[[], None] | None = None,
    ) -> None:
        """Wrap the calls in ``around``; ``before_script`` may raise when ``torch.jit`` is to compile the module."""
        self._module = weakref.ref(module)
        self.around, self._before_script = around, before_script
        self._compiled: Call | None = compiled_call(module)
        setattr(module, COMPILED_CALL_ATTRIBUTE, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's call in the context; ``nn.Module`` calls this in place of the module."""
        call = self._compiled
        if call is None:
            module = self._module()
            assert module is not None, "it is being called"
            call = module._call_impl
        return self.around(call, args, kwargs)

    @property
    def _torchscript_modifier(self) -> NoReturn:
        """Call ``before_script``: ``torch.jit`` asks every callable attribute of a module for this first."""
        if self._before_script is not None:
            self._before_script()
        raise AttributeError("_torchscript_modifier")

    @property
    def module(self) -> nn.Module | None:
        """Return the module; None if it is gone."""
        return self._module()

    @property
    def in_place(self) -> bool:
        """Return True if the wrapper is still installed."""
        module = self._module()
        return module is not None and vars(module).get(COMPILED_CALL_ATTRIBUTE) is self

    def remove(self) -> None:
        """Remove the wrapper, unless the module's call was replaced since."""
        module = self._module()
        if module is None or not self.in_place:
            return
        if self._compiled is None:
            delattr(module, COMPILED_CALL_ATTRIBUTE)
        else:
            setattr(module, COMPILED_CALL_ATTRIBUTE, self._compiled)


def compiled_call(module: nn.Module) -> Call | None:
    """Return the call that ``module.compile()`` installed; None if there is none."""
    found: Call | None = vars(module).get(COMPILED_CALL_ATTRIBUTE)
    return found._compiled if isinstance(found, ModuleCallWrapper) else found
