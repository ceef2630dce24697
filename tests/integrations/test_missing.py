"""An integration whose library is missing says how to install it, and importing the package needs none."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIBRARIES = ("transformers", "accelerate", "lightning")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_is_missing_is_named(library: str) -> None:
    program = (
        f"import sys; sys.modules[{library!r}] = None\n"
        f"try: import ps_core.integrations.{library}\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"this integration needs the library {library}, which is not installed: pip install {library}\n"
    )


def test_the_package_itself_imports_no_library() -> None:
    program = "import sys, ps_core.integrations; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {*LIBRARIES, "torch", "ray"} & set(done.stdout.split())
