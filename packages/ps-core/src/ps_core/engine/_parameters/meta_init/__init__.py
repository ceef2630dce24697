"""Compute initial values of a model that was built on ``meta``."""
