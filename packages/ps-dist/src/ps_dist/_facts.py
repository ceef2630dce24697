"""What has to be the same on all processes from the start."""

from __future__ import annotations

import sys

import torch

import ps_core
from ps_dist._version import __version__


def own_facts(*, ranks: int, replicate: int, transport: str) -> dict[str, str]:
    """This process's."""
    return {
        "ps-core": ps_core.__version__,
        "ps-dist": __version__,
        "torch": torch.__version__,
        "the byte order": sys.byteorder,
        "the number of processes": str(ranks),
        "replicate": str(replicate),
        "transport": transport,
    }
