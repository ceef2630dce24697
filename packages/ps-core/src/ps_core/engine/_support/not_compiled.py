"""Keep PyTorch's compiler away from functions of the engine that are called while compiled code runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame as _frames

F = TypeVar("F", bound=Callable[..., Any])
_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def not_compiled(function: F) -> F:
    """Decorate a function that must not be compiled, nor what it calls.

    Compiled code calls hooks and modes while the compiler listens, which would compile each of them anew.
    `torch.compiler.disable` would do as well, but imports the compiler: seconds, and much memory.
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIPPED)
    return function


def graph_break(function: F) -> F:
    """Decorate a function that compiled code may call: it runs as written, and so does what it calls."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "it is a step of the engine, whose kernels are compiled already: leave fullgraph=True out"
    )
    return not_compiled(function)


def called_by_compiler(function: F) -> F:
    """Decorate a function that the compiler calls instead of tracing it: an exception of it is raised.

    A traced exception is not raised by PyTorch 2.11, which runs the whole function uncompiled then.
    `torch.compiler.assume_constant_result` would do as well, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
