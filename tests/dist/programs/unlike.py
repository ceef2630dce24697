"""One process of two has another version of a package, or believes in another number of processes."""

import os

import torch

import ps_dist
from ps_core._errors import RanksDiverged

torch.__version__ = os.environ.get("TORCH", torch.__version__)
try:
    ps_dist.connect(timeout_s=5)
except RanksDiverged as error:
    print(error, flush=True)
else:
    raise AssertionError("joined a process that is not alike")
os._exit(0)
