"""Engine tests compare bits: the first run in a process, in which libraries still choose their ways, is thrown away."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from _cases import CASES
from _reference import Settings, plain
from _runs import children


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small, and threads that wait for each other are slow where other work shares the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def warm_up(one_thread: None) -> None:
    """Run a few of the cases for nothing."""
    for case in CASES:
        if case.name in ("tied", "multihead_attention", "conv"):
            for precision in ("fp32", "bf16"):
                plain(case.run, Settings(precision=precision))


@pytest.fixture(scope="module", autouse=True)
def frozen_imports(warm_up: None) -> None:
    """Exempt imported objects from garbage collection: a pass that raises collects, and would scan all of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def random_numbers() -> None:
    """Tests do not depend on who came before."""
    torch.manual_seed(0)


def mode_flags() -> tuple[bool, bool, bool]:
    """Return what torch keeps for all threads: it is wrong for good once modes were not left in order."""
    return (
        _python_dispatch._is_in_torch_dispatch_mode,
        _python_dispatch._is_in_non_infra_torch_dispatch_mode,
        _python_dispatch._is_in_any_mode_without_ignore_compile_internals,
    )


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Of what is global in torch, whatever raised."""
    before, flags = _get_current_dispatch_mode_stack(), mode_flags()
    yield
    assert _get_current_dispatch_mode_stack() == before, "a dispatch mode stayed on"
    assert mode_flags() == flags, "torch.compile takes a dispatch mode to be on, and compiles nothing"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "hooks for saved tensors stayed on"


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """A test that leaves no process behind."""
    before = children()
    yield
    assert children() <= before
