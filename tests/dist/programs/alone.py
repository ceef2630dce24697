"""One process of two: the other never comes."""

import os

import ps_dist
from ps_core._errors import RanksDiverged

try:
    ps_dist.connect(timeout_s=2)
except RanksDiverged as error:
    print(error, flush=True)
else:
    raise AssertionError("joined a group of one as if it were two")
os._exit(0)
