"""Run the command ``pstar-train`` as ``python -m ps_models.train``."""

from __future__ import annotations

import sys

from ps_models.train._main import main

if __name__ == "__main__":
    sys.exit(main())
