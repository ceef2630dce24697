"""Initial values of a model that was built on ``meta``."""
