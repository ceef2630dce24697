"""Rank 0 ends; rank 1 waits for it, and must not hang."""

import os
import time

import ps_dist
from ps_core._errors import RanksDiverged

collectives = ps_dist.connect(timeout_s=30)
collectives.barrier()
if collectives.rank == 0:
    os._exit(7)
started = time.monotonic()
try:
    collectives.barrier()
except RanksDiverged as error:
    print(error)
    print(time.monotonic() - started, flush=True)
else:
    raise AssertionError("the barrier let one process through alone")
os._exit(0)  # the group is broken: there is nothing left to take down in order
