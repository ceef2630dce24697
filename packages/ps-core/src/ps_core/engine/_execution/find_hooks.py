"""Find the hooks of a managed model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ps_core._errors import InvalidInput
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.hooks import ModelHooks
from ps_core.engine._parameters.managed_parameter import ManagedParameter, is_ordinary_for_a_block
from ps_core.engine._support.module_call import COMPILED_CALL_ATTRIBUTE


def is_managed(model: nn.Module) -> bool:
    """Return True if ``chunked`` manages the parameters of a model, or of a part of it."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"expected a torch.nn.Module, found {_found(model)}")
    managed = any(isinstance(parameter, ManagedParameter) for parameter in model.parameters())
    return managed or hooks_around(model) is not None


def hooks_around(model: nn.Module) -> ModelHooks | None:
    """Return the hooks that `chunked` put on this very model, whose parameters may all have been replaced since."""
    around = getattr(vars(model).get(COMPILED_CALL_ATTRIBUTE), "around", None)
    hooks = getattr(around, "__self__", None)
    return hooks if isinstance(hooks, ModelHooks) and not hooks.engine.usability.released else None


def hooks_of(model: nn.Module) -> ModelHooks:
    """Return the hooks of a managed model; raise `InvalidInput` if the model is not managed, or has two that are."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"expected a model that chunked(...) has under management, found {_found(model)}")
    found: dict[Any, str] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ManagedParameter):
            owner = parameter._owner
            assert isinstance(owner, Engine), "every owner is an Engine"
            found.setdefault(owner.management, name)
    if len(found) > 1:
        which = " and ".join(f"one with {name!r}" for name in found.values())
        raise InvalidInput(
            f"this {type(model).__name__} holds {len(found)} models that chunked(...) has under management, {which}: "
            "call this for each of them, as in `with materialized(first), materialized(second):`"
        )
    if any(map(is_ordinary_for_a_block, model.parameters())) and not found:
        raise InvalidInput(
            f"this is inside a block of materialized(...), where parameters of {type(model).__name__} are ordinary "
            "ones: work with them there, or call this after the block"
        )
    management = next(iter(found), None) or hooks_around(model)
    if not isinstance(management, ModelHooks):
        raise InvalidInput(f"this {type(model).__name__} is not under management: call chunked(model, ...) first")
    return management


def _found(given: object) -> str:
    return repr(given) if given is None or isinstance(given, str) else f"a {type(given).__name__}"
