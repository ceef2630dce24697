"""Run compiled blocks, each as one unit: all its parameters are fetched, and are ordinary ones meanwhile.

[Note: a compiled block]
Compiled code reads memory without calling the engine. ``torch.compile`` accepts no parameter of another class. So
before a compiled block runs, all its parameters are fetched in one moment. They have an ordinary class until it has
run. Nothing moves meanwhile, because compiled code calls no hook of the engine. Tensors saved for backward go through
the engine's saved-tensor hooks, as from any code. The block's backward unpacks all saved tensors before it uses any of
them. So the first one fetches all others. Parameters with a gradient in the weight slot are left out: their part of
backward is done.

A block may be given parameters that it does not hold, or views of them. The compiler looks at what a view was made of.
So for this call these parameters are treated like the block's own.

Compiled code also makes tensors that no count of non-model bytes sees. Those that leave the block, as results or for
backward, are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ps_core._errors import UnsupportedParameter
from ps_core.engine._execution.engine import Engine
from ps_core.engine._parameters.managed_parameter import ManagedParameter, make_plain
from ps_core.engine._support.interrupts import defer_interrupts, defer_interrupts_installing
from ps_core.engine._support.module_call import Call, ModuleCallWrapper, compiled_call

SUGGESTION = "compile its blocks instead, before or after: `for block in model.layers: block.compile()`"

_GRAPHS = "triton.cudagraphs"
"""The compiler's setting that both modes switch on."""
OPTIMIZED_MODULE = "OptimizedModule"
"""The class of what ``torch.compile(module)`` returns, by name: importing it takes long."""


class CompiledBlock:
    """Fetch one compiled block's parameters around each of its calls."""

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        self._engine = engine
        self._parameters = [each for each in module.parameters() if isinstance(each, ManagedParameter)]
        self._records = [parameter._record for parameter in self._parameters]
        self._running = False
        for record in self._records:
            record.compiled_block = self._records
        self._around = weakref.ref(ModuleCallWrapper(module, self._run))
        """The wrapper, which only the block may hold: it holds the compiled call, and that holds the block."""

    @property
    def module(self) -> nn.Module | None:
        """Return the block; None if it is gone, or its call was replaced."""
        around = self._around()
        return around.module if around is not None and around.in_place else None

    def _run(self, call: Call, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if self._running or self._engine.usability.materializing:  # or its parameters are plain already
            return call(*args, **kwargs)
        engine, depth = self._engine, self._engine.saved.depth
        parameters, records = self._parameters, self._records
        if given := self._given((args, kwargs)):
            parameters = [*parameters, *given]
            records = [*records, *(parameter._record for parameter in given)]
        engine.access.touch(records)
        try:
            self._begin(parameters)
            result = call(*args, **kwargs)
        finally:
            self._end(parameters, depth)
        engine.access.check_unchanged(records)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                engine.passes.count(tensor)
        return result

    def _given(self, values: Any) -> list[ManagedParameter]:
        """Return other modules' parameters that a call is given, or is given views of."""
        found: dict[ManagedParameter, None] = {}
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                parameter = value if isinstance(value, ManagedParameter) else value._base
                if isinstance(parameter, ManagedParameter) and parameter._owner is self._engine:
                    found[parameter] = None
        for own in self._parameters if found else ():
            found.pop(own, None)
        return list(found)

    @defer_interrupts
    def _begin(self, parameters: list[ManagedParameter]) -> None:
        self._running = True
        self._engine.saved.count_kept(on=True)
        if torch.is_grad_enabled():
            self._engine.saved.push_for_compiled()
        for parameter in parameters:
            make_plain(parameter)

    @defer_interrupts
    def _end(self, parameters: list[ManagedParameter], depth: int) -> None:
        self._running = False
        self._engine.saved.count_kept(on=False)
        for parameter in parameters:
            parameter.__class__ = ManagedParameter
        self._engine.saved.pop_to(depth)

    def remove(self) -> None:
        """Unwrap the block's call, and treat the block like any other module."""
        around = self._around()
        if around is not None:
            around.remove()
        for record in self._records:
            record.compiled_block = []


class CompiledBlocks:
    """The compiled blocks of one model; blocks may be compiled at any time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.blocks: list[CompiledBlock] = []

    def __len__(self) -> int:
        return len(self.blocks)

    @defer_interrupts_installing
    def refresh(self, model: nn.Module) -> None:
        """Wrap the blocks that were compiled since the last call of this; unwrap those that are a part of one now."""
        outermost = dict.fromkeys(_outermost_compiled(model))
        for block in self.blocks:
            if block.module not in outermost:
                block.remove()
        self.blocks = [block for block in self.blocks if block.module is not None]
        found = [
            module for module in outermost if not isinstance(vars(module).get("_compiled_call_impl"), ModuleCallWrapper)
        ]
        if found and not self._engine.resident:
            refuse_cuda_graphs(model)
        self.blocks += [CompiledBlock(module, self._engine) for module in found]

    def remove(self) -> None:
        """Unwrap the calls of all compiled blocks."""
        for block in self.blocks:
            block.remove()
        self.blocks.clear()


def is_compiled(module: nn.Module) -> bool:
    """Return True if ``torch.compile`` returned the module, or compiled it in place."""
    return type(module).__name__ == OPTIMIZED_MODULE or compiled_call(module) is not None


def refuse_compiled(model: nn.Module) -> None:
    """Raise `UnsupportedParameter` if the whole model is compiled: the accelerator would need all of it at once."""
    if is_compiled(model):
        name = type(getattr(model, "_orig_mod", model)).__name__
        raise UnsupportedParameter(
            f"this {name} is compiled as a whole, so all of it would be fetched at once: {SUGGESTION}"
        )


def refuse_cuda_graphs(model: nn.Module) -> None:
    """Raise `UnsupportedParameter` if a block is compiled to CUDA graphs, which read fixed addresses at each replay."""
    for name, module in model.named_modules():
        call = module if type(module).__name__ == OPTIMIZED_MODULE else compiled_call(module)
        config = getattr(call, "get_compiler_config", lambda: None)()
        if config and config.get(_GRAPHS):
            raise UnsupportedParameter(
                f"{name!r} is compiled to CUDA graphs (mode='reduce-overhead' or 'max-autotune'), which replay at the "
                "addresses of their first run, and its parameters move: compile it with mode='default' or "
                "mode='max-autotune-no-cudagraphs'"
            )


def _outermost_compiled(model: nn.Module) -> Iterator[nn.Module]:
    left = [model]
    while left:
        for child in left.pop()._modules.values():
            if child is not None and is_compiled(child):
                yield child
            elif child is not None:
                left.append(child)
