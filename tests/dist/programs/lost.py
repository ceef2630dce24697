"""Rank number LOST ends without a word; the others wait for it, and must not hang."""

import os
import sys
import time

import ps_dist
from ps_core._errors import RanksDiverged

collectives = ps_dist.connect(timeout_s=30)
collectives.barrier()
if collectives.rank == int(os.environ["LOST"]):
    os._exit(7)
started = time.monotonic()
try:
    collectives.barrier()
except RanksDiverged:
    sys.stdout.write(f"seconds: {time.monotonic() - started}\n")
    raise  # the process must be able to end with its own error
else:
    raise AssertionError("the barrier let some processes through alone")
finally:
    collectives.close()
