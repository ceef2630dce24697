"""Each process adds its rank and one."""

import sys

import ps_dist

collectives = ps_dist.connect(timeout_s=120)
total = collectives.all_reduce_sum(collectives.rank + 1)
sys.stdout.write(f"{collectives.rank}:{total}\n")
sys.stdout.flush()
collectives.close()
