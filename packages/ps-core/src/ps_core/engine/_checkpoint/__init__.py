"""Training runs and weights on disk."""
