"""Compiles the kernels into the wheel where there is a C compiler; without one the wheel is pure Python."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    """An editable install brings no library: it is made at first use, and again whenever its source changes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library to what the wheel holds."""
        if version == "editable":
            return
        build = runpy.run_path(str(Path(self.root) / "src" / "ps_kernels" / "_compile.py"))
        try:
            made = build["compile_into"](Path(self.directory) / "compiled")
        except build["CompileFailed"] as error:
            self.app.display_warning(f"ps-kernels is built without its compiled kernels: {error}")
            return
        build_data["force_include"][str(made)] = f"ps_kernels/{made.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
