"""From a program to a plan: policies, arenas, the walk through each segment, bounds, the search."""
