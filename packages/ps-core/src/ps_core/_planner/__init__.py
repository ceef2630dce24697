"""Make a plan from a program: policies, arenas, the walk through each segment, bounds, the search."""
