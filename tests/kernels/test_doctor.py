"""``pstar doctor``, which is of the pure core, agrees with the kernels that are installed."""

from __future__ import annotations

from collections.abc import Sequence

import ps_kernels
from ps_core._command.doctor import examine, run, warm


def of_the_kernels(command: Sequence[str]) -> str:
    """The other packages need not be imported for this."""
    if "ps_kernels" not in command[-1]:
        raise FileNotFoundError(command[0])
    return run(command)


def test_the_doctor_says_what_the_kernels_say() -> None:
    """The command's line and the function's answer are one, whatever there is here."""
    found = "; ".join(f"{name}: {state}" for name, state in ps_kernels.backends().items())
    assert examine(runner=of_the_kernels)["ps_kernels"] == " ".join(found.split())


def test_warming_here() -> None:
    lines = warm()
    assert lines[0].startswith(("compiled C: ", "no compiled C: "))
    assert lines[1].startswith("no CUDA kernels to compile: ") or lines[-1].startswith("kept in ")
