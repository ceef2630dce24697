"""Refuse to make another program of a managed model, such as TorchScript or a graph for export.

Such a program refers to the memory that parameters have now, which is given to others later.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._C import _TorchDispatchModeKey

from ps_core._errors import UnsupportedParameter

transforms, tracing_state = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
mode_of_kind = torch._C._get_dispatch_mode
FAKE, PROXY = _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY


def not_a_program(maker: str = "torch.jit (script, trace or an export that uses them)") -> UnsupportedParameter:
    """Return the error for a function of PyTorch that makes another program of a managed model."""
    return UnsupportedParameter(
        f"{maker} would make a program of parameters that are under management, whose memory comes and goes: "
        "make it of a copy: plain = copy.deepcopy(model) inside `with materialized(model):`"
    )


def refuse_script(name: str, module: nn.Module) -> None:
    """Raise if a module is TorchScript; ``name``: its name, for the message."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedParameter(
            f"{name!r} is TorchScript, which reads parameters without calling hooks: use the Python module instead"
        )


def check_call(name: str) -> None:
    """Raise if a managed model is called by something that makes another program of it; ``name``: its class."""
    if transforms() is not None:
        raise UnsupportedParameter(
            f"this {name} is under management and cannot run inside torch.func transforms, which would read parameters "
            "that are not there: release(model) first"
        )
    if mode_of_kind(FAKE) is not None:
        raise UnsupportedParameter(
            f"this {name} is under management and cannot run on fake tensors, as torch.export makes them: "
            "release(model) first, or use a copy: plain = copy.deepcopy(model) inside `with materialized(model):`"
        )
    if mode_of_kind(PROXY) is not None:
        raise not_a_program("make_fx")
    if tracing_state() is not None:
        raise not_a_program()
