"""Write and read checkpoints, and weights in files."""
