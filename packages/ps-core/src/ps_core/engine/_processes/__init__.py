"""One model shared by several processes: shards, gathers and sums, on demand."""
