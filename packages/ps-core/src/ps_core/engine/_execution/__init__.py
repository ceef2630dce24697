"""Passes, drivers, plans carried out, and the hooks on a model."""
