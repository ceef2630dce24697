"""Store the disk tier in a file, which threads of its own read and write."""
